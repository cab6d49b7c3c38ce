"""The DFlash drafter: one pass over a block of masks proposes a distribution for every position.

The drafter owns neither an embedding nor an output head. It sees the target through *taps*,
the hidden states after a few chosen target layers, and answers with hidden states that the
target's own head turns into logits. Its layers are Qwen3 layers with one difference: queries come
from the block only, keys and values from the context and the block, through the same projections.

Checkpoints are read and written in the published layout (`DFlashDraftModel`, no `model.` prefix):
see `DFlashConfig` for the configuration and `DFlashDrafter` for the tensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from ddtree_lab.drafter_config import DFlashConfig

__all__ = ["DFlashConfig", "DFlashDrafter", "DrafterContext"]

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class DrafterContext:
    """What the drafter remembers of committed tokens: per layer, roped keys and values.

    Never changed in place: `DFlashDrafter.extend_context` returns a longer one, so an older
    context stays valid and going back costs nothing. The rows of a drafted block (noise) are
    never stored. After a round it holds one row for each committed token but the anchor.
    """

    keys: tuple[Float[Tensor, "batch kv_heads rows head_dim"], ...]
    values: tuple[Float[Tensor, "batch kv_heads rows head_dim"], ...]
    position_ids: Int[Tensor, "batch rows"]

    @property
    def num_rows(self) -> int:
        return self.position_ids.shape[1]

    def __repr__(self) -> str:
        return f"DrafterContext(num_rows={self.num_rows}, num_layers={len(self.keys)})"


class DFlashAttention(nn.Module):
    """Attention of block rows over context rows and block rows."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, hidden, bias=bias)
        self.q_norm = Qwen3RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(head_dim, eps=config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))  # (B, rows, heads, head_dim)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Roped keys and values of rows `x` (B, rows, H) → two of (B, kv_heads, rows, head_dim)."""
        keys = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        values = self._heads(self.v_proj(x)).transpose(1, 2)
        return apply_rotary_pos_emb(keys, keys, *rope)[1], values

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        queries = self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2)
        queries = apply_rotary_pos_emb(queries, queries, *rope)[0]
        keys, values = self.keys_values(x, rope)
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
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config.to_qwen3())

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, context, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDrafter(nn.Module):
    """A DFlash block-diffusion drafter in the published checkpoint format.

    Tensors: `fc`, `hidden_norm`, `norm`, and per layer the eleven of a Qwen3 layer.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        num_taps = len(config.target_layer_ids)
        self.fc = nn.Linear(num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config.to_qwen3())

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def _layers(self) -> list[DFlashLayer]:
        return cast(list[DFlashLayer], list(self.layers))

    @property
    def num_draft_positions(self) -> int:
        """Positions drafted by one block: every row but the anchor's."""
        return self.config.block_size - 1

    def extend_context(
        self,
        taps: Float[Tensor, "batch rows taps_width"],
        position_ids: Int[Tensor, "batch rows"],
        context: DrafterContext | None = None,
    ) -> DrafterContext:
        """A context with the rows of newly committed tokens appended; `context` stays as it was.

        Args:
            taps: hidden states of the tapped target layers, concatenated along the last axis.
            position_ids: absolute positions of those tokens.
        """
        expected = self.fc.in_features
        if taps.shape[-1] != expected:
            raise ValueError(
                f"taps are {taps.shape[-1]} wide, the drafter expects {expected} "
                f"({len(self.config.target_layer_ids)} taps of {self.config.target_hidden_size}); "
                "was it trained for another target?"
            )
        fused = self.hidden_norm(self.fc(taps.to(self.dtype)))  # (B, rows, H), shared by every layer
        rope = self.rotary_emb(fused, position_ids)
        new = [layer.self_attn.keys_values(fused, rope) for layer in self._layers]
        if context is None:
            keys, values = zip(*new, strict=True)
            return DrafterContext(tuple(keys), tuple(values), position_ids)
        return DrafterContext(
            tuple(torch.cat([old, k], dim=2) for old, (k, _) in zip(context.keys, new, strict=True)),
            tuple(torch.cat([old, v], dim=2) for old, (_, v) in zip(context.values, new, strict=True)),
            torch.cat([context.position_ids, position_ids], dim=1),
        )

    def denoise(
        self,
        block_embeddings: Float[Tensor, "batch rows hidden"],
        position_ids: Int[Tensor, "batch rows"],
        context: DrafterContext,
        attention_mask: Bool[Tensor, "batch 1 rows keys"] | None = None,
    ) -> Float[Tensor, "batch rows hidden"]:
        """Normed hidden states of the block rows; the target's head turns them into logits.

        Args:
            attention_mask: True where a row may attend, over context rows then block rows; given
                in training, where one call holds many blocks. `None` means one block.
        """
        x = block_embeddings.to(self.dtype)
        rope = self.rotary_emb(x, position_ids)
        for i, layer in enumerate(self._layers):
            mask = self._layer_mask(i, position_ids, context.position_ids, attention_mask)
            x = layer(x, rope, (context.keys[i], context.values[i]), mask)
        return self.norm(x)

    def forward(
        self,
        block_embeddings: Float[Tensor, "batch rows hidden"],
        taps: Float[Tensor, "batch context taps_width"],
        context_position_ids: Int[Tensor, "batch context"],
        block_position_ids: Int[Tensor, "batch rows"],
        attention_mask: Bool[Tensor, "batch 1 rows keys"] | None = None,
    ) -> Float[Tensor, "batch rows hidden"]:
        """`extend_context` and `denoise` in one call, as in training."""
        context = self.extend_context(taps, context_position_ids)
        return self.denoise(block_embeddings, block_position_ids, context, attention_mask)

    def _layer_mask(
        self, layer_idx: int, queries: Tensor, context: Tensor, given: Tensor | None
    ) -> Tensor | None:
        """Bool (B, 1, rows, keys) for a layer, or None when every row sees everything."""
        window = None
        if self.config.layer_types[layer_idx] == "sliding_attention":
            window = self.config.sliding_window
        causal = self.config.is_layer_causal(layer_idx)
        if window is None and not causal:
            return given
        keys = torch.cat([context, queries], dim=1)[:, None, :]  # (B, 1, keys)
        rows = queries[:, :, None]  # (B, rows, 1)
        visible = keys <= rows if causal else torch.ones_like(keys <= rows)
        if window is not None:
            visible = visible & (keys > rows - window)
        visible = visible[:, None]
        return visible if given is None else visible & given

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors` in the published layout."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        config = {**self.config.to_dict(), "dtype": str(self.dtype).removeprefix("torch.")}
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, path / WEIGHTS_NAME, metadata={"format": "pt"})

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> DFlashDrafter:
        """Read a drafter from a local folder; safetensors only.

        Raises:
            FileNotFoundError: there is no `config.json` or no safetensors file.
            ValueError: the config or the tensors are not those of a DFlash drafter; missing and
                unexpected tensors are listed.
        """
        path = Path(folder)
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"drafter: {path} has no config.json; give a folder with a DFlash checkpoint."
            )
        config = DFlashConfig.from_dict(json.loads((path / "config.json").read_text(encoding="utf-8")))
        tensors = _read_safetensors(path)
        with torch.device("meta"):
            drafter = cls(config)
        _check_names(set(drafter.state_dict()), set(tensors), path)
        drafter.load_state_dict({n: t.to(dtype) if dtype else t for n, t in tensors.items()}, assign=True)
        drafter.rotary_emb = Qwen3RotaryEmbedding(config.to_qwen3())  # buffers are not in the checkpoint
        return drafter.to(device).requires_grad_(False).eval()


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    names = sorted(path.glob("*.safetensors"))
    if not names:
        found = sorted(p.name for p in path.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".pkl"})
        hint = (
            f" It holds {', '.join(found)}; pickled weights are refused, convert them first." if found else ""
        )
        raise FileNotFoundError(f"drafter: {path} has no .safetensors file.{hint}")
    index = path / INDEX_NAME
    if index.is_file():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        names = [path / shard for shard in sorted(set(shards))]
    tensors: dict[str, Tensor] = {}
    for name in names:
        with safe_open(name, framework="pt") as file:
            tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (no dict)
    return tensors


def _check_names(expected: set[str], found: set[str], path: Path) -> None:
    second_generation = sorted(
        n for n in found if "attention_conv" in n or "mlp_conv" in n or "candidate_selector" in n
    )
    if second_generation:
        raise ValueError(
            f"drafter: {path} is a second-generation DFlash2 drafter (it has {second_generation[0]}), "
            "which is not supported; use a first-generation drafter."
        )
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing or unexpected:
        raise ValueError(
            f"drafter: the tensors in {path} do not fit its config.json. "
            f"Missing: {', '.join(missing) or 'none'}. Unexpected: {', '.join(unexpected) or 'none'}."
        )
