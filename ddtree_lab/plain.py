"""Plain decoding: one token, one pass of the library's own forward. For itself, and where drafting rests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ddtree_lab.pair import Pair
from ddtree_lab.pipeline import Settings, State, take_tokens
from ddtree_lab.stages.cache import fork_cache
from ddtree_lab.stages.draft import extend_context
from ddtree_lab.stages.forward import run_target


def plain_step(
    pair: Pair,
    settings: Settings,
    cache: Cache,
    token_ids: Sequence[int],
    tap_layer_ids: Sequence[int] = (),
) -> tuple[int, Tensor | None]:
    """Run the last token, and choose the next.

    Args:
        cache: all tokens but the last; is extended by it, in place.
        token_ids: the text so far.

    Returns:
        the next token, and the taps of the one that was run, [1, taps_width], if asked for.
    """
    with torch.inference_mode():
        out = run_target(pair.target, torch.tensor([token_ids[-1:]]), cache, tap_layer_ids)
        chosen = settings.sampler.choose(out.logits[0], [len(token_ids)], lambda _: token_ids)
    return chosen[0], None if out.taps is None else out.taps[0]


def rest(
    pair: Pair, settings: Settings, state: State, on_token: Callable[[int], None] = lambda token: None
) -> State:
    """All rounds at once in which a pace leaves drafting out, or until the text ends.

    What as many `run_round`s would give, without a tree, a mask and a walk for each token. The drafter's
    context is given all of their rows at the end.

    Args:
        state: at the beginning of a round; stays as it was.
        on_token: called with every new token.
    """
    assert state.pace is not None and state.pace.resting
    with torch.inference_mode():
        cache = fork_cache(state.cache)
    token_ids, finish_reason = state.token_ids, None
    taps: list[Tensor] = []
    for _ in range(state.pace.resting):
        token, tap = plain_step(pair, settings, cache, token_ids, pair.drafter.tap_layer_ids)
        taps += [] if tap is None else [tap]
        token_ids, finish_reason = take_tokens(settings, token_ids, state.num_prompt_tokens, (token,))
        on_token(token)
        if finish_reason:
            break
    num_steps = len(token_ids) - len(state.token_ids)
    committed = token_ids[len(state.token_ids) - 1 : -1]
    with torch.inference_mode():
        rows = torch.cat(taps) if taps else None
        context = extend_context(pair.drafter, rows, state.context, committed)
    return replace(
        state, token_ids=token_ids, cache=cache, context=context, finish_reason=finish_reason,
        num_rounds=state.num_rounds + num_steps, pace=state.pace.rested(num_steps),
        records={}, stage_seconds={}, first_logits=None,
    )  # fmt: skip
