"""Tiny random pairs of every kind the doctor must be right about: for its matrix and its tests.

Random weights of the library's size leave a tiny model nearly linear, so matrices are enlarged and the head is
scaled until the logits are a trained model's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ddtree_lab.compat import text_config
from ddtree_lab.drafter import DFlashConfig, DFlashDrafter
from ddtree_lab.pair import Pair

VOCAB = 97
END = 5  # the end-of-sequence token
LOGITS_DEVIATION = 10.0
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
)  # fmt: skip
DELTA_NET: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12
)
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24
)
SLIDING: dict[str, Any] = dict(
    use_sliding_window=True, sliding_window=12, max_window_layers=0,
    layer_types=["full_attention", "sliding_attention"] * 2,
)  # fmt: skip
SCALED: dict[str, Any] = dict(
    sliding_window=12, layer_types=["sliding_attention", "full_attention"] * 2, query_pre_attn_scalar=16
)
VISION: dict[str, Any] = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4,
    spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=16,
)  # fmt: skip


def _wrapped() -> Any:
    ids = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
    return AutoConfig.for_model(
        "qwen3_5", text_config={**SHAPE, **DELTA_NET}, vision_config=VISION, tie_word_embeddings=False, **ids
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "dense": lambda: AutoConfig.for_model("qwen3", **SHAPE),
    "sliding window": lambda: AutoConfig.for_model("qwen3", **SHAPE, **SLIDING),
    "scaled embedding": lambda: AutoConfig.for_model("gemma3_text", **SHAPE, **SCALED),
    "hybrid": lambda: AutoConfig.for_model("qwen3_5_text", **SHAPE, **DELTA_NET),
    "hybrid, mixture of experts": lambda: AutoConfig.for_model("qwen3_5_moe_text", **SHAPE, **DELTA_NET, **EXPERTS),
    "Qwen3-Next": lambda: AutoConfig.for_model("qwen3_next", **SHAPE, **DELTA_NET, **EXPERTS, decoder_sparse_step=1),
    "hybrid in a multimodal wrapper": _wrapped,
}  # fmt: skip


def small_target(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A tiny random target of one of `CONFIGS`."""
    torch.manual_seed(seed)
    config = CONFIGS[kind]()
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = auto.from_config(config).to(dtype).eval().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "conv1d" not in name and "embed" not in name:
                parameter.mul_(4.0)
        deviation = model(torch.arange(24)[None] % VOCAB).logits.std()
        model.get_output_embeddings().weight.mul_(LOGITS_DEVIATION / deviation)
    model.generation_config.eos_token_id = END
    return model


def small_pair(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Pair:
    """A tiny random target and a random drafter with a sliding layer."""
    target = small_target(kind, dtype, seed)
    torch.manual_seed(seed + 1)
    config = DFlashConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=VOCAB, block_size=6, target_layer_ids=(0, 2), mask_token_id=VOCAB - 1,
        num_target_layers=text_config(target).num_hidden_layers,
        layer_types=("sliding_attention", "full_attention"), sliding_window=8,
    )  # fmt: skip
    drafter = DFlashDrafter(config).to(dtype).eval().requires_grad_(False)
    return Pair(target, drafter, name=f"random {kind}, {str(dtype).removeprefix('torch.')}")


def with_large_fusion(pair: Pair) -> Pair:
    """The pair with a tap fusion too large for half precision; the drafter's norm makes up for the size."""
    assert isinstance(pair.drafter, DFlashDrafter)
    with torch.no_grad():
        pair.drafter.fc.weight.mul_(1e6)
    return replace(pair, name=f"{pair.name}, large tap fusion")
