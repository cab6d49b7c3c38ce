"""How good the drafter is by itself, and how much of it the port gets: the question of blame."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddtree_lab.doctor.acceptance import Acceptance
from ddtree_lab.doctor.checks.base import check, needs_dflash
from ddtree_lab.doctor.checks.drafting import clean_draft
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.loop import decode_with
from ddtree_lab.doctor.material import NUM_TEXT_TOKENS, Material
from ddtree_lab.doctor.report import Finding
from ddtree_lab.stages.forward import decoder_layers
from ddtree_lab.stages.tree import DraftTree, build_tree
from ddtree_lab.stages.walk import walk_tree

TREE_BUDGET = 32


@check(
    "tap_offsets", "draft", "D9", "are the taps of the drafter's config the ones it was trained with", cost=75,
    unless=[needs_dflash],
)  # fmt: skip
def tap_offsets(exam: Examination) -> Iterator[Finding]:
    """Acceptance along the target's own text with every tap one layer earlier, as it is, one layer later."""
    last = len(decoder_layers(exam.target)) - 1
    ids = exam.pair.drafter.tap_layer_ids
    kept = {
        f"{offset:+d}": Acceptance(
            *zip(*rounds_on_clean_text(exam, [min(max(i + offset, 0), last) for i in ids]), strict=True)
        )
        for offset in (-1, 0, 1)
    }
    means = {name: each.emitted_tokens - 1 for name, each in kept.items()}
    best = max(means, key=lambda name: means[name])
    evidence = {"accepted_drafts_by_offset": means, "rounds": len(kept["+0"].accepted)}
    # A few rounds differ by chance: only intervals that lie apart count.
    if kept[best].interval()[0] > kept["+0"].interval()[1]:
        yield Finding(
            "tap_offsets", "problem", "draft",
            symptom=f"with taps moved by {best} the drafter accepts more",
            evidence=evidence,
            cause="target_layer_ids in the drafter's config count layers otherwise than hidden_states[i + 1]",
            fix="move every id by the offset named here, or ask whoever published the drafter",
        )  # fmt: skip
        return
    yield Finding(
        "tap_offsets",
        "ok",
        "draft",
        symptom=f"accepted drafts by offset: {_listed(means)}",
        evidence=evidence,
    )


def _listed(means: dict[str, float]) -> str:
    return ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())


def rounds_on_clean_text(
    exam: Examination, tap_layer_ids: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """(accepted drafts, depth) of each round an exact port would run along the target's own text.

    Teacher-forced: every draft is made afresh from clean taps of the true text before it.
    """
    material = exam.material
    key = tuple(exam.pair.drafter.tap_layer_ids if tap_layer_ids is None else tap_layer_ids)
    if key in material.rounds:
        return material.rounds[key]
    rounds = []
    done = 0  # tokens of the continuation that are written
    while done < len(material.text) - 1:
        text = [*material.prompt, *material.text[:done]]
        tree = build_tree(clean_draft(exam, text, key), TREE_BUDGET, text[-1])
        accepted = accepted_along(tree, material.text[done:])
        rounds.append((accepted, tree.depth))
        done += accepted + 1
    material.rounds[key] = rounds
    return rounds


def accepted_along(tree: DraftTree, text: Sequence[int]) -> int:
    """How many nodes of a tree follow a text from the root on."""
    known = [*text, *[-1] * (tree.depth + 1 - len(text))]  # no child has the token −1
    return walk_tree(tree, [known[depth] for depth in tree.depths]).num_accepted_drafts


def no_modes(exam: Examination) -> str:
    if exam.material.message is None:
        return "the prompt was given as token ids"
    return "" if _template(exam) else "the tokenizer has no chat template"


def _template(exam: Examination) -> str:
    return str(getattr(exam.pair.tokenizer, "chat_template", None) or "")


@check(
    "prompt_modes", "draft", "D20", "does the drafter like the prompt as it is put: template, thinking or plain text",
    cost=240, unless=[no_modes],
)  # fmt: skip
def prompt_modes(exam: Examination) -> Iterator[Finding]:
    """Acceptance along the target's own text after the same message put in other ways."""
    ways: dict[str, dict[str, Any]] = {"chat template": {"raw": False}, "plain text": {"raw": True}}
    if "enable_thinking" in _template(exam):
        ways |= {"thinking": {"enable_thinking": True}, "no thinking": {"enable_thinking": False}}
    kept, examined = dict[str, Acceptance](), "neither"
    for name, options in ways.items():
        ids = exam.pair.encode(str(exam.material.message), **options)[0].tolist()
        if len(ids) < 2:
            continue
        is_examined = ids == exam.material.prompt
        material = exam.material if is_examined else Material(exam.pair, ids)
        examined = name if is_examined else examined
        kept[name] = Acceptance(*zip(*rounds_on_clean_text(_same_port(exam, material)), strict=True))
        exam.material.truth.num_forwards += 0 if is_examined else material.truth.num_forwards
    means = {name: each.emitted_tokens for name, each in kept.items()}
    best = max(kept, key=lambda name: means[name])
    worse = examined in kept and kept[examined].interval()[1] < kept[best].interval()[0]
    hint = f"; the drafter seems to be trained on {best}" if worse else ""
    yield Finding(
        "prompt_modes", "note", "draft",
        symptom=f"emitted tokens a round by the drafter on clean states: {_listed(means)}; examined: {examined}{hint}",
        evidence={
            "emitted_tokens": means,
            "intervals": {name: each.interval() for name, each in kept.items()},
            "template_sha256": hashlib.sha256(_template(exam).encode()).hexdigest()[:12],
        },
    )  # fmt: skip


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
