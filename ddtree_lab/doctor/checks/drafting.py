"""Checks of what the drafter is given, how it is built, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.doctor.bugs.base import dflash
from ddtree_lab.doctor.checks.base import Unseen, check, judge, needs, needs_dflash, row_errors
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.hooks import disturbed
from ddtree_lab.doctor.hypotheses import Probe
from ddtree_lab.doctor.report import Finding
from ddtree_lab.doctor.truth import NUM_DISTURBED, Known, slack_of
from ddtree_lab.drafter import DFlashConfig
from ddtree_lab.records import ranges
from ddtree_lab.stages.forward import decoder_layers, run_target
from ddtree_lab.stages.tree import DraftTree

STAGES = ("draft", "commit", "verify", "mask", "cache")


def clean_draft(exam: Examination, text: Sequence[int], tap_layer_ids: Sequence[int] | None = None) -> Tensor:
    """What the drafter says after a text (its last token is the anchor), everything computed afresh.

    Taps come from one forward of the committed text without a cache, the context from these taps at once.
    """
    wanted = exam.pair.drafter.tap_layer_ids if tap_layer_ids is None else tap_layer_ids
    taps = _taps(exam, text[:-1], wanted)
    return _drafted(exam, text, None if taps is None else taps[0])


def _taps(exam: Examination, committed: Sequence[int], wanted: Sequence[int], rows: int = 1) -> Tensor | None:
    """[rows, token, width] taps of a text."""
    if not wanted:
        return None
    exam.material.truth.num_forwards += 1
    ids = torch.tensor([list(committed)]).expand(rows, -1)
    return run_target(exam.target, ids, None, wanted, logits_to_keep=1).taps


def _drafted(exam: Examination, text: Sequence[int], taps: Tensor | None) -> Tensor:
    drafter = exam.pair.drafter
    context = drafter.remember(list(text[:-1]), taps)
    return drafter.propose(context, int(text[-1]), exam.pair.embeddings).float().cpu()


def known_draft(exam: Examination, text: Sequence[int]) -> Known:
    """The clean draft after a text, and how far taps disturbed by rounding move it."""
    wanted = exam.pair.drafter.tap_layer_ids
    draft = clean_draft(exam, text)
    spread = torch.zeros(len(draft))
    if wanted:
        with disturbed(exam.target, reset=False):
            moved = _taps(exam, text[:-1], wanted, NUM_DISTURBED)
        assert moved is not None
        drafts = torch.stack([_drafted(exam, text, taps) for taps in moved])
        spread = (drafts - draft).abs().nan_to_num(0).amax((0, 2))
    finite = draft.where(draft.isfinite(), 0.0)
    return Known(draft, slack_of(spread, finite))


@check(
    "draft_block", "draft", "D10", "is a block the anchor and mask tokens, all of them rows of the embedding", cost=1,
    unless=[needs_dflash, needs("draft")],
)  # fmt: skip
def draft_block(exam: Examination) -> Iterator[Finding]:
    """The tokens that are looked up in the target's embedding while the port drafts."""
    config, anchor = dflash(exam.pair).config, exam.material.prompt[-1]
    wanted = torch.tensor([anchor] + [config.mask_token_id] * (config.block_size - 1))[:, None]

    def probe(port: Any) -> Tensor:
        state, looked_up = exam.prefilled(port), list[Tensor]()
        handle = exam.pair.embeddings.input.register_forward_pre_hook(
            lambda m, args: looked_up.append(args[0])
        )
        try:
            port.draft(state, anchor)
        finally:
            handle.remove()
        if len(looked_up) != 1 or looked_up[0].ndim != 2:
            raise Unseen("draft", "does not look its block up in the target's embedding")
        return looked_up[0].reshape(-1, 1).double().cpu()

    yield judge(
        exam, "draft_block", probe, Known.exactly(wanted), STAGES,
        right=f"anchor and {config.block_size - 1} × token {config.mask_token_id}",
        wrong=lambda answer: Finding(
            "draft_block", "problem", "draft",
            symptom=f"the block is {answer[:, 0].int().tolist()}, {wanted[:, 0].tolist()} is right",
            evidence={"rows": len(answer), "block_size": config.block_size},
            cause="the block is not [anchor, mask × (block_size − 1)]",
            fix="read mask_token_id and block_size from the drafter's config.json",
        ),
    )  # fmt: skip


