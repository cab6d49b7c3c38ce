"""Tree-structured recurrences: what a recurrent layer does when its input is a tree, not a chain.

`gated_delta` is the state, `conv` the short convolution before it, `naive` their slow and obvious
twins, `ports` the module classes of the library that use them.
"""
