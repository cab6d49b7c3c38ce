"""Mistakes between the drafted tree and the target's logits: cache, mask, positions, recurrences."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ddtree_lab.compat import is_recurrent, iter_states, set_state
from ddtree_lab.doctor import port as port_module
from ddtree_lab.doctor.bugs.base import RECURRENT, Bug, BuggyPort, replaced
from ddtree_lab.pair import Pair
from ddtree_lab.recurrent import ports as recurrent_ports
from ddtree_lab.recurrent.topology import TreeTopology
from ddtree_lab.stages.cache import make_cache
from ddtree_lab.stages.support import tree_support
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.verify import exact_method, fingerprint

Switch = AbstractContextManager[None]


def no_mask(pair: Pair) -> str:
    return "" if exact_method(pair.target) == "tree" else "this target is verified by paths, without a mask"


def no_recurrence(pair: Pair) -> str:
    modules = tree_support(pair.target).modules
    return no_mask(pair) or ("" if modules else "the target has no recurrent layers")


def no_bare_cache(pair: Pair) -> str:
    alike = all(type(layer) is DynamicLayer for layer in make_cache(pair.target).layers)
    return "the layers of this target's cache are all alike, so a bare cache fits" if alike else ""


def chain_of(tree: DraftTree) -> DraftTree:
    """The tree's nodes in storage order, each the parent of the next: what a port sees that ignores the tree."""
    return DraftTree.from_parents(tree.token_ids, np.arange(-1, tree.num_nodes - 1))


def bare_cache(port: BuggyPort) -> Switch:
    return replaced(port_module, "make_cache", lambda _: lambda target: DynamicCache())


def flattened(port: BuggyPort) -> Switch:
    return replaced(port, "verify_method", lambda _: "flattened")


def conv_by_index(port: BuggyPort) -> Switch:
    def make(columns: Any) -> Any:
        return lambda self, kernel_size, device: columns(
            TreeTopology(chain_of(self.tree)), kernel_size, device
        )

    return replaced(TreeTopology, "conv_columns", make)


def conv_window_empty(port: BuggyPort) -> Switch:
    def make(conv: Any) -> Any:
        return lambda inputs, window, *args: conv(inputs, torch.zeros_like(window), *args)

    return replaced(recurrent_ports, "tree_conv", make)


def conv_off_by_one(port: BuggyPort) -> Switch:
    """The committed window is one column too old: the newest committed input is missing, the oldest is there twice."""

    def make(conv: Any) -> Any:
        return lambda inputs, window, *args: conv(
            inputs, torch.cat([window[:, :1], window[:, :-1]], dim=1), *args
        )

    return replaced(recurrent_ports, "tree_conv", make)


def recurrence_by_index(port: BuggyPort) -> Switch:
    def make(ancestors: Any) -> Any:
        return lambda self, device: ancestors(TreeTopology(chain_of(self.tree)), device)

    return replaced(TreeTopology, "ancestors", make)


def empty_state(port: BuggyPort) -> Switch:
    def make(rule: Any) -> Any:
        return lambda q, k, v, decay, beta, state, ancestors: rule(
            q, k, v, decay, beta, torch.zeros_like(state), ancestors
        )

    return replaced(recurrent_ports, "tree_delta_rule", make)


def verify_writes(port: BuggyPort) -> Switch:
    def make(verify: Any) -> Any:
        def verified(target: Any, cache: Any, tree: DraftTree, *args: Any, **kwargs: Any) -> Any:
            verification = verify(target, cache, tree, *args, **kwargs)
            last = tree.path(tree.num_nodes - 1)
            for i, factors in verification.factors.items():
                factors.commit(cache.layers[i], last)
            for i, states in verification.states.items():  # of a flattened pass
                for name, _, tensor in states:
                    set_state(cache.layers[i], name, tensor)
            return replace(verification, committed=fingerprint(cache))

        return verified

    return replaced(port_module, "verify_tree", make)