@check(
    "taps", "draft", "D9 D11", "does the drafter's fusion read the hidden states it was trained on, a row a token",
    cost=4, unless=[needs_dflash, needs("draft")],
)  # fmt: skip
def taps(exam: Examination) -> Iterator[Finding]:
    """What enters the fusion while the port prefills, beside hidden_states[i + 1] of the tapped layers."""
    committed, ids = exam.material.before(), exam.pair.drafter.tap_layer_ids
    clean = _taps(exam, committed, ids)
    with disturbed(exam.target, reset=False):
        moved = _taps(exam, committed, ids, NUM_DISTURBED)
    assert clean is not None and moved is not None
    rows = clean[0].float().cpu()
    known = Known(rows, slack_of((moved.float().cpu() - rows).abs().amax((0, 2)), rows))

    def probe(port: Any) -> Tensor:
        fused = list[Tensor]()
        handle = dflash(exam.pair).fc.register_forward_pre_hook(lambda m, args: fused.append(args[0]))
        try:
            port.draft(exam.prefilled(port), exam.material.prompt[-1])
        finally:
            handle.remove()
        if not fused:
            raise Unseen("prefill", "does not run the drafter's own fusion")
        return fused[0].reshape(-1, fused[0].shape[-1]).float().cpu()

    def wrong(answer: Tensor) -> Finding:
        evidence = row_errors(known, answer) if answer.shape != rows.shape else {
            "difference_by_offset": _by_offset(exam, committed, answer)
        }  # fmt: skip
        return Finding(
            "taps", "problem", "draft",
            symptom="the drafter's fusion does not read the hidden states of the layers in its config",
            evidence=evidence,
            cause="taps are taken from other layers, before or after a norm, or of other tokens",
            fix="tap i is what decoder layer i returns, hidden_states[i + 1], one row a committed token",
        )  # fmt: skip

    yield judge(
        exam, "taps", probe, known, ("draft",),
        right=f"layers {list(ids)}, {len(rows)} rows of root mean square "
        + ", ".join(f"{float(part.square().mean().sqrt()):.2g}" for part in rows.chunk(len(ids), dim=-1)),
        wrong=wrong,
    )  # fmt: skip


def _by_offset(exam: Examination, committed: Sequence[int], answer: Tensor) -> dict[str, float]:
    """Mean difference of what was read from the taps one layer earlier, as configured, one layer later."""
    last = len(decoder_layers(exam.target)) - 1
    found = {}
    for offset in (-1, 0, 1):
        moved = _taps(
            exam, committed, [min(max(i + offset, 0), last) for i in exam.pair.drafter.tap_layer_ids]
        )
        assert moved is not None
        found[f"{offset:+d}"] = float((moved[0].float().cpu() - answer).abs().mean())
    return found


@check(
    "drafter_windows", "draft", "D14",
    "does each of the drafter's layers see its window, and no later row where it is causal", cost=2,
    unless=[needs_dflash, needs("draft")],
)  # fmt: skip
def drafter_windows(exam: Examination) -> Iterator[Finding]:
    """What hides rows from each layer while the port drafts, beside the config's own words."""
    drafter = dflash(exam.pair)
    config, num_layers = drafter.config, len(drafter.layers)

    def probe(port: Any) -> Tensor:
        wrong_bits: dict[int, Tensor] = {}

        def compare(layer: int, module: Any, args: Any) -> None:
            rows, context, mask = args[0].shape[1], args[2][0].shape[2], args[3]
            wanted = _visible(config, layer, context, rows)
            seen = torch.ones_like(wanted) if mask is None else mask[0, 0].cpu()
            wrong_bits[layer] = (seen != wanted).flatten()

        handles = [
            layer.register_forward_pre_hook(partial(compare, i)) for i, layer in enumerate(drafter.layers)
        ]
        try:
            port.draft(exam.prefilled(port), exam.material.prompt[-1])
        finally:
            for handle in handles:
                handle.remove()
        if len(wrong_bits) != num_layers:
            raise Unseen("draft", "does not run the drafter's own layers")
        return torch.stack([wrong_bits[layer] for layer in range(num_layers)]).double()

    yield judge(
        exam, "drafter_windows", probe, Known.exactly(torch.zeros(num_layers, 1)), ("draft",),
        right=_described_windows(config, len(exam.material.before())),
        passes=lambda answer: not answer.any(),
        wrong=lambda answer: Finding(
            "drafter_windows", "problem", "draft",
            symptom="layers of the drafter see other rows than its config says",
            evidence={
                "wrong_bits_by_drafter_layer": answer.sum(-1).int().tolist(), "sliding_window": config.sliding_window,
            },
            cause="sliding_window, layer_types or is_causal of the drafter's config is not honoured",
            fix="honour them under every attention back end; without is_causal, sliding layers are causal in the block",
        ),
    )  # fmt: skip


