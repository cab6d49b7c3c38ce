"""From a symptom to its cause: make each known mistake on purpose and see which one gives the same numbers.

A probe is a few calls of a port that return rows of numbers. If the built-in port with bug B switched on
returns what the examined port returned, and the clean one does not, B explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddtree_lab.doctor.bugs import Bug
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.guarded import Guarded, PortError
from ddtree_lab.doctor.truth import row_distance

Probe = Callable[[Any], Tensor]
NUM_NEAREST = 3  # single bugs that come nearest are tried together with every other one


@dataclass(frozen=True)
class Outcome:
    """What a probe gave: rows of numbers, or the failure it ended in."""

    answer: Tensor | None
    failure: PortError | None = None

    def excess(self, other: Outcome, slack: Tensor) -> float:
        """Largest difference over what rounding explains: 1 at most for two right ways to the same thing.

        0 for failures of the same kind, infinite where only one failed or the shapes differ.
        """
        if self.failure is not None and other.failure is not None:
            return 0.0 if self.failure.is_like(other.failure) else float("inf")
        if self.answer is None or other.answer is None or self.answer.shape != other.answer.shape:
            return float("inf")
        apart = row_distance(self.answer, other.answer)
        return float((apart / slack if len(slack) == len(apart) else apart / slack.min()).max())

    def distance(self, other: Outcome) -> float:
        """Mean difference; infinite where one failed or the shapes differ."""
        if self.answer is None or other.answer is None or self.answer.shape != other.answer.shape:
            return float("inf")
        return float((self.answer.double() - other.answer.double()).nan_to_num(0, 1e30, -1e30).abs().mean())


def observe(port: object, probe: Probe) -> Outcome:
    """Run a probe on a port; a failure is an outcome too."""
    try:
        return Outcome(probe(port))
    except PortError as failure:
        return Outcome(None, failure)


@dataclass
class Search:
    """The search for what explains one outcome.

    Args:
        key: names the probe; what bugs give on it is remembered with the material.
    """

    exam: Examination
    key: str
    seen: Outcome
    probe: Probe
    slack: Tensor

    def excess(self, bugs: Sequence[Bug]) -> float:
        return self._outcome(bugs).excess(self.seen, self.slack)

    def distance(self, bugs: Sequence[Bug]) -> float:
        return self._outcome(bugs).distance(self.seen)

    def moves(self, bug: Bug) -> bool:
        """Whether a bug by itself changes what the probe gives."""
        return self._outcome([bug]).excess(self._outcome([]), self.slack) > 0

    def _outcome(self, bugs: Sequence[Bug]) -> Outcome:
        remembered = self.exam.material.outcomes
        key = (self.key, tuple(bug.name for bug in bugs))
        if key not in remembered:
            remembered[key] = observe(self._port(bugs), self.probe)
        return remembered[key]

    def _port(self, bugs: Sequence[Bug]) -> Guarded:
        """A new port for every probe, but one for the probes of a family (`family: …`), which share their calls."""
        family, _, member = self.key.partition(": ")
        if not member:
            return self.exam.hypothesis(bugs)
        key = (family, tuple(bug.name for bug in bugs))
        ports = self.exam.material.hypotheses
        return ports.setdefault(key, self.exam.hypothesis(bugs)) if key not in ports else ports[key]

    def single(self, known: Sequence[Bug], candidates: Sequence[Bug]) -> Bug | None:
        """The first bug that gives the very same numbers, or else the nearest of those within rounding."""
        alike: dict[Bug, float] = {}
        for bug in candidates:
            excess = self.excess([*known, bug])
            if excess == 0:
                return bug
            if excess <= 1:
                alike[bug] = self.distance([*known, bug])
        return min(alike, key=lambda bug: alike[bug]) if alike else None

    def double(self, known: Sequence[Bug], candidates: Sequence[Bug]) -> tuple[Bug, Bug] | None:
        """Two bugs that give the same numbers together, one of them among those that come nearest alone."""
        moving = [bug for bug in candidates if self.moves(bug)]
        moving.sort(key=lambda bug: self.distance([*known, bug]))
        for first in moving[:NUM_NEAREST]:
            for second in moving:
                if first is not second and self.excess([*known, first, second]) <= 1:
                    return first, second
        return None


def explain(
    exam: Examination, key: str, seen: Outcome, probe: Probe, stages: Sequence[str], slack: Tensor
) -> tuple[Bug, ...] | None:
    """The fewest bugs of these stages that, with those known so far, give what was seen.

    Args:
        stages: where the cause may be, the likeliest first.

    Returns:
        an empty tuple if the known ones alone do; None if nothing does.
    """
    # A method that fails for an unknown reason may fail again for it; and a text hangs on every stage, so behind
    # something unexplained no bug can give the same one.
    failed_before = {earlier.failure.method for earlier in exam.unexplained if earlier.failure}
    if (seen.failure and seen.failure.method in failed_before) or (exam.unexplained and "walk" in stages):
        return None
    search = Search(exam, key, seen, probe, slack)
    known = list(exam.known)
    if search.excess(known) <= 1:
        if known:
            return ()
        # The built-in port does the same: it runs on a registered port that is wrong.
        exam.unexplained.append(seen)
        return None
    candidates = [bug for bug in exam.candidates(stages) if bug not in known]
    if (one := search.single(known, candidates)) is not None:
        return (one,)
    is_first = not exam.unexplained
    two = search.double(known, candidates) if seen.failure is None and is_first else None
    if two is None:
        exam.unexplained.append(seen)
    return two
