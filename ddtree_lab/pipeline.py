"""The order of the stages: one decode as a chain of immutable states.

    draft → tree → mask → verify → walk → commit, then the next round

`advance` runs the next stage and returns a new state; the old one stays valid, down to the cache
tensors. `decode.generate` follows the chain to its end, `Session` holds on to every link of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache

from ddtree_lab.budget import AUTO, Pace
from ddtree_lab.costs import RoundCosts, clock, costs_of
from ddtree_lab.pair import Pair
from ddtree_lab.records import Record
from ddtree_lab.sampling import Sampler
from ddtree_lab.stages.cache import (
    LayerReport,
    cache_length,
    describe_cache,
    make_cache,
    shallow_copy,
    sliding_windows,
)
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.draft import Context, Draft, draft_block, extend_context
from ddtree_lab.stages.forward import prefill
from ddtree_lab.stages.mask import TreeMask, build_mask
from ddtree_lab.stages.tree import DraftTree, build_chain, build_tree
from ddtree_lab.stages.verify import Verification, verify_tree
from ddtree_lab.stages.walk import Walk, walk_tree

STAGES = ("draft", "tree", "mask", "verify", "walk", "commit")


@dataclass(frozen=True)
class Settings:
    """What stays the same over a decode.

    Args:
        method: `"dflash"` (chain) or `"ddtree"`.
        tree_budget: drafted nodes at most, the root not counted, or `"auto"`; the chain does not use it.
        max_new_tokens: exact, unless an end comes first.
        eos_token_ids: each ends the text and is its last token.
        stop: text so far (prompt included) → whether it ends here; asked after every token.
        verify_method: as in `verify_tree`.
        costs: of a round, for `"auto"`.
    """

    method: str = "ddtree"
    tree_budget: int | str = 32
    max_new_tokens: int = 100
    sampler: Sampler = field(default_factory=Sampler)
    eos_token_ids: frozenset[int] = frozenset()
    stop: Callable[[tuple[int, ...]], bool] | None = None
    verify_method: str = "auto"
    costs: RoundCosts | None = None

    @property
    def is_adaptive(self) -> bool:
        """Whether every round chooses its own budget."""
        return self.method == "ddtree" and self.tree_budget == AUTO

    def __post_init__(self) -> None:
        if self.method not in ("dflash", "ddtree"):
            raise ValueError(f"method is {self.method!r}; choose 'autoregressive', 'dflash' or 'ddtree'.")
        budget = self.tree_budget
        if budget != AUTO and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
            raise ValueError(
                f"tree_budget is {budget!r}; give a whole number of drafted nodes, 0 or more, or {AUTO!r}."
            )
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; give at least 1.")


def settings_for(
    pair: Pair,
    *,
    method: str,
    tree_budget: int | str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    verify_method: str,
) -> Settings:
    """Settings from what a user says, the pair's ends of sequence added, and its costs where they are asked for."""
    return with_costs(
        pair,
        Settings(
            method=method,
            tree_budget=tree_budget,
            max_new_tokens=max_new_tokens,
            sampler=Sampler.from_settings(temperature, top_k, top_p, seed),
            eos_token_ids=pair.eos_token_ids,
            verify_method=verify_method,
        ),
    )


def with_costs(pair: Pair, settings: Settings) -> Settings:
    """Settings that know what a round costs, if they choose budgets by it."""
    return replace(settings, costs=costs_of(pair)) if settings.is_adaptive else settings


@dataclass(frozen=True, eq=False)
class Commit(Record):
    """What a round left behind.

    Args:
        path: committed nodes, root first.
        token_ids: emitted tokens; the last one is the next anchor, not in the cache yet.
        cache_length: tokens the cache holds now.
        num_context_rows: rows of the drafter's context now, one for each token in the cache.
        finish_reason: `"eos"`, `"length"`, `"stop"`, or None while it goes on.
        tree: the round's, where it is known; for pictures.
        layers: of the target's cache, as described before the first round; for pictures.
    """

    path: tuple[int, ...]
    token_ids: tuple[int, ...]
    cache_length: int
    num_context_rows: int
    finish_reason: str | None
    tree: DraftTree | None = None
    layers: tuple[LayerReport, ...] = ()

    def __rich__(self) -> str:
        end = f"; the text ends ({self.finish_reason})" if self.finish_reason else ""
        return (
            f"commit: nodes {list(self.path)} into the cache, which holds {self.cache_length} tokens; "
            f"emitted {list(self.token_ids)}, the last is the next anchor{end}"
        )


