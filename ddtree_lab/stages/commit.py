"""Commit: the cache takes the accepted path, and only that."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ddtree_lab.compat import set_state
from ddtree_lab.recurrent.factors import commit_factors
from ddtree_lab.stages.cache import cache_length, check_cache, fork_cache
from ddtree_lab.stages.forward import continue_target
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.verify import Verification, fingerprint


def commit_path(
    target: PreTrainedModel, cache: Cache, verification: Verification, path: Sequence[int]
) -> None:
    """Extend `cache` by the nodes of a root path; it then equals a fresh prefill of the same tokens.

    Attention layers are given the pending rows of the path through their own `update`, recurrent
    layers the state after its last node. After `method="paths"`, which keeps nothing unless the tree was this one path,
    the path is run once more. After `"flattened"` recurrent layers keep the state of *all* nodes, which is
    what the naive port does and why it is wrong.

    The cache gets new layers and tensors all at once: an exception leaves it as it was, and whoever
    holds the old tensors (a session going back) still has them.

    Args:
        path: node indices, root first, as in `Walk.path`.

    Raises:
        ValueError: no root path of the verified tree, or the cache has moved on since.
    """
    nodes = check_path(verification.tree, path)
    _check_fresh(target, cache, verification)
    fork = fork_cache(cache, clone_states=verification.method == "paths")
    if verification.grown is not None and len(nodes) == verification.tree.num_nodes:
        fork = fork_cache(verification.grown)
    elif verification.method == "paths":
        path_ids = torch.from_numpy(verification.tree.token_ids[nodes])[None]
        continue_target(target, path_ids, fork, logits_to_keep=1)
    else:
        _take_rows(fork, verification, nodes)
    cache.layers = fork.layers


def check_path(tree: DraftTree, path: Sequence[int]) -> list[int]:
    """The path as a list of ints, if it is one of `tree` and starts at the root."""
    nodes = [int(node) for node in path]
    if not nodes or nodes[0] != 0:
        raise ValueError(f"path is {nodes}; it starts with the root, node 0, which is always committed.")
    for parent, node in zip(nodes, nodes[1:], strict=False):
        if not 0 < node < tree.num_nodes or tree.parents[node] != parent:
            raise ValueError(
                f"path has node {node} after node {parent}, but it is no child of it in this tree."
            )
    return nodes


def _check_fresh(target: PreTrainedModel, cache: Cache, verification: Verification) -> None:
    """That the cache holds the very tensors of the verification, which has checked them."""
    if not isinstance(cache, Cache) or not _is_unchanged(cache, verification):
        check_cache(target, cache)  # says more where it is no cache of this target
        raise ValueError(
            f"verification was made when the cache held {verification.past_length} tokens; it holds "
            f"{cache_length(cache)} now and has been written since. Verify the tree again before committing."
        )


def _is_unchanged(cache: Cache, verification: Verification) -> bool:
    now = fingerprint(cache)
    return len(now) == len(verification.committed) and all(
        tensor is then and version == version_then
        for (tensor, version), (then, version_then) in zip(now, verification.committed, strict=True)
    )


def _take_rows(fork: Cache, verification: Verification, nodes: list[int]) -> None:
    path = torch.as_tensor(nodes)
    for i, (keys, values) in verification.rows.items():
        taken = path.to(keys.device)
        fork.layers[i].update(keys.index_select(2, taken), values.index_select(2, taken))
    commit_factors(fork.layers, verification.factors, path)
    for i, states in verification.states.items():
        for name, _, tensor in states:
            set_state(fork.layers[i], name, tensor)
