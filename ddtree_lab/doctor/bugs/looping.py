"""Mistakes in the loop around the stages: walk, stopping, sampling, what is carried from run to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from ddtree_lab.compat import get_state, is_recurrent, set_state
from ddtree_lab.doctor import loop as loop_module
from ddtree_lab.doctor import port as port_module
from ddtree_lab.doctor.bugs.base import RECURRENT, Bug, BuggyPort, dflash, replaced
from ddtree_lab.doctor.bugs.drafting import no_dflash
from ddtree_lab.doctor.bugs.verifying import no_recurrence
from ddtree_lab.pair import Pair
from ddtree_lab.sampling import Sampler
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.walk import Walk

Switch = AbstractContextManager[None]


def no_end(pair: Pair) -> str:
    return "" if pair.eos_token_ids else "the pair has no end-of-sequence token"


def _wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[BuggyPort], Switch]:
    return lambda port: replaced(owner, name, make)


def _bonus_of_parent(walk_tree: Any) -> Any:
    def walked(tree: Any, tokens: Sequence[int]) -> Walk:
        walk = walk_tree(tree, tokens)
        if len(walk.path) < 2:
            return walk
        wrong = list(walk.target_token_ids)
        wrong[walk.path[-1]] = wrong[walk.path[-2]]
        return replace(walk, target_token_ids=tuple(wrong))

    return walked


def _rank_zero_only(walk_tree: Any) -> Any:
    """Accept a node because the drafter liked it best, not because the target chose it."""

    def walked(tree: Any, tokens: Sequence[int]) -> Walk:
        path = [0]
        while children := list(tree.children(path[-1]).values()):
            path.append(min(children))
            if len(path) > 2:
                break
        wrong = [int(token) for token in tokens]
        for node, child in zip(path, path[1:], strict=False):
            wrong[node] = int(tree.token_ids[child])
        return Walk(tuple(path), tuple(wrong))

    return walked


def _nothing_drafted(drafted_tree: Any) -> Any:
    return lambda port, state, anchor, tree_budget: DraftTree.from_parents([anchor], [-1])


def _ends_ignored(cut: Any) -> Any:
    return lambda tokens, room, ends: cut(tokens, room, frozenset())


def _limit_ignored(cut: Any) -> Any:
    return lambda tokens, room, ends: cut(tokens, len(tokens), ends)


def mask_token_deleted(port: BuggyPort) -> Switch:
    mask_token_id = dflash(port.pair).config.mask_token_id

    def make(decode: Any) -> Any:
        def decoded(*args: Any, **kwargs: Any) -> Any:
            result = decode(*args, **kwargs)
            result.token_ids = [token for token in result.token_ids if token != mask_token_id]
            return result

        return decoded

    return replaced(port_module, "decode_with", make)


def _temperature_lost(from_settings: Any) -> Any:
    return staticmethod(lambda temperature=0.0, **kwargs: from_settings(0.0, **kwargs))


def _sharpened(choose: Any) -> Any:
    """Draws from a sharper distribution than the target's, with noise of their own."""

    def chosen(self: Sampler, logits: Any, positions: Sequence[int], prefix: Any = None) -> list[int]:
        other = replace(self, seed=self.seed + 1) if self.do_sample else self
        return choose(other, logits * 1.5, positions, prefix)

    return chosen


def states_leak(port: BuggyPort) -> Switch:
    """The first run's convolution windows are there when the next prompt is run."""

    def make(prefill: Any) -> Any:
        def prefilled(target: Any, ids: Any, cache: Any, *args: Any) -> Any:
            out = prefill(target, ids, cache, *args)
            now = {
                i: get_state(layer, "recurrent_states")
                for i, layer in enumerate(cache.layers)
                if is_recurrent(layer)
            }
            for i, tensor in port.memory.get("states", {}).items():
                set_state(cache.layers[i], "recurrent_states", tensor)
            port.memory.setdefault("states", now)
            return out

        return prefilled

    return replaced(port_module, "prefill", make)


BUGS = (
    Bug(
        "bonus_from_parent", "walk",
        "one wrong token a round, always the last",
        "the bonus token is read at the parent of the last accepted node",
        "read it where the walk ended: the target's token at the last node of the path",
        _wrapped(loop_module, "walk_tree", _bonus_of_parent), references=("PB095", "PB182"),
    ),
    Bug(
        "accepts_without_target", "walk",
        "acceptance is high and the text is the drafter's",
        "nodes are accepted along the drafter's favourites without comparing them with the target's token",
        "descend only into a child that is the target's own token at the node",
        _wrapped(loop_module, "walk_tree", _rank_zero_only), references=("PB145",),
    ),
    Bug(
        "past_end_of_sequence", "walk",
        "text goes on after the end-of-sequence token",
        "accepted drafts after an end of sequence are emitted, and the loop goes on",
        "cut the round's tokens at the first end of sequence and stop",
        _wrapped(loop_module, "cut", _ends_ignored), hindrance=no_end, references=("PB178",),
    ),
    Bug(
        "length_overshot", "walk",
        "more tokens than max_new_tokens",
        "a whole round is emitted before the length is checked",
        "cut the last round to what is left",
        _wrapped(loop_module, "cut", _limit_ignored), references=("PB179", "PB181"),
    ),
    Bug(
        "token_deleted_by_value", "walk",
        "a token is missing here and there",
        "every output token that equals the mask id is deleted, also those the target wrote",
        "never filter output by value: drafted noise is not among the emitted tokens anyway",
        mask_token_deleted, hindrance=no_dflash,
    ),
    Bug(
        "temperature_lost", "walk",
        "sampled runs are all alike",
        "the temperature does not reach the verifier, which takes the argmax",
        "draw from the target's distribution at each node, at the temperature of the request",
        _wrapped(Sampler, "from_settings", _temperature_lost), references=("PB176",),
    ),
    Bug(
        "wrong_distribution", "walk",
        "sampled text is duller (or wilder) than the target's own",
        "tokens are accepted by a ratio that is not the target's distribution, e.g. p/q with drafts taken by argmax",
        "draw one token from the target at each node and descend while it is a child",
        _wrapped(Sampler, "choose", _sharpened), references=("PB176",),
    ),
    Bug(
        "never_drafts", "draft",
        "the text is right and no faster than without a drafter",
        "the loop falls back to plain decoding without a word: a support test, a flag or a missing head says no",
        "let a fallback say so, and count drafted tokens a round",
        _wrapped(loop_module, "_drafted_tree", _nothing_drafted), references=("PB014", "PB085"),
    ),
    Bug(
        "states_leak_between_runs", "cache",
        "the first prompt is right, every later one is not",
        "recurrent states of an earlier run are still there when the next prompt starts",
        "start each run from a new cache (make_cache)",
        states_leak, RECURRENT, no_recurrence, ("PB029", "PB140", "PB142"),
    ),
)  # fmt: skip
