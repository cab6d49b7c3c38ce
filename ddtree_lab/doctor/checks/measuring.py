"""How good the drafter is by itself, and how much of it the port gets: the question of blame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ddtree_lab.doctor.checks.base import check, needs
from ddtree_lab.doctor.checks.drafting import TREE_BUDGET, rounds_on_clean_text
from ddtree_lab.doctor.examination import NUM_TEXT_TOKENS, Examination
from ddtree_lab.doctor.loop import decode_with
from ddtree_lab.doctor.report import Finding


@dataclass(frozen=True)
class Acceptance:
    """Accepted drafts of many rounds.

    Args:
        accepted: drafts kept, a number a round.
        depths: drafts that could have been kept.
    """

    accepted: tuple[int, ...]
    depths: tuple[int, ...]

    @property
    def emitted_tokens(self) -> float:
        """Accepted drafts and the bonus token, mean over rounds."""
        return float(np.mean(self.accepted)) + 1

    def interval(self) -> tuple[float, float]:
        """95 % of the mean emitted tokens over resampled rounds."""
        rng = np.random.default_rng(0)
        draws = rng.choice(np.asarray(self.accepted), size=(2000, len(self.accepted))).mean(1) + 1
        return float(np.percentile(draws, 2.5)), float(np.percentile(draws, 97.5))

    def by_depth(self) -> list[float]:
        """Share of rounds that keep the draft at depth d, of those that got there and had one."""
        shares = []
        for depth in range(1, max(self.depths, default=0) + 1):
            there = [
                a for a, d in zip(self.accepted, self.depths, strict=True) if a >= depth - 1 and d >= depth
            ]
            if not there:
                break
            shares.append(sum(a >= depth for a in there) / len(there))
        return shares


@check(
    "acceptance", "draft", "D19 D9", "what could the drafter achieve, and what does the port get", cost=120,
    unless=[needs("draft")],
)  # fmt: skip
def acceptance(exam: Examination) -> Iterator[Finding]:
    """The drafter teacher-forced on clean states along the target's own text, beside the port's own loop."""
    exams = [exam, *exam.others]
    rounds = [pair for each in exams for pair in rounds_on_clean_text(each)]
    intrinsic = exam.intrinsic = Acceptance(*(tuple(column) for column in zip(*rounds, strict=True)))
    achieved = exam.achieved = _achieved(exams)
    yield Finding(
        "acceptance", "note", "draft",
        symptom=f"emitted tokens a round: {achieved.emitted_tokens:.2f} by the port, {intrinsic.emitted_tokens:.2f} "
        "by the drafter on clean states",
        evidence={
            "tree_budget": TREE_BUDGET,
            "port_interval": achieved.interval(),
            "drafter_interval": intrinsic.interval(),
            "port_by_depth": achieved.by_depth(),
            "drafter_by_depth": intrinsic.by_depth(),
            "rounds": {"port": len(achieved.accepted), "drafter": len(intrinsic.accepted)},
        },
    )  # fmt: skip


def _achieved(exams: Sequence[Examination]) -> Acceptance:
    accepted: list[int] = []
    depths: list[int] = []
    for exam in exams:
        decoded = decode_with(exam.port, exam.prompt, max_new_tokens=NUM_TEXT_TOKENS, tree_budget=TREE_BUDGET)
        accepted += decoded.num_accepted_drafts
        depths += decoded.num_drafted_depths
    return Acceptance(tuple(accepted), tuple(depths))
