"""Checks of what the drafter is given and what it answers, and of how good it could be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.doctor.checks.base import check, judge, needs
from ddtree_lab.doctor.checks.static import needs_dflash
from ddtree_lab.doctor.examination import Examination, Probe
from ddtree_lab.doctor.report import Finding
from ddtree_lab.stages.forward import decoder_layers, run_target
from ddtree_lab.stages.tree import DraftTree, build_tree
from ddtree_lab.stages.walk import walk_tree

STAGES = ("cache", "mask", "verify", "commit", "draft")
TREE_BUDGET = 32


def clean_draft(exam: Examination, text: Sequence[int], tap_layer_ids: Sequence[int] | None = None) -> Tensor:
    """What the drafter says after a text (its last token is the anchor), everything computed afresh.

    Taps come from one forward of the committed text without a cache, the context from these taps at once.
    """
    drafter = exam.pair.drafter
    wanted = drafter.tap_layer_ids if tap_layer_ids is None else tap_layer_ids
    committed = list(text[:-1])
    taps = None
    if wanted:
        exam.num_forwards += 1
        taps = run_target(exam.target, torch.tensor([committed]), None, wanted).taps
    context = drafter.remember(committed, None if taps is None else taps[0])
    return drafter.propose(context, int(text[-1]), exam.pair.embeddings).float().cpu()


@check(
    "first_draft", "draft", "D10 D11 D13", "is the first draft after a prompt what the drafter says on clean input",
    cost=2, unless=[needs("draft")],
)  # fmt: skip
def first_draft(exam: Examination) -> Iterator[Finding]:
    def probe(port: Any) -> Tensor:
        return port.draft(exam.prefilled(port), exam.prompt[-1])

    truth = clean_draft(exam, exam.prompt)
    yield _judge_drafts(
        exam, "first_draft", probe, truth,
        right="taps, context and block are the drafter's own",
        symptom="already the first draft is not the drafter's",
        cause="the block, the taps or the drafter as built differ from its config",
        fix="check in this order: anchor and mask id, tap offsets, positions, rotary settings, windows",
    )  # fmt: skip


def _draft_tolerance(exam: Examination, truth: Tensor) -> float:
    scale = float((truth - truth.mean(-1, keepdim=True)).abs().max())
    return max(exam.tolerance, 1e-4 * scale)


def _judge_drafts(
    exam: Examination, name: str, probe: Probe, truth: Tensor, right: str, symptom: str, cause: str, fix: str
) -> Finding:
    """Compare drafts with those on clean input; a wrong answer's evidence goes by depth."""

    def wrong(answer: Tensor) -> Finding:
        evidence: dict[str, Any] = {"rows_expected": len(truth), "rows_given": len(answer)}
        if answer.shape == truth.shape:
            evidence["errors_by_depth"] = (answer - truth).abs().amax(-1).tolist()
            agree = (answer.argmax(-1) == truth.argmax(-1)).float().mean()
            evidence["same_favourite"] = f"{float(agree):.0%}"
        return Finding(name, "problem", "draft", symptom=symptom, evidence=evidence, cause=cause, fix=fix)

    tolerance = _draft_tolerance(exam, truth)
    return judge(exam, name, probe, truth, STAGES, tolerance=tolerance, right=right, wrong=wrong)


@check(
    "later_drafts", "draft", "D11", "are drafts of later rounds, after rejections, still the drafter's own", cost=12,
    unless=[needs("draft")],
)  # fmt: skip
def later_drafts(exam: Examination) -> Iterator[Finding]:
    """Three rounds along the target's own text, wrong branches in each; the second and third draft."""
    text = [*exam.prompt, *exam.text]
    starts = (len(exam.prompt) + 3, len(exam.prompt) + 4)

    def probe(port: Any) -> Tensor:
        return torch.cat(list(_drafts_along(exam, port))[1:])

    truth = torch.cat([clean_draft(exam, text[:end]) for end in starts])
    yield _judge_drafts(
        exam, "later_drafts", probe, truth,
        right="the drafter's context holds the committed text and nothing else",
        symptom="drafts after a round are not the drafter's own",
        cause="the drafter's context holds rows that are not the committed text's, or lacks some",
        fix="context rows = committed tokens: prompt and accepted path, no noise, no rejected nodes, no bonus token",
    )  # fmt: skip


