"""Checks of what reaches the target's layers: masks and positions, as hooks see them while the port verifies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.doctor.checks.base import Unseen, check, follows, judge, needs_attention, needs_layers
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.forcing import watched
from ddtree_lab.doctor.guarded import PortError
from ddtree_lab.doctor.hooks import first_of
from ddtree_lab.doctor.report import Finding
from ddtree_lab.doctor.truth import Known, row_distance
from ddtree_lab.stages.cache import make_cache, sliding_windows
from ddtree_lab.stages.forward import decoder_layers, run_target
from ddtree_lab.stages.mask import build_mask
from ddtree_lab.stages.support import attention_backend

STAGES = ("mask", "verify", "cache")


def _arguments(exam: Examination, port: Any) -> dict[int, dict[str, Any]]:
    """Keyword arguments of each layer while a port verifies the tree, also if it fails on the way."""
    tokens = tuple(exam.material.tree.token_ids.tolist())
    failure = None
    state = exam.prefilled(port)
    with watched(exam.target, {tokens: None}) as seen:
        try:
            port.verify(state, exam.material.tree)
        except PortError as error:
            failure = error
    if tokens in seen.arguments:
        return seen.arguments[tokens]
    raise failure or Unseen(
        "verify", "does not run the tree's nodes as the rows of one pass through the layers"
    )


def _kinds_of_mask(exam: Examination) -> list[int]:
    """One attention layer of each kind and window."""
    windows = _windows(exam)
    first: dict[Any, int] = {}
    for layer in exam.attention_layers:
        first.setdefault((exam.kinds[layer], windows.get(layer)), layer)
    return list(first.values())


def _windows(exam: Examination) -> dict[int, int]:
    """Attention layer → its window, of sliding layers."""
    layers = make_cache(exam.target).layers
    return {
        i: int(layer.sliding_window) for i, layer in enumerate(layers) if getattr(layer, "is_sliding", False)
    }


def _as_values(mask: Tensor | None, shape: tuple[int, int], is_added: bool) -> Tensor:
    """A mask as 0 (seen), −1 (hidden) or what else would be added to a score, [n, keys]."""
    if mask is None:  # nothing is hidden
        return torch.zeros(shape)
    rows = mask.reshape(-1, *mask.shape[-2:])[0].cpu()
    if rows.dtype is torch.bool and not is_added:
        return rows.float() - 1
    return rows.float().clamp(-1, 1)


@check(
    "masks", "mask", "D6", "does the mask that reaches each attention layer show each node its path and no more",
    cost=6, unless=[needs_layers, needs_attention],
)  # fmt: skip
def masks(exam: Examination) -> Iterator[Finding]:
    """Width = keys of the layer, no row hides all, and every bit is the tree's."""
    material, tree = exam.material, exam.material.tree
    past, windows = len(material.before()), _windows(exam)
    cache_windows = sliding_windows(make_cache(exam.target))
    wanted = build_mask(tree, past, torch.float32, windows=cache_windows)
    layers = _kinds_of_mask(exam)
    backend = attention_backend(exam.target)
    expected = {
        i: (wanted.windowed[windows[i]] if i in windows else wanted.additive)[0, 0].clamp(-1, 0)
        for i in layers
    }

    def probe(port: Any) -> Tensor:
        seen = _arguments(exam, port)
        if not set(layers) & set(seen):
            raise Unseen("verify", "does not run the tree's nodes through the attention layers")
        parts = [
            _as_values(
                seen[i].get("attention_mask"),
                (expected[i].shape[0], expected[i].shape[1]),
                backend == "eager",
            )
            for i in layers
            if i in seen
        ]
        return torch.cat(parts, dim=-1).double()

    def wrong(answer: Tensor) -> Finding:
        return _wrong_mask(exam, layers, list(expected.values()), answer)

    yield judge(
        exam, "masks", probe, Known.exactly(torch.cat(list(expected.values()), dim=-1)), STAGES,
        right=f"{len(layers)} kinds of mask under {backend} attention, every bit the tree's"
        if len(layers) > 1 else f"under {backend} attention every bit is the tree's",
        wrong=wrong,
    )  # fmt: skip


def _wrong_mask(exam: Examination, layers: list[int], expected: list[Tensor], answer: Tensor) -> Finding:
    keys = sum(part.shape[-1] for part in expected)
    backend, width = attention_backend(exam.target), answer.shape[-1]
    evidence: dict[str, Any] = {"back_end": backend, "keys": keys, "mask_width": width}
    symptom = f"the mask is {answer.shape[-1]} wide where the layers have {keys} keys"
    cause, fix = "the mask's width is not the number of keys of the layer", "width = committed rows + nodes"
    if answer.shape[-1] == keys:
        wanted = torch.cat(expected, dim=-1)
        shown, hidden = ((answer > -1) & (wanted < 0)).sum(-1), ((answer <= -1) & (wanted == 0)).sum(-1)
        evidence |= {"shown_by_mistake": shown.tolist(), "hidden_by_mistake": hidden.tolist()}
        if bool((answer > 0).any()):
            evidence["added_to_scores"] = float(answer.max())
        nodes = ((shown + hidden) > 0).nonzero()[:, 0].tolist()
        symptom = (
            f"the mask rows of nodes {nodes} are not the tree's" if nodes else "the mask adds to what is seen"
        )
        cause = "nodes see what is not on their path, or do not see what is"
        fix = "let a node see the committed rows, its ancestors and itself only (build_mask)"
    return Finding("masks", "problem", "mask", exam.attention_layers, symptom, evidence, cause, fix)


