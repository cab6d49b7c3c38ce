"""The drafter's layers: Qwen3 layers whose queries come from the block only.

A block has a handful of rows, so a call costs more than what it computes, on a processor and on a GPU alike: products
of the same rows are one product, queries and keys are normed and turned side by side.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ddtree_lab.drafter_config import DFlashConfig

Rope = tuple[Tensor, Tensor]  # cosines and sines of `DFlashDrafter._rope`


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` in two thirds of the time where PyTorch has no kernel for it."""

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.eps) * self.weight


def normed(x: Tensor, eps: float | None) -> Tensor:
    """Vectors over their root mean square, x / √(mean(x²) + eps): `F.rms_norm` without a weight.

    For float32 on a processor PyTorch 2.13 has no kernel and puts it together of more calls than the four here.
    """
    if eps is None or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.rms_norm(x, x.shape[-1:], eps=eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_constant(eps), length, length, value=1 / x.shape[-1]).rsqrt()


@functools.cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):  # training may be the next to use it
        return torch.tensor(value, device="cpu")


def rotated(heads: Tensor, rope: Rope) -> Tensor:
    """(…, heads, rows, head_dim) turned to their positions: component i with component i + head_dim / 2."""
    cos, sin = rope
    partners = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, partners, sin)


def stored_apart(module: nn.Module, joint: str, sizes: dict[str, int]) -> None:
    """Checkpoints hold the rows of the linear layer `joint` of `module` under several names.

    Args:
        sizes: rows by name, in order.
    """

    def split(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for kind in ("weight", "bias"):
            rows = state.pop(f"{prefix}{joint}.{kind}", None)
            if rows is not None:
                parts = rows.split(list(sizes.values()))
                state.update(
                    {f"{prefix}{name}.{kind}": part for name, part in zip(sizes, parts, strict=True)}
                )

    def join(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for kind in ("weight", "bias"):
            names = {f"{prefix}{name}.{kind}": size for name, size in sizes.items()}
            # What is absent or of another size stays as it is, and is then reported under its own name.
            if all(name in state and len(state[name]) == size for name, size in names.items()):
                state[f"{prefix}{joint}.{kind}"] = torch.cat([state.pop(name) for name in names])

    module.register_state_dict_post_hook(split)
    module.register_load_state_dict_pre_hook(join)


class DFlashAttention(nn.Module):
    """Attention of block rows over context rows and block rows."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        query_rows, key_rows = self.num_heads * head_dim, self.num_kv_heads * head_dim
        self.qkv_proj = nn.Linear(hidden, query_rows + 2 * key_rows, bias=bias)
        stored_apart(self, "qkv_proj", {"q_proj": query_rows, "k_proj": key_rows, "v_proj": key_rows})
        self.o_proj = nn.Linear(query_rows, hidden, bias=bias)
        self.q_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)

    def heads(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Roped queries, roped keys and values of rows `x` (B, rows, H), each (B, heads, rows, head_dim)."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        turned, values = heads.tensor_split([self.num_heads + self.num_kv_heads], dim=1)
        weights = torch.cat(
            [self.q_norm.weight.expand(self.num_heads, -1), self.k_norm.weight.expand(self.num_kv_heads, -1)]
        )
        both = rotated(normed(turned, self.q_norm.eps) * weights[:, None], rope)
        queries, keys = both.tensor_split([self.num_heads], dim=1)
        return queries, keys, values

    def projected_keys_values(self, x: Tensor) -> Tensor:
        """Keys and values of rows `x`, not normed nor turned yet: (B, rows, 2 · kv_heads · head_dim)."""
        part = slice(self.num_heads * self.head_dim, None)
        weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
        return F.linear(x, weight[part], None if bias is None else bias[part])

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        context: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        queries, keys, values = self.heads(x, rope)
        out = F.scaled_dot_product_attention(
            queries,
            torch.cat([context[0], keys], dim=2),
            torch.cat([context[1], values], dim=2),
            attn_mask=mask,
            enable_gqa=True,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DFlashMLP(nn.Module):
    """The gated MLP of Qwen3."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=False)
        stored_apart(self, "gate_up_proj", {"gate_proj": inner, "up_proj": inner})
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class DFlashLayer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DFlashMLP(config)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        context: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))
