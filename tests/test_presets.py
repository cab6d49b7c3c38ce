"""Bundled presets: what the published checkpoints say of themselves, and pairs that belong together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddtree_lab.pair import check_pair
from ddtree_lab.weightless.inspection import num_stored_tensors
from ddtree_lab.weightless.models import (
    build_weightless,
    build_weightless_drafter,
    read_blueprint,
    read_drafter_config,
)
from ddtree_lab.weightless.presets import bundled_presets, find_preset, preset_of_hub_id

ROOT = Path(__file__).parent.parent
# preset → drafter layers, hidden, MLP, query and key-value heads, taps, mask id, attention
DRAFTERS = {
    "qwen3.6-27b": (5, 5120, 17408, 32, 8, (1, 16, 31, 46, 61), 248070, "ssssf"),
    "qwen3.5-9b": (5, 4096, 12288, 32, 8, (1, 8, 15, 22, 29), 248070, "fffff"),
    "qwen3.5-4b": (5, 2560, 9728, 32, 8, (1, 8, 15, 22, 29), 248070, "fffff"),
    "qwen3.6-35b-a3b": (8, 2048, 6144, 32, 4, (1, 10, 19, 28, 37), 248070, "ffffffff"),
    "qwen3-8b": (5, 4096, 12288, 32, 8, (1, 9, 17, 25, 33), 151669, "fffff"),
    "qwen3-4b": (5, 2560, 9728, 32, 8, (1, 9, 17, 25, 33), 151669, "fffff"),
}
# preset → class, tensors by kind of layer, billions of parameters as the name says them
TARGETS = {
    "qwen3.6-27b": ("Qwen3_5ForCausalLM", 48 * 14 + 16 * 11 + 3, 27),
    "qwen3.5-9b": ("Qwen3_5ForCausalLM", 24 * 14 + 8 * 11 + 3, 9),
    "qwen3.5-4b": ("Qwen3_5ForCausalLM", 24 * 14 + 8 * 11 + 2, 4),
    "qwen3.6-35b-a3b": ("Qwen3_5MoeForCausalLM", 30 * 18 + 10 * 15 + 3, 35),
    "qwen3-8b": ("Qwen3ForCausalLM", 36 * 11 + 3, 8),
    "qwen3-4b": ("Qwen3ForCausalLM", 36 * 11 + 2, 4),
}


def test_there_is_a_preset_for_each_row_of_the_table():
    assert set(bundled_presets()) == set(DRAFTERS)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_drafter_is_the_published_one(name):
    layers, hidden, mlp, heads, kv_heads, taps, mask, attention = DRAFTERS[name]
    config = find_preset(name).drafter_config()
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (layers, hidden, mlp)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (heads, kv_heads, 128)
    assert (config.target_layer_ids, config.mask_token_id, config.block_size) == (taps, mask, 16)
    assert "".join(kind[0] for kind in config.layer_types) == attention
    assert config.sliding_window == (2048 if "s" in attention else None)
    assert num_stored_tensors(build_weightless_drafter(config)) == 11 * layers + 3


@pytest.mark.parametrize("name", TARGETS)
def test_the_target_is_the_published_one_and_fits_its_drafter(name):
    architecture, num_tensors, billions = TARGETS[name]
    preset = find_preset(name)
    blueprint = read_blueprint(name)
    assert blueprint.dtype is torch.bfloat16
    target = build_weightless(blueprint.config, blueprint.dtype)
    assert type(target).__name__ == architecture
    assert num_stored_tensors(target) == num_tensors
    assert round(sum(p.numel() for p in target.parameters()) / 1e9) == billions
    check_pair(target, build_weightless_drafter(preset.drafter_config()))
    rows = target.get_input_embeddings().weight.shape[0]
    assert all(token < rows for token in preset.generation["eos_token_id"])


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_is_not_published_is_said(name):
    preset = find_preset(name)
    for model, replaced in preset.not_published.items():
        keys = [key for named in replaced.values() for key in named]
        assert len(set(keys)) == len(keys)
        assert set(keys) <= set(getattr(preset, model))


def test_presets_are_found_by_name_in_any_case_and_by_hub_id():
    assert read_blueprint("Qwen3.6-27B").name == "qwen3.6-27b"
    assert preset_of_hub_id("Qwen/Qwen3.6-27B") is preset_of_hub_id("z-lab/qwen3.6-27b-dflash") is not None
    assert preset_of_hub_id("Qwen/Qwen3.6-270B") is None
    assert read_drafter_config("z-lab/Qwen3-8B-DFlash-b16") == find_preset("qwen3-8b").drafter_config()


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"qwen3\.6-27b"):
        find_preset("qwen3.6-28b")


def test_a_hub_id_out_of_reach_is_told_its_preset():
    with pytest.raises(ValueError, match=r"ask for the preset 'qwen3\.6-27b'"):
        read_blueprint("Qwen/Qwen3.6-27B", local_files_only=True)


def test_the_wheel_brings_the_presets():
    wheel = pytest.importorskip("hatchling.builders.wheel")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("needs a checkout")
    files = {file.distribution_path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"ddtree_lab/weightless/presets_data/{name}.json" for name in DRAFTERS} <= files