def _visible(config: DFlashConfig, layer: int, context: int, rows: int) -> Tensor:
    """[rows, context + rows]: what a block row may see of context and block, position by position."""
    window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
    visible = torch.ones(rows, context + rows, dtype=torch.bool)
    for row in range(rows):
        for key in range(context + rows):
            is_later, distance = key > context + row, context + row - key
            if (is_later and config.is_layer_causal(layer)) or (window and distance >= window):
                visible[row, key] = False
    return visible


def _described_windows(config: DFlashConfig, committed: int) -> str:
    if not config.sliding_window:
        return "every layer sees context and block in full"
    sliding = [i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention"]
    beyond = "" if committed > config.sliding_window else f", beyond the {committed} tokens tried here"
    return f"a window of {config.sliding_window} in layers {ranges(sliding)}{beyond}"


@check(
    "first_draft", "draft", "D10 D11 D13", "is the first draft after a prompt what the drafter says on clean input",
    cost=3, unless=[needs("draft")],
)  # fmt: skip
def first_draft(exam: Examination) -> Iterator[Finding]:
    def probe(port: Any) -> Tensor:
        return port.draft(exam.prefilled(port), exam.material.prompt[-1])

    yield _judge_drafts(
        exam, "first_draft", probe, known_draft(exam, exam.material.prompt),
        right="taps, context and block are the drafter's own",
        symptom="already the first draft is not the drafter's",
        cause="the block, the taps or the drafter as built differ from its config",
        fix="check in this order: anchor and mask id, tap offsets, positions, rotary settings, windows",
    )  # fmt: skip


def _judge_drafts(
    exam: Examination, name: str, probe: Probe, known: Known, right: str, symptom: str, cause: str, fix: str
) -> Finding:
    """Compare drafts with those on clean input; a wrong answer's evidence goes by depth."""

    def wrong(answer: Tensor) -> Finding:
        evidence: dict[str, Any] = {"rows_expected": len(known.values), "rows_given": len(answer)}
        if answer.shape == known.values.shape:
            evidence["error_over_rounding_by_depth"] = known.excess(answer).tolist()
            agree = (answer.argmax(-1) == known.values.argmax(-1)).float().mean()
            evidence["same_favourite"] = f"{float(agree):.0%}"
        return Finding(name, "problem", "draft", symptom=symptom, evidence=evidence, cause=cause, fix=fix)

    return judge(exam, name, probe, known, STAGES, right=right, wrong=wrong)


@check(
    "later_drafts", "draft", "D11", "are drafts of later rounds, after rejections, still the drafter's own", cost=8,
    unless=[needs("draft")],
)  # fmt: skip
def later_drafts(exam: Examination) -> Iterator[Finding]:
    """Three rounds along the target's own text, wrong branches in each; the second and third draft."""
    text, length = exam.material.written, len(exam.material.prompt)

    def probe(port: Any) -> Tensor:
        return torch.cat(list(_drafts_along(exam, port))[1:])

    yield _judge_drafts(
        exam, "later_drafts", probe, Known.joined([known_draft(exam, text[: length + i]) for i in (3, 4)]),
        right="the drafter's context holds the committed text and nothing else",
        symptom="drafts after a round are not the drafter's own",
        cause="the drafter's context holds rows that are not the committed text's, or lacks some",
        fix="context rows = committed tokens: prompt and accepted path, no noise, no rejected nodes, no bonus token",
    )  # fmt: skip


def _drafts_along(exam: Examination, port: Any) -> Iterator[Tensor]:
    """Drafts of three rounds that accept 2, 0 and 0 drafts of the target's text."""
    material = exam.material
    state = exam.prefilled(port)
    yield port.draft(state, material.prompt[-1])
    port.verify(state, material.tree)
    state = port.commit(state, material.tree.path(4))
    anchor, after = material.text[2:4]
    yield port.draft(state, anchor)
    wrong = [(after + i) % material.vocab_size for i in (1, 2)]
    port.verify(state, DraftTree.from_parents([anchor, *wrong, after], [-1, 0, 0, 0]))
    state = port.commit(state, [0])
    yield port.draft(state, after)


@check(
    "second_run", "draft", "D18", "does the drafter of a second run know nothing of the first", cost=4,
    unless=[needs("draft")],
)  # fmt: skip
def second_run(exam: Examination) -> Iterator[Finding]:
    anchor = exam.material.text[2]

    def probe(port: Any) -> Tensor:
        port.draft(exam.prefilled(port), exam.material.prompt[-1])
        return port.draft(exam.prefilled(port, 3), anchor)

    yield _judge_drafts(
        exam, "second_run", probe, known_draft(exam, [*exam.material.before(3), anchor]),
        right="a second run drafts as if it were the first",
        symptom="the second prompt is drafted otherwise than the first would be",
        cause="the drafter's context of an earlier run is still there",
        fix="start each run with an empty context",
    )  # fmt: skip
