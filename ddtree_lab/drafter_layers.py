"""The drafter's layers: Qwen3 layers whose queries come from the block only.

A block has a handful of rows, so a call costs more than what it computes, on a processor and on a GPU alike: queries
and keys are normed and turned side by side.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from ddtree_lab.drafter_config import DFlashConfig

Rope = tuple[Tensor, Tensor]  # cosines and sines of `DFlashDrafter._rope`


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` in two thirds of the time where PyTorch has no kernel for it."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """`F.rms_norm` over the last axis, x / √(mean(x²) + eps) · weight; `weight` may differ between heads.

    For float32 on a processor PyTorch 2.13 has no kernel and puts it together of more calls than the four here.
    """
    size = x.shape[-1]
    if eps is None or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.rms_norm(x, (size,), eps=eps) * weight
    # √(Σx² + size · eps), the root mean square times √size, which the weight is given as well
    length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _constant(math.sqrt(size * eps)))
    return torch.addcmul(_constant(0.0), x, weight, value=math.sqrt(size)).div_(length)


@functools.cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):  # training may be the next to use it
        return torch.tensor(value, device="cpu")


def rotated(heads: Tensor, rope: Rope) -> Tensor:
    """(…, heads, rows, head_dim) turned to their positions: component i with component i + head_dim / 2."""
    cos, sin = rope
    partners = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, partners, sin)


class JoinedLinear:
    """Linear layers that read the same rows, in one product.

    Their weights move into one matrix, of which they become views: nothing is stored twice, and what is written into
    one of them is seen here. As soon as one has another weight, a hook or a `forward` of its own, or gradients are
    asked for, each layer is called for itself.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)
        self.weight = torch.cat([layer.weight.detach() for layer in layers])
        if self.weight.is_meta:
            return
        parts = self.weight.split([len(layer.weight) for layer in layers])
        for layer, part in zip(layers, parts, strict=True):
            layer.weight.data = part

    def __deepcopy__(self, memo: dict) -> JoinedLinear:
        """Of the copies of the layers, whose weights are copied one by one."""
        return JoinedLinear([copy.deepcopy(layer, memo) for layer in self.layers])

    def __call__(self, x: Float[Tensor, "*rows input"]) -> Float[Tensor, "*rows outputs"]:
        """Outputs of the layers, one after the other along the last axis."""
        if not torch.is_grad_enabled() and self._is_whole():
            return F.linear(x, self.weight)
        return torch.cat([layer(x) for layer in self.layers], dim=-1)

    def _is_whole(self) -> bool:
        address = self.weight.data_ptr()
        for layer in self.layers:
            if not _is_plain(layer) or layer.weight.data_ptr() != address:
                return False
            address += layer.weight.nbytes
        return True


def _is_plain(layer: nn.Module) -> bool:
    """Whether calling a module is nothing more than a product with its weight."""
    return (
        type(layer) is nn.Linear
        and layer.bias is None
        and not (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
    )


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
        q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        weights = torch.cat(
            [q_weight.expand(self.num_heads, 1, -1), k_weight.expand(self.num_kv_heads, 1, -1)]
        )
        both = rotated(rms_norm(turned, weights, self.q_norm.eps), rope)
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
