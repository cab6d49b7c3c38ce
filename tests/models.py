"""Tiny random targets and trees, built in code: no weights are needed to test a mechanism."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from ddtree_lab.drafter_config import DFlashConfig
from ddtree_lab.stages.tree import DraftTree

VOCAB = 97
LOGIT_SCALE = 10.0


def _finish(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Float weights, and a head scaled so that logits are of a trained model's size."""
    model = model.to(dtype).eval().requires_grad_(False)
    if dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products have no float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "conv1d" not in name and "embed" not in name:
                parameter.mul_(4.0)  # the library's 0.02 leaves a tiny model nearly linear
        ids = torch.arange(24)[None] % VOCAB
        head = model.get_output_embeddings().weight
        if head is not model.get_input_embeddings().weight:
            head.mul_(LOGIT_SCALE / model(ids).logits.std())
    return model


def hybrid(
    num_layers: int = 4,
    key_heads: int = 2,
    value_heads: int = 4,
    kernel: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    family: str = "qwen3_5",
    head_dim: int = 16,
) -> torch.nn.Module:
    """A random Gated DeltaNet hybrid: three linear layers to one full-attention layer."""
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
        linear_num_key_heads=key_heads, linear_num_value_heads=value_heads,
        linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=kernel,
        max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    moe = dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24
    )  # fmt: skip
    if family == "qwen3_5":
        return _finish(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape)), dtype)
    if family == "qwen3_5_moe":
        return _finish(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**shape, **moe)), dtype)
    if family == "qwen3_next":
        return _finish(Qwen3NextForCausalLM(Qwen3NextConfig(**shape, **moe, decoder_sparse_step=1)), dtype)
    raise ValueError(family)


def dense(dtype: torch.dtype = torch.float32, window: int | None = None, seed: int = 0) -> torch.nn.Module:
    """A random Qwen3; with `window`, every other layer is a sliding one."""
    torch.manual_seed(seed)
    sliding = dict(
        use_sliding_window=True,
        sliding_window=window,
        max_window_layers=0,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
        **(sliding if window else {}),
    )  # fmt: skip
    return _finish(Qwen3ForCausalLM(config), dtype)


def random_tree(shape: str, num_nodes: int, seed: int = 0) -> DraftTree:
    """A tree of a named shape with random tokens; siblings have different ones."""
    rng = np.random.default_rng(seed)
    index = np.arange(num_nodes)
    parents = {
        "chain": index - 1,
        "star": np.where(index == 0, -1, 0),
        "bushy": np.array([-1, *(rng.integers(0, i) for i in range(1, num_nodes))]),
        "deep": np.array([-1, *(rng.integers(max(0, i - 2), i) for i in range(1, num_nodes))]),
    }[shape]
    tokens = rng.integers(0, VOCAB, num_nodes)
    for node in range(1, num_nodes):
        siblings = parents[:node] == parents[node]
        assert siblings.sum() < VOCAB, "more siblings than tokens"
        taken = set(tokens[:node][siblings].tolist())
        while int(tokens[node]) in taken:
            tokens[node] = (tokens[node] + 1) % VOCAB
    return DraftTree.from_parents(tokens, parents)


def random_ids(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, (1, num_tokens)))


def wrapped_hybrid(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """The multimodal wrapper of Qwen3.5 around a tiny hybrid, its backbone one level deeper."""
    torch.manual_seed(seed)
    text = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
    )  # fmt: skip
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32,
        patch_size=4, spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=16,
    )  # fmt: skip
    ids = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    return _finish(Qwen3_5ForConditionalGeneration(config), dtype)


SMALL = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16)
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
)  # fmt: skip
ALTERNATING = ["full_attention", "sliding_attention"] * 2
# model type → what its config needs besides SMALL
FAMILIES: dict[str, dict] = {
    "llama": {},
    "gemma2": dict(sliding_window=9, layer_types=ALTERNATING, query_pre_attn_scalar=8),
    "gemma3_text": dict(sliding_window=9, layer_types=ALTERNATING, query_pre_attn_scalar=8),
    "gpt_oss": dict(sliding_window=9, layer_types=ALTERNATING, num_local_experts=4, num_experts_per_tok=2),
    "mistral": dict(sliding_window=9),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "gpt2": {},
    "gpt_neox": {},
    "phi": {},
    "phi3": {},
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "bloom": {},
    "mpt": dict(d_model=32, n_heads=4, n_layers=4, max_seq_len=512),
    "falcon": dict(alibi=True, new_decoder_architecture=False, head_dim=None),
    "bamba": dict(attn_layer_indices=[1, 3], **MAMBA),
    "falcon_h1": dict(mamba_d_ssm=64, **MAMBA),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2, block_ff_dim=48),
    "olmo_hybrid": dict(layer_types=["linear_attention", "full_attention"] * 2, **LINEAR),
    "mamba2": dict(num_heads=8, head_dim=8, state_size=8, n_groups=1, expand=2, chunk_size=16),
}


def causal_lm(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A tiny random causal LM of any of `FAMILIES`."""
    torch.manual_seed(seed)
    given = {**SMALL, **FAMILIES[model_type]}
    config = AutoConfig.for_model(model_type, **{k: value for k, value in given.items() if value is not None})
    return _finish(AutoModelForCausalLM.from_config(config), dtype)


def has_its_own_cache(model: torch.nn.Module) -> bool:
    """Whether this version of the library gives the architecture a cache class (or argument) of its own."""
    module = sys.modules[type(model).__module__]
    own = [name for name, value in vars(module).items() if name.endswith("Cache") and isinstance(value, type)]
    own = [name for name in own if getattr(module, name).__module__ == module.__name__]
    parameters = inspect.signature(type(model).forward).parameters
    return bool(own) or not {"cache", "past_key_values"} & set(parameters)


def small_drafter_config(**changes: Any) -> DFlashConfig:
    """A drafter for the tiny targets of this file: two taps of 32, a block of 5."""
    values = dict(
        hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=VOCAB, block_size=5, target_layer_ids=(1, 3),
        mask_token_id=VOCAB - 1, num_target_layers=4, layer_types=("sliding_attention", "full_attention"),
        sliding_window=6,
    )  # fmt: skip
    return DFlashConfig(**{**values, **changes})
