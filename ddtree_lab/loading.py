"""Load a pair: from the hub, from folders, or the embedded one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.pair import Pair, assets_folder
from ddtree_lab.stages.embedding import resolve_embeddings

EMBEDDED = "embedded"


def load_pair(
    target: str | Path | PreTrainedModel | None = None,
    drafter: str | Path | DFlashDrafter | None = None,
    *,
    device_map: Any = None,
    dtype: Any = "auto",
    quantization: str | None = None,
    revision: str | None = None,
    local_files_only: bool | None = None,
) -> Pair:
    """Load a pair; with no names, the embedded one. The network is used for hub ids only.

    Args:
        target: hub id, folder, or a model already loaded.
        drafter: hub id or folder of a DFlash checkpoint, or a drafter already loaded.
        device_map, dtype, revision, local_files_only: as in `from_pretrained`, for the target.
        quantization: `"4bit"` or `"8bit"` (bitsandbytes), for the target; the drafter is never quantised.

    Raises:
        ValueError: only one of the two was named, or they do not belong together.
    """
    if (target is None) != (drafter is None):
        given, absent = ("drafter", "target") if target is None else ("target", "drafter")
        raise ValueError(f"{given} is given without {absent}; name both, or neither for the embedded pair.")
    name = EMBEDDED if target is None else str(target)
    if target is None or drafter is None:
        folder = assets_folder() / "embedded_pair"
        target, drafter = folder / "target", folder / "drafter"
        dtype = torch.float32 if dtype == "auto" else dtype
    tokenizer = None
    if not isinstance(target, PreTrainedModel):
        options = {"revision": revision, "local_files_only": _offline(target, local_files_only)}
        model = AutoModelForCausalLM.from_pretrained(
            str(target), dtype=dtype, device_map=device_map, use_safetensors=True,
            **_quantization(quantization), **options,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(str(target), **options)
    else:
        model, name = target, type(target).__name__
    model = model.eval()
    if not isinstance(drafter, DFlashDrafter):
        folder = resolve_folder(drafter, local_files_only)
        drafter = DFlashDrafter.from_pretrained(folder, _drafter_dtype(model), _embedding_device(model))
    return Pair(model, drafter, tokenizer, name)


def _offline(source: str | Path, local_files_only: bool | None) -> bool:
    return Path(source).is_dir() if local_files_only is None else local_files_only


def _drafter_dtype(target: PreTrainedModel) -> torch.dtype:
    """The target's, except half precision, which overflows in the drafter's tap fusion."""
    dtype = resolve_embeddings(target).dtype
    return dtype if dtype in (torch.float32, torch.float64) else torch.bfloat16


def _embedding_device(target: PreTrainedModel) -> torch.device:
    device = resolve_embeddings(target).device
    return torch.device("cpu") if device.type == "meta" else device


def _quantization(bits: str | None) -> dict[str, Any]:
    if bits is None:
        return {}
    if bits not in ("4bit", "8bit"):
        raise ValueError(f"quantization is {bits!r}; give '4bit', '8bit' or None.")
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(load_in_4bit=bits == "4bit", load_in_8bit=bits == "8bit")
    }


def resolve_folder(source: str | Path, local_files_only: bool | None = None) -> Path:
    """A local folder as it is; a hub id is downloaded (or found in the hub's cache)."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors"]
    return Path(
        snapshot_download(str(source), allow_patterns=patterns, local_files_only=bool(local_files_only))
    )