def coarse_states(port: BuggyPort) -> Switch:
    def make(commit: Any) -> Any:
        def committed(target: Any, cache: Any, *args: Any) -> None:
            commit(target, cache, *args)
            for layer in filter(is_recurrent, cache.layers):
                for name, _, tensor in list(iter_states(layer)):
                    if name == "recurrent_states":
                        set_state(layer, name, tensor.to(torch.bfloat16).to(tensor.dtype))

        return committed

    return replaced(port_module, "commit_path", make)


BUGS = (
    Bug(
        "bare_cache", "cache",
        "the first forward dies with an AttributeError, ValueError or IndexError inside the cache",
        "the cache was made without the target's config, so every layer got the class of a full-attention layer",
        "make it with DynamicCache(config=…) of the decoder's config, or ddtree_lab.make_cache(target)",
        bare_cache, RECURRENT, no_bare_cache, ("PB160", "PB161"),
    ),
    Bug(
        "flattened_recurrence", "verify",
        "it runs, accepts little more than the chain, and the text is not the target's own",
        "recurrent layers never see the tree mask: they run the nodes in storage order as one chain, so every node "
        "after the first sibling is scored on the wrong state, and the state is not rewound afterwards",
        "give each recurrent layer the tree: its parent's state and its ancestors' conv window "
        "(verify_tree(method='tree')), or verify the paths as batch rows",
        flattened, RECURRENT, no_recurrence, ("PB047", "PB001", "PB002"),
    ),
    Bug(
        "conv_by_index", "verify",
        "the spine is right, siblings and what hangs below them are slightly wrong",
        "the short convolution of recurrent layers runs over the nodes in storage order instead of over ancestors",
        "each node's window is its own input and its last K − 1 ancestors', then the committed window",
        conv_by_index, RECURRENT, no_recurrence, ("PB040", "PB038"),
    ),
    Bug(
        "conv_window_empty", "verify",
        "the first few nodes of every round are wrong",
        "the convolution starts from zeros instead of the committed window",
        "prepend the committed window to the nodes' inputs",
        conv_window_empty, RECURRENT, no_recurrence, ("PB023", "PB026"),
    ),
    Bug(
        "conv_off_by_one", "verify",
        "the first K − 1 nodes of every path are slightly wrong",
        "the committed conv window is read one column off: the newest committed input is missing",
        "the window's newest column is the last committed token's input; the root comes right after it",
        conv_off_by_one, RECURRENT, no_recurrence, ("PB023", "PB038"),
    ),
    Bug(
        "recurrence_by_index", "verify",
        "nodes before the first sibling are right, all after it are wrong",
        "the delta rule runs over the nodes in storage order; their conv windows are right",
        "let each node read its parent's state (the tree UT transform, or a scan that reloads it)",
        recurrence_by_index, RECURRENT, no_recurrence, ("PB047",),
    ),
    Bug(
        "empty_recurrent_state", "verify",
        "a verify pass forgets the prompt; drafts collapse to words that are frequent anywhere",
        "a forward of several tokens starts the recurrence from zeros instead of from the cached state",
        "pass the cached state as the initial state of the chunked kernel (transformers 5.7 and later do)",
        empty_state, RECURRENT, no_recurrence, ("PB004", "PB005"),
    ),
    Bug(
        "verify_writes_states", "verify",
        "verifying twice gives two answers; the text depends on rejected drafts",
        "the verify pass leaves its own recurrent state in the cache",
        "read the committed state and write nowhere until the path is known",
        verify_writes, RECURRENT, no_recurrence, ("PB025", "PB032"),
    ),
    Bug(
        "coarse_state_snapshots", "commit",
        "identical text, fewer accepted drafts; or greedy flips at gaps far above rounding",
        "recurrent states are kept in half precision between rounds",
        "keep snapshots of the recurrent state in float32",
        coarse_states, RECURRENT, no_recurrence, ("PB136",),
    ),
)  # fmt: skip
