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
    Goal("round without verify, of the round", 0.25, dict(bench="round", case="all but verify")),
    Goal("import ddtree_lab, seconds", 0.2, dict(bench="start", case="import ddtree_lab"), value=_seconds),
    Goal("show a trace, seconds", 0.5, dict(bench="start", case="show a trace"), value=_seconds),
)


def judge(goal: Goal, rows: Sequence[Row]) -> tuple[float, bool] | None:
    """The measured value of a goal and whether it was reached; None where there is no such row."""
    found = [row for row in rows if all(row.get(name) == value for name, value in goal.where.items())]
    if not found:
        return None
    value = goal.value(found[-1])
    return value, value <= goal.limit if goal.at_most else value >= goal.limit