@dataclass(frozen=True, eq=False)
class State:
    """A decode between two stages.

    Args:
        token_ids: prompt and emitted tokens. The last is the anchor, which the target has not run on.
        cache: the target's, holding all of them but the anchor.
        context: the drafter's, with a row for each token in the cache.
        records: what the stages of this round have returned so far, by name.
        stage_seconds: their durations.
        first_logits: the logits that gave the first token, [1, vocab], until the first round.
        pace: what the rounds so far have taught, where each chooses its own budget.
        layers: of the cache, as described once after the prefill.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    cache: Cache
    context: Context
    num_rounds: int = 0
    finish_reason: str | None = None
    records: dict[str, Record] = field(default_factory=dict)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    first_logits: Tensor | None = None
    pace: Pace | None = None
    layers: tuple[LayerReport, ...] = ()

    @property
    def anchor_token_id(self) -> int:
        return self.token_ids[-1]

    @property
    def new_token_ids(self) -> tuple[int, ...]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def next_stage(self) -> str | None:
        """The stage `advance` would run, or None at the end of the text."""
        if "commit" in self.records:
            return None if self.finish_reason else STAGES[0]
        if not self.records and self.finish_reason:
            return None
        return STAGES[len(self.records)]

    def remaining(self, settings: Settings) -> int:
        """Tokens that may still be emitted."""
        return settings.max_new_tokens - len(self.new_token_ids)


def start(pair: Pair, input_ids: Int[Tensor, "1 rows"], settings: Settings) -> State:
    """Prefill the prompt and choose the first token, the first anchor."""
    cache = make_cache(pair.target)
    out = prefill(pair.target, input_ids, cache, pair.drafter.tap_layer_ids)
    prompt = tuple(input_ids[0].tolist())
    first = settings.sampler.choose(out.logits[0], [len(prompt)], lambda _: prompt)[0]
    token_ids, finish_reason = take_tokens(settings, prompt, len(prompt), (first,))
    context = extend_context(pair.drafter, None if out.taps is None else out.taps[0], token_ids=prompt)
    pace = Pace(settings.costs) if settings.is_adaptive and settings.costs else None
    return State(
        token_ids, len(prompt), cache, context,
        finish_reason=finish_reason, first_logits=out.logits[0], pace=pace,
        layers=describe_cache(cache).layers,
    )  # fmt: skip


def advance(pair: Pair, settings: Settings, state: State) -> State:
    """Run the next stage. The given state and all it holds stay as they were.

    Raises:
        ValueError: the text has ended.
    """
    stage = state.next_stage
    if stage is None:
        raise ValueError(f"the text has ended ({state.finish_reason}); there is no next stage.")
    if "commit" in state.records:  # the round before is over
        state = replace(state, records={}, stage_seconds={})
    began = clock()
    record, changes = _RUN[stage](pair, settings, state)
    seconds = {**state.stage_seconds, stage: clock() - began}
    return replace(state, records={**state.records, stage: record}, stage_seconds=seconds, **changes)


def run_round(pair: Pair, settings: Settings, state: State) -> State:
    """Advance to the end of the round."""
    state = advance(pair, settings, state)
    while "commit" not in state.records:
        state = advance(pair, settings, state)
    return state


def _draft(pair: Pair, settings: Settings, state: State) -> tuple[Draft, dict[str, Any]]:
    is_last = state.remaining(settings) == 1  # the target's own next token is all that is left to emit
    if is_last or (state.pace is not None and not state.pace.drafts):
        nothing = torch.empty(0, pair.embeddings.vocab_size)
        return Draft(nothing, state.anchor_token_id, state.context.num_rows), {}
    return draft_block(pair.drafter, pair.embeddings, state.context, state.anchor_token_id), {}


def _tree(pair: Pair, settings: Settings, state: State) -> tuple[DraftTree, dict[str, Any]]:
    draft = _record(state, "draft", Draft)
    # The round emits one token more than it accepts, so deeper drafts could never be used.
    logits = draft.logits[: state.remaining(settings) - 1]
    if settings.method == "dflash":
        tree = build_chain(logits, state.anchor_token_id)
    elif state.pace is not None:
        tree = state.pace.best_prefix(build_tree(logits, state.pace.limit, state.anchor_token_id))
    else:
        tree = build_tree(logits, int(settings.tree_budget), state.anchor_token_id)
    if math.isinf(tree.log_probs[-1]):  # scores never increase: what the drafter holds impossible comes last
        tree = tree.prefix(int(np.isfinite(tree.log_probs[1:]).sum()))  # without rows that cannot pay
    return tree, {}


def _mask(pair: Pair, settings: Settings, state: State) -> tuple[TreeMask, dict[str, Any]]:
    tree = _record(state, "tree", DraftTree)
    past_length, windows = cache_length(state.cache), sliding_windows(state.cache)
    return build_mask(tree, past_length, pair.embeddings.dtype, pair.embeddings.device, windows), {}


def _verify(pair: Pair, settings: Settings, state: State) -> tuple[Verification, dict[str, Any]]:
    tree = _record(state, "tree", DraftTree)
    is_plain = tree.num_nodes == 1 and settings.is_adaptive and settings.verify_method == "auto"
    verification = verify_tree(
        pair.target,
        state.cache,
        tree,
        "paths" if is_plain else settings.verify_method,  # a step of plain decoding, and no dearer
        mask=_record(state, "mask", TreeMask),
        tap_layer_ids=pair.drafter.tap_layer_ids,
    )
    return verification, {}


def _walk(pair: Pair, settings: Settings, state: State) -> tuple[Walk, dict[str, Any]]:
    verification = _record(state, "verify", Verification)
    tree = verification.tree
    past_length = len(state.token_ids)
    positions = [past_length + depth for depth in tree.depths.tolist()]  # of the token after each node
    target_tokens = settings.sampler.choose(verification.logits, positions, node_prefix(state, tree))
    return walk_tree(tree, target_tokens), {}


def node_prefix(state: State, tree: DraftTree) -> Callable[[int], list[int]]:
    """Node → the text up to and including it."""
    return lambda node: [*state.token_ids, *tree.token_ids[tree.path(node)[1:]].tolist()]


def _commit(pair: Pair, settings: Settings, state: State) -> tuple[Commit, dict[str, Any]]:
    walk = _record(state, "walk", Walk)
    verification = _record(state, "verify", Verification)
    token_ids, finish_reason = take_tokens(settings, state.token_ids, state.num_prompt_tokens, walk.token_ids)
    emitted = token_ids[len(state.token_ids) :]
    path = walk.path[: len(emitted)]  # an end inside the path cuts it: its last token stays outside the cache
    cache = shallow_copy(state.cache)  # is given new layers; the state before keeps the old ones
    commit_path(pair.target, cache, verification, path)
    taps = verification.taps
    if taps is not None:
        taps = taps.index_select(0, torch.tensor(path, device=taps.device))
    committed = (state.anchor_token_id, *emitted[:-1])  # what the path's nodes hold
    context = extend_context(pair.drafter, taps, state.context, committed)
    pace = state.pace and state.pace.after(verification.tree, walk.num_accepted_drafts, len(emitted))
    record = Commit(
        path, emitted, cache_length(cache), context.num_rows, finish_reason, verification.tree, state.layers
    )
    changes = dict(
        token_ids=token_ids,
        cache=cache,
        context=context,
        num_rounds=state.num_rounds + 1,
        finish_reason=finish_reason,
        first_logits=None,
        pace=pace,
    )
    return record, changes


_RUN: dict[str, Callable[[Pair, Settings, State], tuple[Record, dict[str, Any]]]] = {
    "draft": _draft,
    "tree": _tree,
    "mask": _mask,
    "verify": _verify,
    "walk": _walk,
    "commit": _commit,
}


def take_tokens(
    settings: Settings, token_ids: tuple[int, ...], num_prompt_tokens: int, emitted: tuple[int, ...]
) -> tuple[tuple[int, ...], str | None]:
    """The text with emitted tokens appended one by one, up to its end if that comes."""
    num_new = len(token_ids) - num_prompt_tokens
    for count, token in enumerate(emitted, start=1):
        if token in settings.eos_token_ids:
            return (*token_ids, *emitted[:count]), "eos"
        if num_new + count >= settings.max_new_tokens:
            return (*token_ids, *emitted[:count]), "length"
        if settings.stop is not None and settings.stop((*token_ids, *emitted[:count])):
            return (*token_ids, *emitted[:count]), "stop"
    return (*token_ids, *emitted), None


def _record(state: State, stage: str, kind: type) -> Any:
    record = state.records[stage]
    assert isinstance(record, kind)
    return record
