"""Bundled presets: the published configurations of targets and of their drafters, without weights.

A preset is what `config.json` says of both models of a pair. It is enough for `inspect` and `plan`, and for
`synth` to write random checkpoints in the published layout.

The values were gathered from model cards and from public quotations of the checkpoints' configs, not from
the hub itself; `not_published` names the few that none of them gives, and what stands in for them.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ddtree_lab.drafter_config import DFlashConfig

FOLDER = Path(__file__).parent / "presets_data"


@dataclass(frozen=True)
class Preset:
    """A target and its drafter, by their configurations.

    Args:
        name: how it is asked for, e.g. `"qwen3.6-27b"`.
        target_id, drafter_id: where the weights are on the hub.
        target: the text-only target's `config.json`.
        wrapper: the top level of the multimodal `config.json` around it, if it is published that way.
        generation: the token ids of its `generation_config.json`; sampling defaults are left out.
        drafter: the drafter's `config.json`.
        not_published: model → what the value is instead → keys; every other value is published.
        note: what else there is to know.
    """

    name: str
    target_id: str
    drafter_id: str
    target: dict[str, Any]
    wrapper: dict[str, Any] | None
    generation: dict[str, Any]
    drafter: dict[str, Any]
    not_published: dict[str, dict[str, list[str]]]
    note: str = ""

    def target_config(self) -> PreTrainedConfig:
        """The text-only target's config object."""
        return config_from_dict(self.target)

    def drafter_config(self) -> DFlashConfig:
        return DFlashConfig.from_dict(self.drafter)

    def __repr__(self) -> str:
        return f"Preset({self.name}: {self.target_id} + {self.drafter_id})"


def config_from_dict(values: dict[str, Any]) -> PreTrainedConfig:
    """The config object of a `config.json`'s contents; an unknown `model_type` is a ValueError of the library."""
    given = copy.deepcopy(values)  # config classes pop from what they are given
    return AutoConfig.for_model(given.pop("model_type"), **given)


@lru_cache(maxsize=1)
def bundled_presets() -> dict[str, Preset]:
    """Every bundled preset by name."""
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))
    }
    return {name: Preset(name=name, **values) for name, values in found.items()}


def find_preset(name: str) -> Preset:
    """The preset called `name`, in any case.

    Raises:
        ValueError: there is none.
    """
    preset = bundled_presets().get(name.lower())
    if preset is None:
        raise ValueError(f"{name!r} is no bundled preset; choose one of {', '.join(bundled_presets())}.")
    return preset


def preset_of_hub_id(hub_id: str) -> Preset | None:
    """The preset that describes a hub id, as target or as drafter."""
    wanted = hub_id.lower()
    return next(
        (p for p in bundled_presets().values() if wanted in (p.target_id.lower(), p.drafter_id.lower())), None
    )
