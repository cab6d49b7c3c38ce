"""Numbers as every face writes them, and which of a round's nodes are drawn."""

from __future__ import annotations

import math
from typing import Any

Row = dict[str, Any]  # a round of a payload


def probability(log_prob: float | None) -> str:
    """A log-probability as a probability; an en dash where it is not known.

    >>> probability(math.log(0.25)), probability(-20.0), probability(None)
    ('0.25', '<0.01', '–')
    """
    if log_prob is None:
        return "–"
    value = math.exp(min(log_prob, 0.0))
    return "<0.01" if value < 0.005 else f"{value:.2f}"


def log_text(log_prob: float) -> str:
    """A log-probability with three digits, as the browser writes it.

    >>> log_text(-0.0004), log_text(-0.051), log_text(-0.357), log_text(-10.09)
    ('0.000', '−0.051', '−0.36', '−10.09')
    """
    size = abs(log_prob)
    return f"{'−' if log_prob <= -0.0005 else ''}{size:.{0 if size >= 99.5 else 2 if size >= 0.0995 else 3}f}"


def step_log_prob(round_: Row, node: int) -> float | None:
    """The drafter's log-probability of a node's token at its depth."""
    own, above = round_["log_probs"][node], round_["log_probs"][round_["parents"][node]]
    return None if own is None or above is None else own - above


def mass(round_: Row) -> float | None:
    """The drafter's expected number of kept drafts."""
    log_probs = round_["log_probs"][1:]
    return None if None in log_probs else math.fsum(map(math.exp, log_probs))


def num_accepted(round_: Row) -> int:
    return round_["states"].count("accepted")


def title(round_: Row, number: int | None = None, num_rounds: int | None = None) -> str:
    """`round 3 of 14: 32 drafted, 5 accepted drafts, 6 emitted tokens, draft mass 4.1`.

    Args:
        number: the round's place in the trace, from 1.
    """
    parts = [f"{len(round_['ids']) - 1} drafted"]
    if round_["target_ids"] is not None:
        parts += [f"{num_accepted(round_)} accepted drafts", f"{len(round_['emitted'])} emitted tokens"]
    if (expected := mass(round_)) is not None:
        parts.append(f"draft mass {expected:.1f}")
    name = "round" if number is None else f"round {number} of {num_rounds}"
    return f"{name}: {', '.join(parts)}"


def is_forced(round_: Row, node: int) -> bool:
    """Whether a node was kept though the target chose another token: somebody forced its path."""
    if round_["states"][node] != "accepted":
        return False
    chosen = round_["target_ids"][round_["parents"][node]]
    return chosen is not None and chosen != round_["ids"][node]


def interest(round_: Row) -> tuple[int, int]:
    """Rounds worth drawing keep many drafts, and not all of them the drafter's favourites."""
    kept = [node for node, state in enumerate(round_["states"]) if state == "accepted"]
    surprises = sum(round_["ranks"][node] > 0 for node in kept)
    return min(surprises, 1) * 2 + len(kept), surprises


def most_interesting(rounds: list[Row]) -> int:
    """The index of the round to show where only one is shown."""
    return max(range(len(rounds)), key=lambda i: interest(rounds[i]))


def shown_nodes(round_: Row, most: int | None) -> list[int]:
    """Nodes to draw: all, or the first `most` and every one that was kept.

    Nodes are in best-first order, so the first ones are a tree again, and the drafter held the others less likely.
    """
    n = len(round_["ids"])
    if most is None or n <= most:
        return list(range(n))
    return [node for node in range(n) if node < most or round_["states"][node] == "accepted"]
