"""What was set out to be reached, and where in the rows it is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_lab.bench.rows import Row


@dataclass(frozen=True)
class Goal:
    """A limit of one field of the row that has the other fields.

    Args:
        text: in words.
        limit: of the value.
        where: fields of the row.
        at_most: whether the value is to stay below.
        value: the row's value.
    """

    text: str
    limit: float
    where: dict[str, Any]
    at_most: bool = True
    value: Callable[[Row], float] = lambda row: float(row["ratio"])


@dataclass(frozen=True)
class Judgement:
    """What came of a goal.

    Args:
        bound: no value could be better, whatever is done about the rest, where that is known.
        label: the choice that gave the value, where there were several.
    """

    value: float
    is_met: bool
    bound: float | None = None
    label: str = ""


def _seconds(row: Row) -> float:
    return float(row["seconds"])


_EMBEDDED = dict(subject="embedded", nodes=33)
_TREE = dict(bench="tree", case="build_tree")

GOALS = (
    Goal("verify, embedded pair, 33 nodes", 0.80, dict(bench="verify", case="tree", **_EMBEDDED)),
    Goal(
        "verify, hidden 1024, 65 nodes",
        0.92,
        dict(bench="verify", case="tree", subject="hidden 1024", nodes=65),
    ),
    Goal(
        "verify, 27B width, bfloat16, 65 nodes",
        0.95,
        dict(bench="verify", case="tree", subject="27B width", nodes=65),
    ),
    Goal(
        "builder after top-k, budget 1,024, compiled (extra fast)",
        0.1,
        dict(bench="tree", case="compiled", budget=1024, part="after top-k"),
    ),
    *(
        Goal(
            f"builder, budget {budget:,} (the heap itself up to 64)",
            1.02,
            dict(budget=budget, part="whole", **_TREE),
        )
        for budget in (16, 64, 256, 1024)
    ),
    Goal("mask, of a verify pass", 0.02, dict(bench="stage", case="mask", **_EMBEDDED)),
    Goal("commit, of a verify pass", 0.05, dict(bench="stage", case="commit", **_EMBEDDED)),
    Goal("commit, hidden 1024", 0.05, dict(bench="stage", case="commit", subject="hidden 1024", nodes=65)),
    Goal("session back, of its step", 0.01, dict(bench="session", case="back")),
    *(
        Goal(
            f"round without verify, of the round, budget {budget}",
            0.25,
            dict(bench="round", case="all but verify", budget=budget),
        )
        for budget in (32, 64)
    ),
    Goal("import ddtree_lab, seconds", 0.2, dict(bench="start", case="import ddtree_lab"), value=_seconds),
    Goal("show a trace, seconds", 0.5, dict(bench="start", case="show a trace"), value=_seconds),
    *(
        Goal(
            f"{domain}, T {temperature:g}: {text}",
            limit,
            where | dict(domain=domain, temperature=temperature),
            False,
        )
        for domain, temperatures, best, tree in (("chat", (0, 1), 3.5, 2.5), ("docs", (0, 0.7), 1.3, 1.2))
        for temperature in temperatures
        for text, limit, where in (
            ("speed-up, best of chain and trees", best, dict(bench="decode", case="best")),
            ("speed-up, tree at its best budget", tree, dict(bench="decode", case="tree")),
            ("auto, of the best fixed choice", 0.97, dict(bench="decode", case="auto")),
        )
    ),
)


def judge(goal: Goal, rows: Sequence[Row]) -> Judgement | None:
    """What was measured of a goal; None where there is no such row."""
    found = [row for row in rows if all(row.get(name) == value for name, value in goal.where.items())]
    if not found:
        return None
    row = found[-1]
    value = goal.value(row)
    is_met = value <= goal.limit if goal.at_most else value >= goal.limit
    return Judgement(value, is_met, row.get("bound"), row.get("label", ""))
