"""Checks that run nothing: what was loaded, and whether it is what the files say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ddtree_lab.checkpoint import Checkpoint, open_checkpoint
from ddtree_lab.doctor.bugs.base import dflash
from ddtree_lab.doctor.checks.base import check, needs_dflash
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.report import Finding
from ddtree_lab.pretrained import resolve_folder


@check("devices", "loading", "D23", "is every parameter somewhere a pass can reach", cost=0)
def devices(exam: Examination) -> Iterator[Finding]:
    offloaded = any(hasattr(module, "_hf_hook") for module in exam.target.modules())
    lost = [name for name, p in exam.target.named_parameters() if p.device.type == "meta"]
    if lost and not offloaded:
        yield Finding(
            "devices", "problem", "loading",
            symptom=f"{len(lost)} parameters of the target are on the meta device, the first is {lost[0]}",
            cause="the weights were never loaded, or their offloading hooks were removed",
            fix="load with from_pretrained(device_map=…), and keep accelerate's hooks on the modules",
        )  # fmt: skip
        return
    places = sorted({str(p.device) for p in exam.target.parameters()})
    yield Finding("devices", "ok", "loading", symptom=f"parameters on {', '.join(places)}")


@check(
    "precision",
    "loading",
    "D15",
    "does the drafter run in a precision it can bear",
    cost=0,
    unless=[needs_dflash],
)
def precision(exam: Examination) -> Iterator[Finding]:
    dtype = dflash(exam.pair).fc.weight.dtype
    name = str(dtype).removeprefix("torch.")
    if dtype in (torch.float16, torch.int8, torch.uint8):
        yield Finding(
            "precision", "problem", "draft",
            symptom=f"the drafter's weights are {name}",
            cause="half precision overflows in the tap fusion; a quantised drafter loses most of its acceptance",
            fix="keep the drafter in bfloat16 or float32, whatever the target runs in",
        )  # fmt: skip
        return
    quantised = quantisation(exam.target)
    yield Finding(
        "precision", "note" if quantised else "ok", "loading",
        symptom=f"drafter in {name}, target in {str(exam.target.dtype).removeprefix('torch.')}"
        + (f" and quantised ({quantised}): its hidden states are not those the drafter was trained on" if quantised
           else ", not quantised"),
    )  # fmt: skip


def quantisation(target: Any) -> str:
    """How a target's weights are quantised; empty if they are not."""
    config = getattr(target.config, "quantization_config", None)
    if config is None:
        return "some way" if getattr(target, "is_quantized", False) else ""
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return str(getattr(method, "value", method) or "some way")


@check(
    "heads", "loading", "D12", "are embedding, head and vocabulary those the drafter was trained with", cost=0
)
def heads(exam: Examination) -> Iterator[Finding]:
    embeddings, tokenizer = exam.pair.embeddings, exam.pair.tokenizer
    evidence = {
        "input": embeddings.input_path,
        "output": embeddings.output_path,
        "rows": embeddings.vocab_size,
    }
    longest = max((len(tokenizer) if tokenizer is not None else 0, 1))
    if longest > embeddings.vocab_size:
        yield Finding(
            "heads", "problem", "loading",
            symptom=f"the tokenizer has {longest} tokens, the embedding {embeddings.vocab_size} rows",
            evidence=evidence,
            cause="the tokenizer belongs to another model, or tokens were added without resizing the embedding",
            fix="load the tokenizer from the target's own folder",
        )  # fmt: skip
        return
    tied = "tied" if embeddings.tied else "untied"
    yield Finding("heads", "ok", "loading", symptom=f"{embeddings.input_path} → {embeddings.output_path}, {tied}",
                  evidence=evidence)  # fmt: skip


NUM_ROWS_COMPARED = 16  # of each of the two matrices, spread over the vocabulary


def no_files(exam: Examination) -> str:
    if quantisation(exam.target):
        return "the target is quantised, its weights are not the files'"
    return "" if _checkpoint(exam) else "the target was not loaded from files that are here"


