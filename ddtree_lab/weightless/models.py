"""Models without weights: built on the meta device from a preset, a folder's config or a hub id's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.drafter_config import DFlashConfig
from ddtree_lab.smollm2 import SMOLLM2, smollm2_file
from ddtree_lab.weightless.presets import Preset, bundled_presets, preset_of_hub_id


@dataclass(frozen=True)
class Blueprint:
    """A model's config, and where it came from.

    Args:
        source: `"preset"`, `"package"`, `"folder"` or `"hub"`.
        preset: the bundled preset, if it was asked for by name.
    """

    name: str
    config: PreTrainedConfig
    source: str
    preset: Preset | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The checkpoint's own, float32 where the config does not say."""
        found = self.config.dtype or self.config.get_text_config(decoder=True).dtype or torch.float32
        return found if isinstance(found, torch.dtype) else getattr(torch, found)


def read_blueprint(name: str, *, local_files_only: bool | None = None) -> Blueprint:
    """The config of a bundled preset, `smollm2`, a folder or a hub id, in this order.

    Only a hub id may use the network.

    Raises:
        ModuleNotFoundError: the package that brings SmolLM2 is not installed.
        ValueError: there is no such preset or folder, and the hub has no such model or cannot be reached; or it
            is a drafter's config.
    """
    if name.lower() in bundled_presets():
        preset = bundled_presets()[name.lower()]
        return Blueprint(preset.name, preset.target_config(), "preset", preset)
    if name.lower() == SMOLLM2:
        file = smollm2_file()
        return Blueprint(SMOLLM2, AutoConfig.from_pretrained(file.parent, gguf_file=file.name), "package")
    is_folder = Path(name).is_dir()
    try:
        config = AutoConfig.from_pretrained(
            name, local_files_only=is_folder or bool(local_files_only), trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r}: {_first_sentence(error)} {_suggestion(name)}") from error
    if any("DFlash" in architecture for architecture in config.architectures or ()):
        raise ValueError(f"{name!r} is a drafter ({config.architectures[0]}); name its target.")
    return Blueprint(name, config, "folder" if is_folder else "hub")


def read_drafter_config(name: str, *, local_files_only: bool | None = None) -> DFlashConfig:
    """A drafter's config: a preset's (by the name of the pair or the drafter's hub id), a folder's or the hub's.

    Raises:
        ValueError: it cannot be read, or is not a DFlash drafter's.
    """
    known = bundled_presets().get(name.lower()) or preset_of_hub_id(name)
    if known is not None:
        return known.drafter_config()
    path = Path(name) / "config.json"
    if not Path(name).is_dir():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(name, "config.json", local_files_only=bool(local_files_only)))
        except (OSError, ValueError) as error:  # every error of the hub is one of these
            raise ValueError(f"drafter {name!r}: {_first_sentence(error)} {_suggestion(name)}") from error
    if not path.is_file():
        raise ValueError(f"drafter: {name} has no config.json; give a folder with a DFlash checkpoint.")
    return DFlashConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))


def build_weightless(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a config on the meta device: every shape, no memory.

    It is the class that `load_pair` would load: of a multimodal config the text model where there is one.

    Raises:
        ValueError: the library has no language model for the config.
    """
    has_text_model = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto_class = AutoModelForCausalLM if has_text_model else AutoModelForImageTextToText
    with torch.device("meta"):
        return auto_class.from_config(config, dtype=dtype, trust_remote_code=False).eval()


def build_weightless_drafter(config: DFlashConfig, dtype: torch.dtype = torch.bfloat16) -> DFlashDrafter:
    """A drafter on the meta device."""
    with torch.device("meta"):
        return DFlashDrafter(config).to(dtype).eval()


def quiet_libraries() -> None:
    """For a command: no word of the libraries about missing kernels (nothing is run) or each try of the hub."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) < 160 else text.split(". ")[0].rstrip(".") + "."


def _suggestion(name: str) -> str:
    known = preset_of_hub_id(name)
    if known is not None:
        return f"Its config is bundled: ask for the preset {known.name!r}."
    return f"Give a folder, a hub id or a preset ({', '.join([*bundled_presets(), SMOLLM2])})."
