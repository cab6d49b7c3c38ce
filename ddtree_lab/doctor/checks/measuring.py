"""How good the drafter is by itself, and how much of it the port gets: the question of blame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddtree_lab.doctor.acceptance import Acceptance
from ddtree_lab.doctor.checks.base import check, needs
from ddtree_lab.doctor.checks.drafting import TREE_BUDGET, rounds_on_clean_text
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.loop import decode_with
from ddtree_lab.doctor.material import NUM_TEXT_TOKENS
from ddtree_lab.doctor.report import Finding


@check(
    "acceptance", "draft", "D19 D9", "what could the drafter achieve, and what does the port get", cost=120,
    unless=[needs("draft")],
)  # fmt: skip
def acceptance(exam: Examination) -> Iterator[Finding]:
    """The drafter teacher-forced on clean states along the target's own text, beside the port's own loop."""
    exams = [exam, *(Examination(other, exam.port.inner) for other in exam.material.others)]
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
        decoded = decode_with(
            exam.port, exam.material.prompt, max_new_tokens=NUM_TEXT_TOKENS, tree_budget=TREE_BUDGET
        )
        accepted += decoded.num_accepted_drafts
        depths += decoded.num_drafted_depths
    return Acceptance(tuple(accepted), tuple(depths))
