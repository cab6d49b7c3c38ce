"""Tiny random targets and trees, built in code: no weights are needed to test a mechanism."""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from ddtree_lab.stages.tree import DraftTree

VOCAB = 97
LOGIT_SCALE = 10.0


def _finish(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Float weights, and a head scaled so that logits are of a trained model's size."""
    model = model.to(dtype).eval().requires_grad_(False)
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
) -> torch.nn.Module:
    """A random Gated DeltaNet hybrid: three linear layers to one full-attention layer."""
    torch.manual_seed(seed)
    shape = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=key_heads, linear_num_value_heads=value_heads,
        linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=kernel,
        max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    moe = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
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
        taken = set(tokens[:node][parents[:node] == parents[node]].tolist())
        while int(tokens[node]) in taken:
            tokens[node] = (tokens[node] + 1) % VOCAB
    return DraftTree.from_parents(tokens, parents)


def random_ids(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, (1, num_tokens)))
