"""Checks that run nothing, or next to nothing: what was loaded, and how the library behaves here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ddtree_lab.compat import iter_states
from ddtree_lab.doctor.bugs.base import dflash
from ddtree_lab.doctor.checks.base import check, needs_recurrence, row_errors
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.report import Finding
from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.stages.cache import describe_cache, make_cache
from ddtree_lab.stages.forward import prefill, run_target


def needs_dflash(exam: Examination) -> str:
    is_dflash = isinstance(exam.pair.drafter, DFlashDrafter)
    return "" if is_dflash else "the drafter is no DFlash drafter and reads no hidden states"


@check(
    "cache_regime",
    "cache",
    "D22",
    "which cache layers the library gives this target, and what crop does to them",
    cost=8,
)
def cache_regime(exam: Examination) -> Iterator[Finding]:
    import transformers

    report = describe_cache(exam.target)
    kinds = {layer.kind: layer.rollback for layer in report.layers}
    cropped = cropping(exam)
    yield Finding(
        "cache_regime", "note", "cache",
        symptom=", ".join(f"{kind} layers roll back by {way}" for kind, way in kinds.items())
        + f"; the library's own crop {cropped}",
        evidence={
            "transformers": transformers.__version__, "crop": cropped,
            "classes": sorted({layer.class_name for layer in report.layers}),
        },
    )  # fmt: skip


def cropping(exam: Examination) -> str:
    """What `Cache.crop` does on this target, tried out: two tokens are taken off a filled cache."""
    text = exam.material.prompt
    cache = make_cache(exam.target)
    prefill(exam.target, torch.tensor([text[:-1]]), cache)
    exam.material.truth.num_forwards += 2
    try:
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        run_target(exam.target, torch.tensor([[text[-1], text[-1]]]), cache)
        cache.crop(-2)
        row = run_target(exam.target, torch.tensor([text[-1:]]), cache).logits[0, -1].float().cpu()
    except Exception as error:  # whatever the library says to it
        return f"is refused ({type(error).__name__})"
    known = exam.material.truth.after([text])
    if float(known.excess(row[None]).max()) <= 1:
        return "is exact"
    return f"leaves a wrong state without a word (logits off by {float((known.values[0] - row).abs().max()):.2g})"


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


@check(
    "multi_token_forward", "cache", "D2", "is a cached forward of several tokens the same as one token at a time",
    cost=36,
)  # fmt: skip
def multi_token_forward(exam: Examination) -> Iterator[Finding]:
    tokens = exam.material.written[: len(exam.material.prompt) + 4]
    cache = make_cache(exam.target)
    prefill(exam.target, torch.tensor([tokens[:-4]]), cache)
    at_once = run_target(exam.target, torch.tensor([tokens[-4:]]), cache).logits[0].float().cpu()
    exam.material.truth.num_forwards += 2
    known = exam.material.truth.after([tokens[: len(tokens) - 3 + i] for i in range(4)])
    excess = float(known.excess(at_once).max())
    if excess <= 1:
        yield Finding(
            "multi_token_forward", "ok", "cache", symptom="equal within rounding",
            evidence={"error_over_rounding": excess},
        )  # fmt: skip
        return
    yield Finding(
        "multi_token_forward", "problem", "cache", exam.recurrent_layers,
        symptom=f"four tokens on a filled cache give logits that are off by {excess:.3g} times what rounding explains",
        evidence=row_errors(known, at_once),
        cause="this version of the library starts recurrent layers from an empty state when several tokens come at "
        "once (transformers up to 5.6)",
        fix="upgrade to transformers 5.8 or later",
    )  # fmt: skip


@check(
    "state_precision", "cache", "D15", "are recurrent states kept in full precision", cost=1, unless=[needs_recurrence]
)  # fmt: skip
def state_precision(exam: Examination) -> Iterator[Finding]:
    cache = make_cache(exam.target)
    prefill(exam.target, torch.tensor([exam.material.prompt]), cache)
    exam.material.truth.num_forwards += 1
    dtypes = {
        str(tensor.dtype).removeprefix("torch.")
        for layer in cache.layers
        for name, _, tensor in iter_states(layer)
        if name == "recurrent_states"
    }
    yield Finding(
        "state_precision", "note", "cache",
        symptom=f"the library keeps recurrent states in {', '.join(sorted(dtypes))}",
    )  # fmt: skip


@check(
    "near_ties", "verify", "D16",
    "how large is rounding here without any drafter, and how close are the target's choices",
    cost=27,
)  # fmt: skip
def near_ties(exam: Examination) -> Iterator[Finding]:
    """The control: one text scored token by token, at once, and as batch rows disturbed by rounding."""
    one_by_one, known = exam.material.text_logits, exam.material.known_text
    apart = float((one_by_one - known.values).abs().max())
    flips = int((one_by_one.argmax(-1) != known.values.argmax(-1)).sum())
    best = known.values.topk(2, dim=-1).values
    gaps = best[:, 0] - best[:, 1]
    unsure = int((gaps <= 2 * known.slack).sum())
    ordered = gaps.sort().values
    yield Finding(
        "near_ties", "note", "verify",
        symptom=f"without any drafter two right ways differ by {apart:.2g} and part {flips} times in {len(gaps)} "
        f"tokens; rounding may decide {unsure} of them",
        evidence={
            "gap_quantiles": {f"{q:.0%}": float(ordered[int(q * (len(gaps) - 1))]) for q in (0.0, 0.1, 0.25, 0.5, 0.9)},
            "rounding_explains": {"median": float(known.slack.median()), "most": float(known.slack.max())},
        },
    )  # fmt: skip