def _drafts_along(exam: Examination, port: Any) -> Iterator[Tensor]:
    """Drafts of three rounds that accept 2, 0 and 0 drafts of the target's text."""
    state = exam.prefilled(port)
    yield port.draft(state, exam.prompt[-1])
    port.verify(state, exam.tree)
    state = port.commit(state, exam.tree.path(4))
    anchor = exam.text[2]
    yield port.draft(state, anchor)
    vocab = exam.pair.embeddings.vocab_size
    wrong = [(exam.text[3] + i) % vocab for i in (1, 2)]
    tree = DraftTree.from_parents([anchor, *wrong, exam.text[3]], [-1, 0, 0, 0])
    port.verify(state, tree)
    state = port.commit(state, [0])
    yield port.draft(state, exam.text[3])


@check(
    "second_run", "draft", "D18", "does the drafter of a second run know nothing of the first", cost=4,
    unless=[needs("draft")],
)  # fmt: skip
def second_run(exam: Examination) -> Iterator[Finding]:
    text = exam.before(3)
    anchor = exam.text[2]

    def probe(port: Any) -> Tensor:
        port.draft(exam.prefilled(port), exam.prompt[-1])
        return port.draft(exam.prefilled(port, 3), anchor)

    truth = clean_draft(exam, [*text, anchor])
    yield _judge_drafts(
        exam, "second_run", probe, truth,
        right="a second run drafts as if it were the first",
        symptom="the second prompt is drafted otherwise than the first would be",
        cause="the drafter's context of an earlier run is still there",
        fix="start each run with an empty context",
    )  # fmt: skip


@check(
    "tap_offsets", "draft", "D9", "are the taps of the drafter's config the ones it was trained with", cost=48,
    unless=[needs_dflash],
)  # fmt: skip
def tap_offsets(exam: Examination) -> Iterator[Finding]:
    """Acceptance along the target's own text with every tap one layer earlier, as it is, one layer later."""
    last = len(decoder_layers(exam.target)) - 1
    ids = exam.pair.drafter.tap_layer_ids
    means = {}
    for offset in (-1, 0, 1):
        moved = [min(max(i + offset, 0), last) for i in ids]
        kept = [accepted for accepted, _ in rounds_on_clean_text(exam, moved)]
        means[f"{offset:+d}"] = sum(kept) / len(kept)
    best = max(means, key=lambda name: means[name])
    if best != "+0" and means[best] > 1.25 * means["+0"] + 0.25:
        yield Finding(
            "tap_offsets", "problem", "draft",
            symptom=f"with taps moved by {best} the drafter accepts more",
            evidence={"accepted_drafts_by_offset": means},
            cause="target_layer_ids in the drafter's config count layers otherwise than hidden_states[i + 1]",
            fix="move every id by the offset named here, or ask whoever published the drafter",
        )  # fmt: skip
        return
    yield Finding(
        "tap_offsets", "ok", "draft", symptom=f"accepted drafts by offset: {_listed(means)}",
        evidence={"accepted_drafts_by_offset": means},
    )  # fmt: skip


def _listed(means: dict[str, float]) -> str:
    return ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())


def rounds_on_clean_text(
    exam: Examination, tap_layer_ids: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """(accepted drafts, depth) of each round an exact port would run along the target's own text.

    Teacher-forced: every draft is made afresh from clean taps of the true text before it.
    """
    rounds = []
    done = 0  # tokens of the continuation that are written
    while done < len(exam.text) - 1:
        text = [*exam.prompt, *exam.text[:done]]
        tree = build_tree(clean_draft(exam, text, tap_layer_ids), TREE_BUDGET, text[-1])
        accepted = accepted_along(tree, exam.text[done:])
        rounds.append((accepted, tree.depth))
        done += accepted + 1
    return rounds


def accepted_along(tree: DraftTree, text: Sequence[int]) -> int:
    """How many nodes of a tree follow a text from the root on."""
    known = [*text, *[-1] * (tree.depth + 1 - len(text))]  # no child has the token −1
    return walk_tree(tree, [known[depth] for depth in tree.depths]).num_accepted_drafts
