"""Mistakes in what the cache holds after a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor

from ddtree_lab.compat import get_state, set_state
from ddtree_lab.doctor import port as port_module
from ddtree_lab.doctor.bugs.base import ATTENTION, RECURRENT, Bug, BuggyPort, replaced
from ddtree_lab.doctor.bugs.verifying import no_mask, no_recurrence
from ddtree_lab.recurrent.conv import window_after
from ddtree_lab.stages.verify import Verification

Switch = AbstractContextManager[None]


def _after_commit(change: Callable[[Any, Any, list[int]], None]) -> Any:
    """A switch that spoils recurrent layers after a commit: `change(layer, factors, path)` for each."""

    def switch(port: BuggyPort) -> Switch:
        def make(commit: Any) -> Any:
            def committed(target: Any, cache: Any, verification: Verification, path: Sequence[int]) -> None:
                commit(target, cache, verification, path)
                for i, factors in verification.factors.items():
                    change(cache.layers[i], factors, verification.tree.path(verification.tree.num_nodes - 1))

            return committed

        return replaced(port_module, "commit_path", make)

    return switch


def _state_of_last_node(layer: Any, factors: Any, last: list[int]) -> None:
    set_state(layer, "recurrent_states", factors.delta.state_after(last)[None])


def _conv_of_all_nodes(layer: Any, factors: Any, last: list[int]) -> None:
    window = get_state(layer, "conv_states")
    everything = range(len(factors.conv_inputs))
    set_state(layer, "conv_states", window_after(factors.conv_inputs, [window[0]], everything)[None])


def _rows_taken(order: Callable[[list[int]], list[int]]) -> Any:
    """A switch that puts other pending rows into the cache: `order(path)` instead of the path's own."""

    def switch(port: BuggyPort) -> Switch:
        def make(commit: Any) -> Any:
            def committed(target: Any, cache: Any, verification: Verification, path: Sequence[int]) -> None:
                wrong = order(list(path))
                rows = {i: _moved(kv, list(path), wrong) for i, kv in verification.rows.items()}
                commit(target, cache, replace(verification, rows=rows), path)

            return committed

        return replaced(port_module, "commit_path", make)

    return switch


def _moved(kv: tuple[Tensor, Tensor], path: list[int], wrong: list[int]) -> tuple[Tensor, Tensor]:
    moved = []
    for part in kv:  # [1, heads, n, width]
        other = part.clone()
        other[:, :, path] = part[:, :, wrong]
        moved.append(other)
    return moved[0], moved[1]


def last_row_lost(port: BuggyPort) -> Switch:
    def make(commit: Any) -> Any:
        def committed(target: Any, cache: Any, verification: Verification, path: Sequence[int]) -> None:
            commit(target, cache, verification, list(path)[: max(1, len(path) - 1)])

        return committed

    return replaced(port_module, "commit_path", make)


BUGS = (
    Bug(
        "state_not_rolled_back", "commit",
        "the text drifts after the first rejected draft, and depends on the drafter",
        "after a rejection the recurrent state still holds the last verified node's, rejected drafts included",
        "put back the state from before the pass and replay the accepted path, or take it from the tree's factors "
        "(commit_path); Cache.crop does not rewind recurrent layers",
        _after_commit(_state_of_last_node), RECURRENT, no_recurrence, ("PB001", "PB011", "PB013", "PB022"),
    ),
    Bug(
        "conv_not_rolled_back", "commit",
        "slightly wrong logits for K − 1 tokens after each rejection",
        "the conv window of recurrent layers keeps the inputs of rejected nodes",
        "rebuild the window from the accepted path's pre-convolution inputs",
        _after_commit(_conv_of_all_nodes), RECURRENT, no_recurrence, ("PB016", "PB023"),
    ),
    Bug(
        "kv_not_compacted", "commit",
        "right while the first branch is accepted, wrong as soon as another one is",
        "the first rows of the verify pass were kept instead of the accepted path's",
        "gather the pending rows of the path before appending them",
        _rows_taken(lambda path: list(range(len(path)))), ATTENTION, no_mask, ("PB055",),
    ),
    Bug(
        "compaction_order", "commit",
        "wrong whenever two or more drafts are accepted in a round",
        "accepted rows are in the cache in the wrong order",
        "append the path's rows from the root downwards",
        _rows_taken(lambda path: [path[0], *reversed(path[1:])]), ATTENTION, no_mask, ("PB055",),
    ),
    Bug(
        "last_accepted_row_lost", "commit",
        "a token is skipped in the cache after every round with an accepted draft",
        "one accepted row too few is committed: accepted drafts and emitted tokens are mixed up",
        "a round commits the anchor and all accepted drafts; only the bonus token stays outside",
        last_row_lost, "", no_mask, ("PB028", "PB182"),
    ),
)  # fmt: skip
