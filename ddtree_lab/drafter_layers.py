"""The drafter's layers: Qwen3 layers whose queries come from the block only.

A block has a handful of rows, so a call costs more than what it computes, on a processor and on a GPU alike: queries
and keys are normed and turned side by side.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

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


class DFlashAttention(nn.Module):
    """Attention of block rows over context rows and block rows."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, self.num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)

    def heads(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Roped queries, roped keys and values of rows `x` (B, rows, H), each (B, heads, rows, head_dim)."""
        parts = [part(x) for part in (self.q_proj, self.k_proj, self.v_proj)]
        heads = torch.cat(parts, dim=-1).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        turned, values = heads.tensor_split([self.num_heads + self.num_kv_heads], dim=1)
        weights = torch.cat(
            [self.q_norm.weight.expand(self.num_heads, -1), self.k_norm.weight.expand(self.num_kv_heads, -1)]
        )
        both = rotated(normed(turned, self.q_norm.eps) * weights[:, None], rope)
        queries, keys = both.tensor_split([self.num_heads], dim=1)
        return queries, keys, values

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


class DFlashLayer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config.to_qwen3())

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        context: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))
