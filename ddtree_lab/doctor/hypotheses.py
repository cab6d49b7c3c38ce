"""From a symptom to its cause: make each known mistake on purpose and see which one gives the same numbers.

A probe is a few calls of a port that return a tensor. If the built-in port with bug B switched on
returns what the examined port returned, and the clean one does not, B explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree_lab.doctor.bugs import Bug
from ddtree_lab.doctor.examination import Examination, PortError, Probe

NUM_NEAREST = 3  # single bugs that come nearest are tried together with every other one


@dataclass(frozen=True)
class Outcome:
    """What a probe gave: a tensor, or the failure it ended in."""

    answer: Tensor | None
    failure: PortError | None = None

    def is_like(self, other: Outcome, tolerance: float) -> bool:
        if self.failure is not None or other.failure is not None:
            return _failed_alike(self.failure, other.failure)
        assert self.answer is not None and other.answer is not None
        if self.answer.shape != other.answer.shape:
            return False
        return distance(self.answer, other.answer) <= tolerance

    def distance_to(self, other: Outcome) -> float:
        """Mean difference; infinite where one failed or the shapes differ."""
        if self.answer is None or other.answer is None or self.answer.shape != other.answer.shape:
            return float("inf")
        return float((self.answer.double() - other.answer.double()).nan_to_num().abs().mean())


def _failed_alike(one: PortError | None, other: PortError | None) -> bool:
    if one is None or other is None:
        return False
    same_error = type(one.error) is type(other.error)
    return one.method == other.method and same_error and (one.error is not None or one.reason == other.reason)


def distance(one: Tensor, other: Tensor) -> float:
    """Largest difference; infinite values count as equal where both have them."""
    both = (one == other) | (one.isinf() & other.isinf())
    return float(torch.where(both, 0.0, (one.double() - other.double()).abs()).max()) if one.numel() else 0.0


def observe(port: object, probe: Probe) -> Outcome:
    """Run a probe on a port; a failure is an outcome too."""
    try:
        return Outcome(probe(port))
    except PortError as failure:
        return Outcome(None, failure)


def explain(
    exam: Examination, seen: Outcome, probe: Probe, stages: Sequence[str], tolerance: float
) -> tuple[Bug, ...] | None:
    """The fewest bugs of these stages that, with those known so far, give what was seen.

    Returns:
        an empty tuple if the known ones alone do; None if nothing does.
    """
    # A text hangs on every stage, so behind something unexplained no bug can give the same one.
    if any(_failed_alike(seen.failure, earlier.failure) or "walk" in stages for earlier in exam.unexplained):
        return None
    known = list(exam.known)
    if known and observe(exam.hypothesis(known), probe).is_like(seen, tolerance):
        return ()
    candidates = [bug for bug in exam.candidates(stages) if bug not in known]
    outcomes = {bug: observe(exam.hypothesis([*known, bug]), probe) for bug in candidates}
    for bug, outcome in outcomes.items():
        if outcome.is_like(seen, tolerance):
            return (bug,)
    is_first = not exam.unexplained
    exam.unexplained.append(seen)
    if seen.failure is not None or not is_first:  # no single bug comes nearest to a failure
        return None
    nearest = sorted(candidates, key=lambda bug: outcomes[bug].distance_to(seen))[:NUM_NEAREST]
    for first, second in ((a, b) for a in nearest for b in candidates if a is not b):
        if observe(exam.hypothesis([*known, first, second]), probe).is_like(seen, tolerance):
            exam.unexplained.pop()
            return (first, second)
    return None
