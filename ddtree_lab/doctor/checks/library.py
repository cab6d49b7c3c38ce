"""How the library behaves on this target: a few forwards of its own, before any port is looked at."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ddtree_lab.compat import iter_states, text_config
from ddtree_lab.doctor.checks.base import check, needs_attention, needs_recurrence, row_errors
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.references import addresses
from ddtree_lab.doctor.report import Finding
from ddtree_lab.stages.cache import describe_cache, make_cache, sliding_windows
from ddtree_lab.stages.forward import prefill, run_target


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


NUM_PADS = 3


@check(
    "left_padding", "cache", "D2", "is a prompt with padding on its left scored like the prompt alone", cost=4
)
def left_padding(exam: Examination) -> Iterator[Finding]:
    """A batch of one: the padded prompt, then several tokens on its cache. Ports here are never given padding."""
    tokens, num_new = exam.material.written[: len(exam.material.prompt) + 4], 4
    known = exam.material.truth.after([tokens[: len(tokens) - i] for i in range(num_new, -1, -1)])
    padded = torch.tensor([[0] * NUM_PADS + tokens])
    mask = torch.ones_like(padded)
    mask[:, :NUM_PADS] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, end, rows = make_cache(exam.target), padded.shape[1], []
    try:
        for start, stop in ((0, end - num_new), (end - num_new, end)):
            out = run_target(
                exam.target, padded[:, start:stop], cache,
                attention_mask=mask[:, :stop], position_ids=positions[:, start:stop],
            )  # fmt: skip
            rows.append(out.logits[0, -1:] if start == 0 else out.logits[0])
    except Exception as error:  # whatever the library says to it
        refusal = f"the library refuses it ({type(error).__name__})"
        yield Finding("left_padding", "note", "cache", symptom=f"{refusal}: give prompts without padding")
        return
    exam.material.truth.num_forwards += 2
    answer = torch.cat(rows).float().cpu()
    excess = float(known.excess(answer).max())
    if excess <= 1:
        yield Finding("left_padding", "ok", "cache", symptom="equal within rounding",
                      evidence={"error_over_rounding": excess})  # fmt: skip
        return
    yield Finding(
        "left_padding", "note", "cache", exam.recurrent_layers,
        symptom=f"no: logits are off by {excess:.3g} times what rounding explains; give prompts without padding",
        evidence=row_errors(known, answer),
        references=addresses(["PB043"]),
    )  # fmt: skip


BACKENDS = ("eager", "sdpa")


@check(
    "mask_forms", "mask", "D6", "which forms of a 4-D mask do the library's attention back ends honour", cost=16,
    unless=[needs_attention],
)  # fmt: skip
def mask_forms(exam: Examination) -> Iterator[Finding]:
    """A causal mask must change nothing, and a hidden key the last row only. What the port passes is for `masks`."""
    windows = sliding_windows(make_cache(exam.target))
    tokens = exam.material.prompt[
        : min(windows, default=len(exam.material.prompt))
    ]  # a window of its own is no mask's
    known, config = exam.material.truth.after([tokens]), text_config(exam.target)
    found, backend = {}, config._attn_implementation
    try:
        for other in dict.fromkeys((*BACKENDS, backend)):
            config._attn_implementation = other
            for form in ("added", "bool"):
                found[f"{other} ({form})"] = _honoured(exam, tokens, form == "bool", float(known.slack))
    finally:
        config._attn_implementation = backend
    honoured = ", ".join(name for name, what in found.items() if what == "honoured")
    others = ", ".join(f"{name}: {what}" for name, what in found.items() if what != "honoured")
    yield Finding(
        "mask_forms", "note", "mask",
        symptom=f"honoured: {honoured or 'none'}" + (f"; not: {others}" if others else ""),
        evidence={"in_use": backend, "forms": found},
        references=addresses(["PB049", "PB050"]) if others else (),
    )  # fmt: skip


def _honoured(exam: Examination, tokens: list[int], is_bool: bool, slack: float) -> str:
    """What a back end does with a 4-D mask of one form, in three forwards of a text without a cache."""
    causal = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    one_less = causal.clone()
    one_less[-1, 1] = False
    rows = []
    for visible in (None, causal, one_less):
        mask = None if visible is None else visible[None, None]
        if mask is not None and not is_bool:
            lowest = torch.finfo(exam.target.dtype).min
            mask = torch.zeros(mask.shape, dtype=exam.target.dtype).masked_fill(~mask, lowest)
        exam.material.truth.num_forwards += 1
        try:
            out = run_target(exam.target, torch.tensor([tokens]), None, attention_mask=mask)
        except Exception as error:  # whatever the library says to it
            return f"refused ({type(error).__name__})"
        rows.append(out.logits[0].float().cpu())
    apart, moved = (rows[1] - rows[0]).abs().max(), (rows[2] - rows[1]).abs().amax(-1)
    if float(apart) > slack:
        return f"a causal mask changes logits by {float(apart):.2g}"
    if float(moved[:-1].max()) > slack:
        return "a bit changes other rows"
    return "honoured" if float(moved[-1]) > 0 else "ignored"  # the same sums twice give the same bits


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
