"""Which budget pays here: from what rounds cost, and from which rounds each way to decode would have had.

`advise_on` records a text token by token, which answers for every way exactly (`bench.replay`), and then runs them.
`advise` takes rounds that were recorded anyway, with a large budget: a recorded tree contains all smaller ones as
prefixes, so what each would have accepted in that round is known; later rounds would have begun elsewhere in the text,
so there the mean over rounds is what is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree_lab.bench.replay import RECORDED_BUDGET, Replayed, record_text
from ddtree_lab.bench.rows import method_label
from ddtree_lab.budget import AUTO
from ddtree_lab.costs import RoundCosts, costs_of
from ddtree_lab.decode import AUTOREGRESSIVE, Generation, generate
from ddtree_lab.pair import Pair, Prompt
from ddtree_lab.records import Record
from ddtree_lab.trace import Round

if TYPE_CHECKING:
    from rich.table import Table

BUDGETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
Ways = dict[tuple[str, int | str | None], Sequence[Replayed]]  # method and budget → rounds


@dataclass(frozen=True)
class Choice:
    """One way to decode.

    Args:
        method: `"autoregressive"`, `"dflash"` or `"ddtree"`.
        tree_budget: for DDTree, or `"auto"`.
        emitted: tokens a round, foreseen.
        speedup: over plain decoding, after the prefill, foreseen.
        measured: the same, if it was run.
    """

    method: str
    tree_budget: int | str | None
    emitted: float
    speedup: float
    measured: float | None = None

    @property
    def label(self) -> str:
        return method_label(self.method, self.tree_budget)


@dataclass(frozen=True)
class Advice(Record):
    """What each budget would give, and the best.

    Args:
        choices: plain decoding, the chain, and trees of growing budget.
        num_rounds: recorded rounds it is based on.
    """

    choices: tuple[Choice, ...]
    num_rounds: int
    title: str = field(default="")

    @property
    def best(self) -> Choice:
        return max(self.choices, key=lambda choice: choice.speedup)

    def __str__(self) -> str:
        return self.sentence

    @property
    def sentence(self) -> str:
        """The advice in one line."""
        best = self.best
        way = {
            AUTOREGRESSIVE: "plain decoding",
            "dflash": "the chain",
            "ddtree": f"tree budget {best.tree_budget}",
        }
        gain = "" if best.method == AUTOREGRESSIVE else f", {best.speedup:.2f}× plain decoding"
        return f"advice: use {way[best.method]}{gain} (foreseen from {self.num_rounds} rounds and their cost here)"

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(
            title=self.title or "budgets", title_justify="left", caption=self.sentence, caption_justify="left"
        )
        for name in ("method", "emitted, foreseen", "speed-up, foreseen", "speed-up, measured"):
            table.add_column(name, justify="left" if name == "method" else "right")
        for choice in self.choices:
            shown = "" if choice.measured is None else f"{choice.measured:.2f}×"
            mark = " ◆" if choice is self.best else ""
            table.add_row(choice.label + mark, f"{choice.emitted:.2f}", f"{choice.speedup:.2f}×", shown)
        return table

    def to_dict(self) -> dict[str, Any]:
        return {
            "advice": self.sentence, "best": self.best.label, "num_rounds": self.num_rounds,
            "choices": [{**vars(choice), "label": choice.label} for choice in self.choices],
        }  # fmt: skip


def accepted_within(done: Round, budget: int) -> int:
    """Drafts that the round would have accepted with a smaller budget: exact, as its tree is a prefix."""
    return sum(node <= budget for node in done.accepted)


def accepted_by_chain(done: Round) -> int:
    """Drafts that the chain would have accepted: the accepted path as far as it is the drafter's favourites."""
    favourites = [int(done.tree.ranks[node]) == 0 for node in done.accepted]
    return favourites.index(False) if False in favourites else len(favourites)


def costs_seen(generations: Sequence[Generation]) -> RoundCosts | None:
    """What rounds cost in decodes that were made anyway: plain decoding, and others of at least two sizes."""
    plain = [g for g in generations if g.method == AUTOREGRESSIVE and g.num_rounds]
    by_rows: dict[int, float] = {}
    drafts: list[float] = []
    for made in generations:
        rounds = [r for r in made.rounds if r.stage_seconds and r.num_drafted]
        if rounds:
            rows = int(np.median([r.num_drafted for r in rounds])) + 1
            drafts += [r.stage_seconds["draft"] for r in rounds]
            by_rows[rows] = float(
                np.median([sum(r.stage_seconds.values()) - r.stage_seconds["draft"] for r in rounds])
            )
    if not plain or len(by_rows) < 2:
        return None
    sizes = sorted(by_rows)
    seconds = np.maximum.accumulate(
        [by_rows[rows] for rows in sizes]
    )  # what is larger by chance is no cheaper
    plain_seconds = (plain[0].seconds - plain[0].prefill_seconds) / plain[0].num_rounds
    return RoundCosts(tuple(sizes), tuple(seconds.tolist()), float(np.median(drafts)), plain_seconds)


