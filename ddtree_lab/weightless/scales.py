"""A preset's pair made smaller: fewer layers, or narrow as well, always the same architecture."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from ddtree_lab.weightless.presets import Preset

SCALES = ("tiny", "small", "full")
# Target layers that are kept: two periods of a hybrid's pattern, or one.
NUM_LAYERS = {"tiny": 8, "small": 4}
TINY_TARGET = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
TINY_DRAFTER = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
TINY_WINDOW = 64
# Of the embedded pair's tokenizer, which the tiny vocabulary is.
TINY_SPECIAL_IDS = {"end": [2, 0], "pad": 0, "mask": 3}
# A stand-in for the vision tower, so that the whole multimodal model can be loaded.
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
}
TINY_IMAGE_IDS = {
    "image_token_id": 2040,
    "video_token_id": 2041,
    "vision_start_token_id": 2042,
    "vision_end_token_id": 2043,
}


@dataclass(frozen=True)
class PairConfigs:
    """The JSON files of a pair at some scale."""

    target: dict[str, Any]
    drafter: dict[str, Any]
    generation: dict[str, Any]


def pair_configs(
    preset: Preset, scale: str, *, num_layers: int | None = None, multimodal: bool = False
) -> PairConfigs:
    """A preset's configs at a scale.

    Args:
        scale: `"full"`; `"small"`, real widths and vocabulary with few layers; `"tiny"`, narrow as well.
        num_layers: target layers to keep, instead of the scale's own number.
        multimodal: the target inside its published multimodal wrapper, with a stand-in for the vision tower.

    Raises:
        ValueError: an unknown scale, a number of layers that the preset has not, or no wrapper.
    """
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}; choose one of {', '.join(SCALES)}.")
    target, drafter = copy.deepcopy(preset.target), copy.deepcopy(preset.drafter)
    generation = dict(preset.generation)
    wrapper = preset.wrapper
    published = target["num_hidden_layers"]
    kept = NUM_LAYERS.get(scale, published) if num_layers is None else num_layers
    if not 1 <= kept <= published:
        raise ValueError(f"num_layers is {kept}; {preset.name} has {published}, so keep 1 to {published}.")
    _keep_layers(target, drafter, kept)
    if scale == "tiny":
        _narrow(target, drafter)
        generation = {"eos_token_id": TINY_SPECIAL_IDS["end"], "pad_token_id": TINY_SPECIAL_IDS["pad"]}
    if multimodal:
        if wrapper is None:
            raise ValueError(f"{preset.name} is published as a text model only; leave multimodal out.")
        ids = TINY_IMAGE_IDS if scale == "tiny" else {}
        target = _wrapped(target, {**wrapper, **ids})
    return PairConfigs(target, drafter, generation)


def _keep_layers(target: dict[str, Any], drafter: dict[str, Any], kept: int) -> None:
    """The first layers of the target; taps keep their relative depth, so two may meet in one layer."""
    published = target["num_hidden_layers"]
    taps = drafter["dflash_config"]["target_layer_ids"]
    drafter["dflash_config"]["target_layer_ids"] = [tap * kept // published for tap in taps]
    drafter["num_target_layers"] = target["num_hidden_layers"] = kept


def _narrow(target: dict[str, Any], drafter: dict[str, Any]) -> None:
    """Small widths in the real proportions of heads."""
    # Random weights of this spread keep hidden states and logits of the wide model's size.
    target["initializer_range"] *= (target["hidden_size"] / TINY_TARGET["hidden_size"]) ** 0.5
    for config, narrow in ((target, TINY_TARGET), (drafter, TINY_DRAFTER)):
        groups = config["num_attention_heads"] // config["num_key_value_heads"]
        config.update({key: size for key, size in narrow.items() if key in config})
        config.update(num_key_value_heads=2, num_attention_heads=2 * groups)
    if "linear_num_key_heads" in target:
        groups = target["linear_num_value_heads"] // target["linear_num_key_heads"]
        target.update(linear_num_key_heads=2, linear_num_value_heads=2 * groups)
    rope = target["rope_parameters"]
    if "mrope_section" in rope:
        rope["mrope_section"] = thirds(int(target["head_dim"] * rope["partial_rotary_factor"]) // 2)
    if drafter["sliding_window"] is not None:
        drafter["sliding_window"] = TINY_WINDOW
    drafter["dflash_config"]["mask_token_id"] = TINY_SPECIAL_IDS["mask"]
    target.pop("bos_token_id", None)
    target["eos_token_id"] = TINY_SPECIAL_IDS["pad"]


def thirds(pairs: int) -> list[int]:
    """Rotary pairs of time, height and width, as the real models share them out.

    >>> thirds(32)
    [11, 11, 10]
    """
    return [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3]


def _wrapped(text: dict[str, Any], wrapper: dict[str, Any]) -> dict[str, Any]:
    inner = {key: value for key, value in text.items() if key != "architectures"}
    vision = {**VISION, "out_hidden_size": text["hidden_size"]}
    return {
        **wrapper,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "dtype": text["dtype"],
        "text_config": inner,
        "vision_config": vision,
    }
