"""A target from the hub or a folder: what may be read, where it goes, and what must not stay unsaid.

A hub id becomes a folder first, so that one set of checks covers both. They run on config and headers,
before the weights are read; the loading itself is the library's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ddtree_lab.checkpoint import CONFIG_NAME, PICKLE_SUFFIXES, check_weights, read_json
from ddtree_lab.compat import tensor_parallel_kwargs

PICKLE, REMOTE_CODE = "pickle", "remote_code"
BITS, FLASH = ("4bit", "8bit"), "flash_attention_2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class LoadOptions:
    """How a target is read and where it goes; the names are those of `from_pretrained`.

    Args:
        device_map: `"auto"` by default where there is an accelerator.
        max_memory: bytes or e.g. `"40GiB"` by GPU index, `"cpu"` and `"disk"`; implies `device_map="auto"`.
        offload_folder: where weights go that are offloaded to disk and are not in the checkpoint as they are used
            (experts that the library merges).
        quantization: `"4bit"` or `"8bit"`, by bitsandbytes.
        tp_plan: `"auto"` to split every layer over the processes of `torchrun`.
        gguf_file: the file of a folder that holds config, weights and tokenizer.
        allow: `"pickle"`, `"remote_code"`: what is refused unless named here.
    """

    dtype: Any = "auto"
    device_map: Any = None
    max_memory: dict[int | str, int | str] | None = None
    offload_folder: str | Path | None = None
    quantization: str | None = None
    attn_implementation: str | None = None
    tp_plan: str | None = None
    gguf_file: str | None = None
    allow: Collection[str] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow", {self.allow} if isinstance(self.allow, str) else set(self.allow))
        unknown = sorted(set(self.allow) - {PICKLE, REMOTE_CODE})
        if unknown:
            raise ValueError(
                f"allow has {unknown[0]!r}; what can be allowed is {PICKLE!r} and {REMOTE_CODE!r}."
            )
        if self.tp_plan and (self.device_map or self.max_memory):
            raise ValueError(
                "tp_plan and device_map are both given; a layer is either split over the GPUs or put on one of them."
            )
        if self.tp_plan and not (distributed.is_initialized() or distributed.is_torchelastic_launched()):
            raise ValueError(
                f"tp_plan={self.tp_plan!r} splits layers over processes, and there is one; start them with torchrun "
                "--nproc-per-node N."
            )
        if self.quantization not in (None, *BITS):
            raise ValueError(f"quantization is {self.quantization!r}; give '4bit', '8bit' or None.")
        if self.quantization and importlib.util.find_spec("bitsandbytes") is None:
            raise ModuleNotFoundError(
                f"quantization={self.quantization!r} needs the package bitsandbytes: pip install bitsandbytes."
            )
        if self.attn_implementation == FLASH and importlib.util.find_spec("flash_attn") is None:
            raise ModuleNotFoundError(
                f"attn_implementation={FLASH!r} needs the package flash-attn: pip install flash-attn, or leave it "
                "out for 'sdpa'."
            )

    @property
    def reading(self) -> dict[str, Any]:
        """Keyword arguments of every `from_pretrained`; the folder is there, so the network is never needed."""
        options = {"local_files_only": True, "trust_remote_code": REMOTE_CODE in self.allow}
        return options if self.gguf_file is None else {**options, "gguf_file": self.gguf_file}

    @property
    def placing(self) -> dict[str, Any]:
        """Those of the model's."""
        spread = self.max_memory or (torch.accelerator.is_available() and not self.tp_plan)
        given = dict(
            device_map=self.device_map or ("auto" if spread else None),
            max_memory=self.max_memory,
            offload_folder=self.offload_folder,
            attn_implementation=self.attn_implementation,
            quantization_config=self._bitsandbytes(),
        )
        return {
            **{name: value for name, value in given.items() if value is not None},
            **tensor_parallel_kwargs(self.tp_plan),
            "dtype": self.dtype,
            "use_safetensors": None if PICKLE in self.allow else True,
        }

    def _bitsandbytes(self) -> Any:
        if self.quantization is None:
            return None
        from transformers import BitsAndBytesConfig

        if self.quantization == "4bit":
            return BitsAndBytesConfig(load_in_4bit=True)
        # By default columns with a large activation in *any* row are split off, so that a row's result depends on
        # the rows beside it and no tree or batch agrees with plain decoding.
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def resolve_folder(
    source: str | Path,
    role: str,
    *,
    revision: str | None = None,
    local_files_only: bool | None = None,
    allow: Collection[str] = (),
) -> Path:
    """A local folder as it is; a hub id is downloaded, or found in the hub's cache.

    Args:
        role: `"target"` or `"drafter"`, for messages.
        local_files_only: never use the network; `HF_HUB_OFFLINE` and `TRANSFORMERS_OFFLINE` do the same.

    Raises:
        ValueError: it is neither, or the network would be needed and may not be used.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
    patterns += [f"*{suffix}" for suffix in sorted(PICKLE_SUFFIXES)] if PICKLE in allow else []
    patterns += ["*.py"] if REMOTE_CODE in allow else []
    offline = bool(local_files_only) or HF_HUB_OFFLINE
    try:
        return Path(
            snapshot_download(
                str(source),
                revision=revision,
                local_files_only=offline,
                allow_patterns=patterns,
                ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
            )
        )
    except HFValidationError:
        raise ValueError(f"{role}: {str(source)!r} is neither a folder nor a hub id (owner/name).") from None
    except OSError as error:
        if offline:
            raise ValueError(
                f"{role}: {str(source)!r} is no folder and not in the hub's cache, and the network is not to be used "
                "(local_files_only, HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE); download it first, or give a folder."
            ) from None
        first = str(error).strip().split("\n")[0]
        raise ValueError(f"{role}: {str(source)!r} is no folder and could not be fetched ({first})") from None


def target_skeleton(folder: Path, options: LoadOptions) -> PreTrainedModel:
    """The target without weights, from its config alone, to compare a drafter with before they are read."""
    config, auto_class = _config_and_class(folder, options)
    with torch.device("meta"):
        return auto_class.from_config(config, trust_remote_code=REMOTE_CODE in options.allow)


def load_target(folder: Path, options: LoadOptions) -> PreTrainedModel:
    """The causal language model of a folder; of a multimodal checkpoint its text model where there is one.

    Raises:
        FileNotFoundError: no config, no safetensors, or shards are absent.
        ValueError: broken files, code or an architecture that is not to be run, or weights that do not fit.
    """
    _, auto_class = _config_and_class(folder, options)
    if options.gguf_file is None:
        check_weights(folder, "target", PICKLE in options.allow)
    model, info = auto_class.from_pretrained(
        str(folder),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # said below, in one sentence
        **options.reading,
        **options.placing,
    )
    for found, what in (("mismatched_keys", "of another shape"), ("missing_keys", "missing")):
        names = sorted(name if isinstance(name, str) else name[0] for name in info.get(found) or ())
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(
                f"target: {names[0]}{more} is {what} in {folder}, so a {type(model).__name__} made of it would have "
                "random weights there."
            )
    if any(tensor.is_meta for tensor in model.parameters()) and not hasattr(model, "_hf_hook"):
        raise ValueError(
            f"target: all of it would be on disk, which transformers {transformers.__version__} does not bring back; "
            "leave room for a part of it in max_memory."
        )
    return model.eval()


def load_tokenizer(folder: Path, options: LoadOptions) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder, or None where it has none: such a pair takes token ids."""
    if options.gguf_file is None and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(str(folder), **options.reading)


def _config_and_class(folder: Path, options: LoadOptions) -> tuple[Any, Any]:
    """The config and the auto class that loads it, unless that takes code which is not allowed."""
    if options.gguf_file is not None:
        return AutoConfig.from_pretrained(str(folder), **options.reading), AutoModelForCausalLM
    values = read_json(folder / CONFIG_NAME, "target")
    model_type, code = values.get("model_type"), values.get("auto_map") or {}
    if model_type not in CONFIG_MAPPING:
        if not code:
            raise ValueError(
                f"target: {folder} is of model_type {model_type!r}, which transformers {transformers.__version__} does "
                "not know; a newer version may."
            )
        if REMOTE_CODE not in options.allow:
            raise ValueError(
                f"target: {folder} brings its own code ({', '.join(sorted(map(str, code.values())))}), which is "
                f"refused; if you trust it, pass allow={REMOTE_CODE!r}."
            )
    config = AutoConfig.from_pretrained(str(folder), **options.reading)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in code:
        return config, AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return config, AutoModelForImageTextToText
    raise ValueError(
        f"target: {model_type!r} is no causal language model in transformers {transformers.__version__}."
    )
