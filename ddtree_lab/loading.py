"""Load a pair: from the hub, from folders, or the embedded one."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.ngram import NgramDrafter
from ddtree_lab.pair import Pair, assets_folder, check_pair
from ddtree_lab.pretrained import (
    PICKLE,
    LoadOptions,
    load_target,
    load_tokenizer,
    resolve_folder,
    target_skeleton,
)
from ddtree_lab.smollm2 import SMOLLM2, smollm2_file
from ddtree_lab.stages.draft import Drafter
from ddtree_lab.stages.embedding import resolve_embeddings

EMBEDDED, NGRAM = "embedded", "ngram"
Target: TypeAlias = str | Path | PreTrainedModel
Source: TypeAlias = str | Path | Drafter


def load_pair(
    target: Target | None = None,
    drafter: Source | None = None,
    *,
    device_map: Any = None,
    max_memory: dict[int | str, int | str] | None = None,
    offload_folder: str | Path | None = None,
    dtype: Any = "auto",
    quantization: str | None = None,
    attn_implementation: str | None = None,
    tp_plan: str | None = None,
    revision: str | None = None,
    drafter_revision: str | None = None,
    local_files_only: bool | None = None,
    allow: str | Collection[str] = (),
) -> Pair:
    """Load a pair; with no names, the embedded one. The network is used for hub ids only.

    Args:
        target: hub id, folder, a model already loaded, or `"smollm2"`, which a Python package brings.
        drafter: hub id or folder of a DFlash checkpoint, a drafter already loaded, or `"ngram"`, which drafts for
            any target from the text so far (`NgramDrafter`); the default for `"smollm2"`.
        device_map, max_memory, offload_folder, dtype, attn_implementation, tp_plan: as in `from_pretrained`, for
            the target; where there is an accelerator, or with `max_memory`, `device_map` is `"auto"` by default
            (the embedded pair stays on the CPU). The drafter goes where the target's embedding is.
        quantization: `"4bit"` or `"8bit"` (bitsandbytes), for the target; the drafter is never quantised. 8-bit is
            without bitsandbytes' outlier columns, which depend on the other rows of a pass.
        revision, drafter_revision: branch, tag or commit of a hub id.
        local_files_only: never use the network, as with `HF_HUB_OFFLINE=1`.
        allow: what is refused unless named here: `"pickle"` (weights that are no safetensors), `"remote_code"` (a
            model class that comes with the checkpoint).

    Raises:
        FileNotFoundError: a folder lacks its config or weights.
        ValueError: only one of the two was named, they do not belong together, or a checkpoint is broken or
            refused; the sentence says which.
        ModuleNotFoundError: `"smollm2"`, bitsandbytes or flash-attn is asked for and not installed.
    """
    name = EMBEDDED if target is None else str(target)
    if target is None:  # small enough for the CPU, and its figures are for that
        dtype, device_map = torch.float32 if dtype == "auto" else dtype, device_map or "cpu"
    target, drafter, gguf_file = _sources(target, drafter)
    options = LoadOptions(
        dtype, device_map, max_memory, offload_folder, quantization, attn_implementation, tp_plan, gguf_file, allow
    )  # fmt: skip
    hub: dict[str, Any] = {"local_files_only": local_files_only, "allow": options.allow}
    read = None
    if not isinstance(drafter, Drafter):
        # First, and on the CPU: a broken drafter is found out before the target's large files are read.
        folder = resolve_folder(drafter, "drafter", revision=drafter_revision, **hub)
        drafter = read = DFlashDrafter.from_pretrained(folder, allow_pickle=PICKLE in options.allow)
    if isinstance(target, PreTrainedModel):
        model, tokenizer, name = target.eval(), None, type(target).__name__
    else:
        folder = resolve_folder(target, "target", revision=revision, **hub)
        if isinstance(drafter, DFlashDrafter):
            check_pair(target_skeleton(folder, options), drafter)
        model, tokenizer = load_target(folder, options), load_tokenizer(folder, options)
    if read is not None:
        read.to(device=resolve_embeddings(model).device, dtype=_drafter_dtype(model))
    return Pair(model, drafter, tokenizer, name)


def _sources(target: Target | None, drafter: Source | None) -> tuple[Target, Source, str | None]:
    """What the two names stand for, and the GGUF file in the target's folder if it is one."""
    if drafter == NGRAM or (drafter is None and target == SMOLLM2):
        drafter = NgramDrafter()
    if target is not None and drafter is None:
        raise ValueError(
            'target is given without drafter; name its DFlash drafter, or "ngram", which drafts for any target.'
        )
    if target is None and not (drafter is None or isinstance(drafter, NgramDrafter)):
        raise ValueError("drafter is given without target; name both, or neither for the embedded pair.")
    if target == SMOLLM2:
        file = smollm2_file()
        return file.parent, drafter or NgramDrafter(), file.name
    embedded = assets_folder() / "embedded_pair"
    return target or embedded / "target", drafter or embedded / "drafter", None


def _drafter_dtype(target: PreTrainedModel) -> torch.dtype:
    """The target's, except half precision, which overflows in the drafter's tap fusion."""
    dtype = resolve_embeddings(target).dtype
    return dtype if dtype in (torch.float32, torch.float64) else torch.bfloat16