@check(
    "mask_bits", "mask", "D6", "does one bit of the mask change one row of the layer's answer and no other", cost=8,
    unless=[needs_layers, needs_attention],
)  # fmt: skip
def mask_bits(exam: Examination) -> Iterator[Finding]:
    """An experiment on the back end: show node 6 the sibling it must not see, in one layer only."""
    row, key = 6, 1
    for layer in _kinds_of_mask(exam):
        try:
            moved = _moved_rows(exam, layer, row, key)
        except PortError as failure:
            status = "skipped" if isinstance(failure, Unseen) or exam.known else "problem"
            yield Finding("mask_bits", status, "mask", symptom=f"the port's verify {failure.reason}")
            return
        if moved != [row]:
            finding = Finding(
                "mask_bits", "problem", "mask", exam.layers_of(exam.kinds[layer]),
                symptom=f"one bit of node {row}'s mask row moves rows {moved} of layer {layer}",
                evidence={"back_end": attention_backend(exam.target), "layer": layer, "moved_rows": moved},
                cause="the attention back end does not honour this mask" if not moved else
                "rows of the mask are mixed up on the way to the kernel",
                fix="load the target with attn_implementation='sdpa', and give the mask as [1, 1, rows, keys]",
            )  # fmt: skip
            yield follows(exam, finding) if exam.known else finding
            return
    yield Finding("mask_bits", "ok", "mask", symptom=f"node {row} alone moves when it is shown node {key}")


def _moved_rows(exam: Examination, layer: int, row: int, key: int) -> list[int]:
    """Rows of a layer's answer that move when one bit of its mask is turned."""
    tree = exam.material.tree
    answers = []
    for turned in (False, True):
        state = exam.prefilled(exam.port)
        module = decoder_layers(exam.target)[layer]
        kept: list[Tensor] = []
        hooks = [
            module.register_forward_hook(lambda m, a, out, to=kept: to.append(first_of(out)[0].float().cpu()))
        ]
        if turned:
            turn = partial(_turn_bit, row, key - tree.num_nodes)
            hooks.append(module.register_forward_pre_hook(turn, with_kwargs=True))
        try:
            exam.port.verify(state, tree)
        finally:
            for hook in hooks:
                hook.remove()
        if len(kept) != 1 or len(kept[0]) != tree.num_nodes:
            raise Unseen("verify", "does not run the tree's nodes as the rows of one pass through the layers")
        answers.append(kept[0])
    return row_distance(*answers).nonzero()[:, 0].tolist()


def _turn_bit(row: int, key: int, module: Any, args: Any, kwargs: Any) -> Any:
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return None
    turned = mask.clone()
    is_bool = mask.dtype is torch.bool
    seen = bool(mask[0, 0, row, key]) if is_bool else float(mask[0, 0, row, key]) == 0
    turned[..., row, key] = not seen if is_bool else (torch.finfo(mask.dtype).min if seen else 0.0)
    return args, {**kwargs, "attention_mask": turned}


@check(
    "positions", "mask", "D8", "does each node stand at the position of its depth, on every axis", cost=3,
    unless=[needs_layers, needs_attention],
)  # fmt: skip
def positions(exam: Examination) -> Iterator[Finding]:
    """The rotary factors that reach the first attention layer, beside those of the same tokens as plain text."""
    material, tree = exam.material, exam.material.tree
    layer, past = exam.attention_layers[0], len(material.before())
    table = _rotary_table(exam, layer, past + tree.num_nodes + 2)
    if table is None:
        yield Finding(
            "positions", "skipped", "mask", symptom="the target's layers are given no rotary factors"
        )
        return
    right = (past + torch.from_numpy(tree.depths)).tolist()

    def probe(port: Any) -> Tensor:
        factors = _rotary_rows(_arguments(exam, port).get(layer, {}))
        if factors is None or len(factors) != tree.num_nodes:
            raise Unseen("verify", "gives the layers no rotary factors for the nodes")
        return factors

    def wrong(answer: Tensor) -> Finding:
        stand = [int((table - row).abs().amax(-1).argmin()) for row in answer]
        on_no_axis = bool((answer[0] - table[stand[0]]).abs().max() > 0.05)
        return Finding(
            "positions", "problem", "mask", exam.attention_layers,
            symptom=f"nodes stand at positions {stand}, {right} is right"
            if stand != right else "the nodes' positions differ from axis to axis",
            evidence={"positions": stand, "expected": right, "axes_differ": on_no_axis},
            cause="positions are not past_length + depth",
            fix="the position of a node is past_length + its depth, the same on every axis",
        )  # fmt: skip

    known = Known(table[right], torch.full((tree.num_nodes,), 0.05))
    yield judge(
        exam, "positions", probe, known, STAGES, right="past_length + depth, on every axis", wrong=wrong
    )


def _rotary_table(exam: Examination, layer: int, length: int) -> Tensor | None:
    """Rotary factors of positions 0 to `length` − 1, as a plain forward gives them to a layer."""
    tokens = tuple(i % exam.material.vocab_size for i in range(length))
    with watched(exam.target, {tokens: None}) as seen:
        run_target(exam.target, torch.tensor([tokens]), None, logits_to_keep=1)
    exam.material.truth.num_forwards += 1
    return _rotary_rows(seen.arguments.get(tokens, {}).get(layer, {}))


def _rotary_rows(arguments: dict[str, Any]) -> Tensor | None:
    """Cos and sin side by side, [rows, width]."""
    factors = arguments.get("position_embeddings")
    if not isinstance(factors, tuple) or len(factors) != 2 or factors[0].ndim != 3:
        return None
    return torch.cat([part[0].float().cpu() for part in factors], dim=-1)
