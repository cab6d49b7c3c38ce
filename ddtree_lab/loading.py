"""Load a pair: from the hub, from folders, or the embedded one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.ngram import NgramDrafter
from ddtree_lab.pair import Pair, assets_folder
from ddtree_lab.smollm2 import SMOLLM2, smollm2_file
from ddtree_lab.stages.draft import Drafter
from ddtree_lab.stages.embedding import resolve_embeddings

EMBEDDED, NGRAM = "embedded", "ngram"


def load_pair(
    target: str | Path | PreTrainedModel | None = None,
    drafter: str | Path | Drafter | None = None,
    *,
    device_map: Any = None,
    dtype: Any = "auto",
    quantization: str | None = None,
    revision: str | None = None,
    local_files_only: bool | None = None,
) -> Pair:
    """Load a pair; with no names, the embedded one. The network is used for hub ids only.

    Args:
        target: hub id, folder, a model already loaded, or `"smollm2"`, which a Python package brings.
        drafter: hub id or folder of a DFlash checkpoint, a drafter already loaded, or `"ngram"`, which drafts for
            any target from the text so far (`NgramDrafter`); the default for `"smollm2"`.
        device_map, dtype, revision, local_files_only: as in `from_pretrained`, for the target.
        quantization: `"4bit"` or `"8bit"` (bitsandbytes), for the target; the drafter is never quantised.

    Raises:
        ValueError: only one of the two was named, or they do not belong together.
        ModuleNotFoundError: `"smollm2"` is not installed.
    """
    if drafter == NGRAM or (drafter is None and target == SMOLLM2):
        drafter = NgramDrafter()
    if target is not None and drafter is None:
        raise ValueError(
            'target is given without drafter; name its DFlash drafter, or "ngram", which drafts for any target.'
        )
    if target is None and not (drafter is None or isinstance(drafter, NgramDrafter)):
        raise ValueError("drafter is given without target; name both, or neither for the embedded pair.")
    name = EMBEDDED if target is None else str(target)
    if target is None:
        target = assets_folder() / "embedded_pair" / "target"
        dtype = torch.float32 if dtype == "auto" else dtype
    if drafter is None:
        drafter = assets_folder() / "embedded_pair" / "drafter"
    tokenizer = None
    if not isinstance(target, PreTrainedModel):
        options: dict[str, Any] = {}
        if target == SMOLLM2:
            file = smollm2_file()
            target, options["gguf_file"] = file.parent, file.name
        options |= {"revision": revision, "local_files_only": _offline(target, local_files_only)}
        model = AutoModelForCausalLM.from_pretrained(
            str(target), dtype=dtype, device_map=device_map, use_safetensors=True,
            **_quantization(quantization), **options,
        )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(str(target), **options)
    else:
        model, name = target, type(target).__name__
    model = model.eval()
    if not isinstance(drafter, Drafter):
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
