"""Decoding: plain, with the DFlash chain, with DDTree. Each gives the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.costs import clock
from ddtree_lab.pair import Pair, Prompt
from ddtree_lab.pipeline import (
    Settings,
    run_round,
    settings_for,
    start,
    take_tokens,
)
from ddtree_lab.plain import plain_step, rest
from ddtree_lab.recording import make_trace, record_round
from ddtree_lab.records import Record
from ddtree_lab.stages.cache import make_cache
from ddtree_lab.stages.forward import prefill
from ddtree_lab.trace import Round, Trace

AUTOREGRESSIVE = "autoregressive"
Tell = Callable[[Sequence[int]], None]
DECODING_METHODS = (AUTOREGRESSIVE, "dflash", "ddtree")


@dataclass(frozen=True, eq=False)
class RoundSummary:
    """The two counts of a round that everything else is made of.

    Args:
        num_accepted_drafts: drafted tokens kept.
        num_emitted_tokens: accepted drafts and the bonus token.
        num_drafted: nodes verified, the root not counted.
        stage_seconds: duration of each stage.
    """

    num_accepted_drafts: int
    num_emitted_tokens: int
    num_drafted: int
    stage_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Generation(Record):
    """A finished decode.

    Args:
        token_ids: new tokens, the end-of-sequence token included if one came.
        text: of those tokens, without special ones.
        method: `"autoregressive"`, `"dflash"` or `"ddtree"`.
        tree_budget: for DDTree.
        rounds: one summary a target pass after the prefill.
        seconds: prefill and everything after it.
        prefill_seconds: the part of `seconds` until the first token.
        finish_reason: `"eos"`, `"length"` or `"stop"`.
        trace: what was recorded, if asked for.
    """

    token_ids: tuple[int, ...]
    text: str
    method: str
    tree_budget: int | str | None
    rounds: tuple[RoundSummary, ...]
    seconds: float
    prefill_seconds: float
    finish_reason: str
    trace: Trace | None = None

    @property
    def num_emitted_tokens(self) -> int:
        """New tokens: the one of the prefill and those of the rounds."""
        return len(self.token_ids)

    @property
    def num_rounds(self) -> int:
        """Target passes after the prefill."""
        return len(self.rounds)

    @property
    def mean_accepted_drafts(self) -> float:
        """Drafted tokens kept a round."""
        return sum(r.num_accepted_drafts for r in self.rounds) / max(1, self.num_rounds)

    @property
    def mean_emitted_tokens(self) -> float:
        """Tokens emitted a round (accepted drafts and bonus; the paper's acceptance length τ)."""
        return sum(r.num_emitted_tokens for r in self.rounds) / max(1, self.num_rounds)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over all the time it took, the prefill included."""
        return self.num_emitted_tokens / self.seconds

    def __repr__(self) -> str:
        budget = f", budget {self.tree_budget}" if self.tree_budget is not None else ""
        return (
            f"Generation({self.method}{budget}: {self.num_emitted_tokens} tokens in {self.num_rounds} rounds, "
            f"{self.mean_accepted_drafts:.2f} accepted drafts a round, {self.tokens_per_second:.0f} tokens/s)"
        )

    def __rich__(self) -> str:
        from rich.markup import escape

        return f"{escape(self.text)}\n\n[dim]{escape(repr(self))}[/]"


def generate(
    pair: Pair,
    prompt_or_ids: str | Prompt | Sequence[int] | Tensor,
    method: str = "ddtree",
    tree_budget: int | str = 32,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    record: bool = False,
    *,
    verify_method: str = "auto",
    on_tokens: Tell | None = None,
) -> Generation:
    """Decode one prompt.

    Args:
        prompt_or_ids: text (put through the chat template), a bundled `Prompt`, or ids [P] or [1, P].
        method: `"autoregressive"` (one token a pass), `"dflash"` (chain) or `"ddtree"`. They give the
            same tokens; only the number of target passes differs.
        tree_budget: drafted nodes a round at most, the root not counted. `"auto"`: every round takes the budget
            that should emit most tokens a second, by what rounds cost here (measured at first use) and by
            what the drafter expects.
        temperature: 0 is greedy. Above, noise is keyed by (seed, position), so sampled text is the same
            for every method too.
        top_k, top_p: as in `transformers`; they have no effect on greedy decoding.
        record: keep every round in `.trace`.
        verify_method: as in `verify_tree`; `"flattened"` shows what a naive port does.
        on_tokens: called with the new tokens after the prefill and after every round.

    Raises:
        ValueError: naming the argument that cannot be used.

    Example:
        >>> import ddtree_lab as dl
        >>> pair = dl.load_pair()  # doctest: +SKIP
        >>> dl.generate(pair, "Count from 3 to 8.", tree_budget=32).text  # doctest: +SKIP
    """
    if method not in DECODING_METHODS:
        raise ValueError(f"method is {method!r}; choose one of {', '.join(map(repr, DECODING_METHODS))}.")
    said: dict[str, Any] = dict(
        method=method, tree_budget=tree_budget, max_new_tokens=max_new_tokens,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, verify_method=verify_method,
    )  # fmt: skip
    # Plain decoding has no rounds; the chain will do for its settings, for it measures no costs.
    settings = settings_for(pair, **{**said, "method": "dflash" if method == AUTOREGRESSIVE else method})
    input_ids = pair.encode(prompt_or_ids)
    tell = on_tokens or (lambda tokens: None)
    if method == AUTOREGRESSIVE:
        if record:
            raise ValueError("record=True needs rounds to record; use method 'dflash' or 'ddtree'.")
        run = _autoregressive(pair, input_ids, settings, tell)
    else:
        run = _speculative(pair, input_ids, settings, tell, record)
    trace = None
    if record:
        prompt_token_ids = tuple(input_ids[0].tolist())
        trace = make_trace(pair, prompt_token_ids, run.token_ids[0], run.recorded, said, run.finish_reason)
    return Generation(
        token_ids=run.token_ids,
        text=pair.decode(run.token_ids),
        method=method,
        tree_budget=tree_budget if method == "ddtree" else None,
        rounds=tuple(run.rounds),
        seconds=run.seconds,
        prefill_seconds=run.prefill_seconds,
        finish_reason=run.finish_reason,
        trace=trace,
    )


@dataclass
class _Run:
    """What a loop gives back; its clock leaves out the time spent on recording."""

    token_ids: tuple[int, ...] = ()
    rounds: list[RoundSummary] = field(default_factory=list)
    recorded: list[Round] = field(default_factory=list)
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    finish_reason: str = ""


# Both loops keep their tensors to themselves, so that they can run in inference mode: on small models a tenth of the
# time goes into what autograd would want to know. A `Session` shows its tensors to whoever asks, and runs without.


def _autoregressive(pair: Pair, input_ids: Tensor, settings: Settings, tell: Tell) -> _Run:
    """Plain decoding, the reference: one token, one pass, the library's own forward."""
    run, began = _Run(), clock()
    cache = make_cache(pair.target)
    prompt = tuple(input_ids[0].tolist())
    with torch.inference_mode():
        logits = prefill(pair.target, input_ids, cache).logits
        token = settings.sampler.choose(logits[0], [len(prompt)])[0]
    token_ids, finish_reason = take_tokens(settings, prompt, len(prompt), (token,))
    run.prefill_seconds = clock() - began
    tell([token])
    while not finish_reason:
        token, _ = plain_step(pair, settings, cache, token_ids)
        token_ids, finish_reason = take_tokens(settings, token_ids, len(prompt), (token,))
        run.rounds.append(RoundSummary(0, 1, 0))
        tell([token])
    run.seconds = clock() - began
    run.token_ids, run.finish_reason = token_ids[len(prompt) :], finish_reason
    return run


def _speculative(pair: Pair, input_ids: Tensor, settings: Settings, tell: Tell, record: bool) -> _Run:
    """The pipeline, round after round."""
    run, began = _Run(), clock()
    with torch.inference_mode():
        state = start(pair, input_ids, settings)
    run.prefill_seconds = run.seconds = clock() - began
    tell(state.new_token_ids)
    while not state.finish_reason:
        before, began = state, clock()
        if state.pace is not None and state.pace.resting and not record:
            state = rest(pair, settings, state, lambda token: tell([token]))
            seconds, num_steps = clock() - began, state.num_rounds - before.num_rounds
            run.seconds += seconds
            run.rounds += [RoundSummary(0, 1, 0, {"verify": seconds / num_steps})] * num_steps
            continue
        with torch.inference_mode():
            state = run_round(pair, settings, state)
        run.seconds += clock() - began
        done = record_round(before, state, with_log_probs=record)
        run.recorded += [done] if record else []
        run.rounds.append(
            RoundSummary(
                done.num_accepted_drafts, done.num_emitted_tokens, done.tree.num_drafted, state.stage_seconds
            )
        )
        tell(done.emitted_token_ids)
    run.token_ids, run.finish_reason = state.new_token_ids, state.finish_reason
    return run
