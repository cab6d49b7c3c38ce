"""The stages of a round, one room each, in the order the data flows.

`cache` and `embedding` set up; `draft` → `tree` → `mask` → `verify` → `walk` → `commit` make a round.
"""
