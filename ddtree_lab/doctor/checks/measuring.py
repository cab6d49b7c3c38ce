"""How good the drafter is by itself, and how much of it the port gets: the question of blame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddtree_lab.doctor.acceptance import Acceptance
from ddtree_lab.doctor.checks.base import check
from ddtree_lab.doctor.checks.drafting import TREE_BUDGET, clean_draft, rounds_on_clean_text
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.loop import decode_with
from ddtree_lab.doctor.material import NUM_TEXT_TOKENS, Material
from ddtree_lab.doctor.report import Finding
from ddtree_lab.stages.tree import DraftTree


@check(
    "acceptance", "draft", "D19 D9", "what could the drafter achieve, and what does the port get", cost=120,
)  # fmt: skip
def acceptance(exam: Examination) -> Iterator[Finding]:
    """The drafter teacher-forced on clean states along the target's own text, beside the port's own loop.

    A port that does not draft is given the drafter's drafts on clean states: what it then loses is its own doing.
    """
    exams = [exam, *(_same_port(exam, other) for other in exam.material.others)]
    rounds = [pair for each in exams for pair in rounds_on_clean_text(each)]
    intrinsic = exam.intrinsic = Acceptance(*(tuple(column) for column in zip(*rounds, strict=True)))
    achieved = exam.achieved = _achieved(exams)
    yield Finding(
        "acceptance", "note", "draft",
        symptom=f"emitted tokens a round: {achieved.emitted_tokens:.2f} by the port, {intrinsic.emitted_tokens:.2f} "
        "by the drafter on clean states" + ("" if exam.port.has("draft") else " (which also drafted for the port)"),
        evidence={
            "tree_budget": TREE_BUDGET,
            "port_interval": achieved.interval(),
            "drafter_interval": intrinsic.interval(),
            "port_by_depth": achieved.by_depth(),
            "drafter_by_depth": intrinsic.by_depth(),
            "rounds": {"port": len(achieved.accepted), "drafter": len(intrinsic.accepted)},
        },
    )  # fmt: skip


def _same_port(exam: Examination, other: Material) -> Examination:
    """The port on another prompt, with what is known of its failures."""
    same = Examination(other, exam.port.inner)
    same.port = exam.port
    return same


def _achieved(exams: Sequence[Examination]) -> Acceptance:
    accepted: list[int] = []
    depths: list[int] = []
    for exam in exams:
        port = exam.port if exam.port.has("draft") else _DraftedFor(exam)
        decoded = decode_with(
            port, exam.material.prompt, max_new_tokens=NUM_TEXT_TOKENS, tree_budget=TREE_BUDGET
        )
        accepted += decoded.num_accepted_drafts
        depths += decoded.num_drafted_depths
    return Acceptance(tuple(accepted), tuple(depths))


class _DraftedFor:
    """A port without a draft(), with drafts made on clean states."""

    def __init__(self, exam: Examination) -> None:
        self.exam, self.port = exam, exam.port

    def prefill(self, input_ids: Tensor) -> _State:
        return _State(input_ids[0].tolist(), self.port.prefill(input_ids))

    def draft(self, state: _State, anchor_token_id: int) -> Tensor:
        return clean_draft(self.exam, [*state.token_ids, anchor_token_id])

    def verify(self, state: _State, tree: DraftTree) -> Tensor:
        state.tree = tree
        return self.port.verify(state.inner, tree)

    def commit(self, state: _State, path: Sequence[int]) -> _State:
        assert state.tree is not None
        tokens = state.tree.token_ids[list(path)].tolist()
        return _State([*state.token_ids, *tokens], self.port.commit(state.inner, path))


@dataclass
class _State:
    """The committed tokens, the port's own state, and the tree it verified last."""

    token_ids: list[int]
    inner: Any
    tree: DraftTree | None = None