def advise(
    rounds: Sequence[Round], costs: RoundCosts, title: str = "", chain: Sequence[Replayed] = ()
) -> Advice:
    """Foresee each way to decode from recorded rounds.

    Args:
        rounds: recorded with a large tree budget.
        chain: the chain's own rounds on the same texts. Without them it is taken from the trees, as deep as the
            deepest: a tree may lack its last nodes, and then it is valued too low.

    Raises:
        ValueError: no rounds.
    """
    if not rounds:
        raise ValueError("rounds is empty; record a decode first, with a large tree_budget.")
    depth = max(r.tree.depth for r in rounds)
    ways: Ways = {("dflash", None): chain or [Replayed(depth, accepted_by_chain(r) + 1) for r in rounds]}
    for budget in _budgets(costs, max(r.tree.num_drafted for r in rounds)):
        sizes = [min(budget, r.tree.num_drafted) for r in rounds]
        emitted = [accepted_within(r, budget) + 1 for r in rounds]
        ways["ddtree", budget] = [Replayed(*pair) for pair in zip(sizes, emitted, strict=True)]
    return foresee(ways, costs, len(rounds), title)


def foresee(ways: Ways, costs: RoundCosts, num_rounds: int, title: str = "") -> Advice:
    """Speed-ups over plain decoding of ways whose rounds are known.

    Args:
        num_rounds: that were recorded.
    """
    choices = [Choice(AUTOREGRESSIVE, None, 1.0, 1.0)]
    for (method, budget), rounds in ways.items():
        emitted = sum(r.num_emitted for r in rounds)
        seconds = costs.plain_seconds * sum(r.is_plain for r in rounds)
        seconds += float(np.sum(costs.of([r.num_drafted + 1 for r in rounds if not r.is_plain])))
        seconds += costs.draft_seconds * sum(r.has_draft for r in rounds)
        speedup = emitted * costs.plain_seconds / seconds
        choices.append(Choice(method, budget, emitted / len(rounds), speedup))
    return Advice(tuple(choices), num_rounds, title)


def _budgets(costs: RoundCosts, largest: int) -> list[int]:
    return [budget for budget in BUDGETS if budget <= min(largest, costs.largest_budget)]


def advise_on(
    pair: Pair,
    prompts: Sequence[Prompt],
    temperature: float = 0.0,
    *,
    max_new_tokens: int = 100,
    seed: int = 0,
) -> Advice:
    """Record the prompts token by token, foresee every way to decode them, then run all of them.

    Raises:
        ValueError: no prompt, or none whose text is longer than a token.
    """
    settings: dict[str, Any] = dict(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    costs = costs_of(pair)
    texts = [(prompt, record_text(pair, prompt, **settings)) for prompt in prompts]
    texts = [(prompt, recording) for prompt, recording in texts if recording.trees]
    if not texts:
        raise ValueError("prompts: none gives a text of two tokens; there is nothing to foresee.")
    prompts, recordings = zip(*texts, strict=True)
    ways: Ways = {("dflash", None): [r for one in recordings for r in one.chain_rounds()]}
    for budget in _budgets(costs, RECORDED_BUDGET):
        ways["ddtree", budget] = [r for one in recordings for r in one.tree_rounds(budget)]
    ways["ddtree", AUTO] = [r for one in recordings for r in one.adaptive_rounds(costs)]
    title = f"{prompts[0].domain}, temperature {temperature:g}, {len(prompts)} prompts"
    foreseen = foresee(ways, costs, sum(len(one.trees) for one in recordings), title)
    measured = _speedups(pair, prompts, foreseen, settings)
    choices = tuple(replace(choice, measured=measured[choice.label]) for choice in foreseen.choices)
    return replace(foreseen, choices=choices)


def _speedups(
    pair: Pair, prompts: Sequence[Prompt], advice: Advice, settings: dict[str, Any]
) -> dict[str, float]:
    """Speed-ups over plain decoding of each choice, after the prefill, prompt by prompt in turns; the median."""
    ups: dict[str, list[float]] = {}
    for i, prompt in enumerate(prompts):
        seconds = {}
        for choice in _turned(advice.choices, i):
            budget: dict[str, Any] = {} if choice.tree_budget is None else {"tree_budget": choice.tree_budget}
            made = generate(pair, prompt, choice.method, **budget, **settings)
            seconds[choice.label] = made.seconds - made.prefill_seconds  # of the same tokens
        for label, taken in seconds.items():
            ups.setdefault(label, []).append(seconds[AUTOREGRESSIVE] / taken)
    return {label: float(np.median(values)) for label, values in ups.items()}


def _turned(choices: Sequence[Choice], by: int) -> Iterator[Choice]:
    yield from (choices[(i + by) % len(choices)] for i in range(len(choices)))