@check(
    "head_weights", "loading", "D12", "do embedding and head hold what the target's files hold", cost=0,
    unless=[no_files],
)  # fmt: skip
def head_weights(exam: Examination) -> Iterator[Finding]:
    """Some rows of each; a drafter's loader that shares or resizes them easily overwrites the target's."""
    checkpoint, embeddings = _checkpoint(exam), exam.pair.embeddings
    assert checkpoint is not None
    roles = {"embedding": (embeddings.input_path, embeddings.input)}
    if not embeddings.tied:
        roles["head"] = (embeddings.output_path, embeddings.output)
    compared, wrong = [], []
    for role, (path, module) in roles.items():
        stored = _stored_rows(checkpoint, path, module.weight)
        if stored is None:
            continue
        rows, values = stored
        compared.append(role)
        if not torch.equal(module.weight.detach()[rows].cpu(), values):
            wrong.append(f"{role} ({path})")
    if wrong:
        yield Finding(
            "head_weights", "problem", "loading",
            symptom=f"the {' and the '.join(wrong)} in memory are not those of {checkpoint.folder.name}",
            cause="something wrote over them after loading: a drafter's loader that shares heads, a resize, a merge",
            fix="share the target's modules with the drafter, never the other way round; load the target afresh",
        )  # fmt: skip
    elif compared:
        found = f"{' and '.join(compared)}: the rows of the files ({NUM_ROWS_COMPARED} compared of each)"
        yield Finding("head_weights", "ok", "loading", symptom=found)
    else:
        yield Finding(
            "head_weights", "skipped", "loading",
            symptom="neither is in memory and in the files under one name and shape",
        )  # fmt: skip


def _checkpoint(exam: Examination) -> Checkpoint | None:
    """The files the target was loaded from; the network is not used."""
    name = getattr(exam.target, "name_or_path", "")
    if not name:
        return None
    try:
        return open_checkpoint(resolve_folder(name, "target", local_files_only=True), "target")
    except (OSError, ValueError):
        return None


def _stored_rows(checkpoint: Checkpoint, path: str, weight: Tensor) -> tuple[list[int], Tensor] | None:
    """Rows of a matrix as the files have them, in the dtype it has in memory."""
    # Wrappers put names before a tensor's own: model.language_model.embed_tokens, language_model.lm_head, ...
    last = f"{path.rpartition('.')[2]}.weight"
    names = [name for name in checkpoint.shapes if name == last or name.endswith(f".{last}")]
    if weight.is_meta or len(names) != 1 or checkpoint.shapes[names[0]] != tuple(weight.shape):
        return None
    file = checkpoint.files[names[0]]
    if file.suffix != ".safetensors":
        return None
    rows = torch.linspace(0, len(weight) - 1, NUM_ROWS_COMPARED).long().tolist()
    with safe_open(file, framework="pt") as opened:
        stored = opened.get_slice(names[0])
        return rows, torch.cat([stored[row : row + 1] for row in rows]).to(weight.dtype)


@check(
    "drafter_rope",
    "loading",
    "D13",
    "does the drafter turn its heads as its config says",
    cost=0,
    unless=[needs_dflash],
)
def drafter_rope(exam: Examination) -> Iterator[Finding]:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    drafter = dflash(exam.pair)
    wanted = Qwen3RotaryEmbedding(drafter.config.to_qwen3()).inv_freq
    built = drafter.rotary_emb.inv_freq.to("cpu", torch.float32)
    error = float((built - wanted).abs().max()) if built.shape == wanted.shape else float("inf")
    if error > 1e-6:
        yield Finding(
            "drafter_rope", "problem", "draft",
            symptom="the drafter's rotary frequencies are not those of its config",
            evidence={"largest_error": error, "rope_theta": drafter.config.rope_theta},
            cause="the rotary embedding was built from another config, or cast to half precision",
            fix="build it from the drafter's own config, in float32",
        )  # fmt: skip
        return
    yield Finding("drafter_rope", "ok", "loading", symptom=f"theta {drafter.config.rope_theta:g}, full width")
