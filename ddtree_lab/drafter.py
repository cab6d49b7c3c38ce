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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ddtree_lab.checkpoint import CONFIG_NAME, WEIGHTS_NAME, open_checkpoint, read_json
from ddtree_lab.drafter_config import DFlashConfig, refuse_second_generation
from ddtree_lab.drafter_layers import DFlashLayer, JoinedLinear, RMSNorm, Rope, rms_norm, rotated
from ddtree_lab.stages.embedding import EmbeddingPath

__all__ = ["DFlashConfig", "DFlashDrafter", "DrafterContext"]

MOVING_ROPES = ("dynamic", "longrope")  # their frequencies are set anew, by the library, as the text grows
ROPE_ROWS = 64  # consecutive positions whose rope is made at once


@dataclass(frozen=True)
class DrafterContext:
    """What the drafter remembers of committed tokens: every layer's roped keys and values.

    Never changed in place: `DFlashDrafter.extend_context` returns a longer one, so an older
    context stays valid and going back costs nothing. The rows of a drafted block (noise) are
    never stored. After a round it holds one row for each committed token but the anchor.
    """

    keys: Float[Tensor, "layer batch kv_heads rows head_dim"]
    values: Float[Tensor, "layer batch kv_heads rows head_dim"]
    position_ids: Int[Tensor, "batch rows"]

    @property
    def num_rows(self) -> int:
        return self.position_ids.shape[1]

    def __repr__(self) -> str:
        return f"DrafterContext(num_rows={self.num_rows}, num_layers={len(self.keys)})"


@dataclass(frozen=True, eq=False)
class RopeTable:
    """The rope of consecutive positions, and what it was made from."""

    frequencies: Tensor
    version: int  # of the frequencies: how often they have been written in place
    scaling: float
    first: int  # position
    position_ids: Int[Tensor, "1 rows"]
    rope: Rope

    def is_of(self, rotary: Any, first: int, dtype: torch.dtype) -> bool:
        """Whether this is what a rotary embedding gives from a position on."""
        return (
            first == self.first
            and rotary.inv_freq is self.frequencies
            and rotary.inv_freq._version == self.version
            and rotary.attention_scaling == self.scaling
            and self.rope[0].dtype == dtype
        )


class DFlashDrafter(nn.Module):
    """A DFlash block-diffusion drafter in the published checkpoint format.

    Tensors: `fc`, `hidden_norm`, `norm`, and per layer the eleven of a Qwen3 layer.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        num_taps = len(config.target_layer_ids)
        self.fc = nn.Linear(num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config.to_qwen3())
        self._rope_table: RopeTable | None = None
        self._join_context_projections()

    def _apply(self, fn: Any, recurse: bool = True) -> DFlashDrafter:
        """Moving or casting makes the rotary embedding anew: frequencies rounded to bf16 are wrong far out."""
        super()._apply(fn, recurse)
        with torch.device(self.device):
            self.rotary_emb = Qwen3RotaryEmbedding(self.config.to_qwen3())
        self._join_context_projections()
        return self

    def _join_context_projections(self) -> None:
        """Committed rows are the same for every layer: one product gives all of their keys and values."""
        layers = [layer.self_attn for layer in self._layers]
        self._context_projections = JoinedLinear(
            [part for layer in layers for part in (layer.k_proj, layer.v_proj)]
        )

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

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose hidden states it reads, in the order in which they are concatenated."""
        return self.config.target_layer_ids

    def remember(
        self,
        token_ids: Sequence[int],
        taps: Float[Tensor, "rows taps_width"] | None,
        context: DrafterContext | None = None,
    ) -> DrafterContext:
        """`extend_context` for newly committed tokens, in the order of the text; it needs their taps only."""
        if taps is None:
            raise ValueError(
                f"taps are missing; a DFlash drafter reads the target's layers {list(self.tap_layer_ids)}."
            )
        start = 0 if context is None else context.num_rows
        with torch.no_grad():
            positions, rope = self._consecutive(start, len(taps))
            return self.extend_context(taps[None].to(self.device), positions, context, rope)

    def propose(
        self, context: DrafterContext, anchor_token_id: int, embeddings: EmbeddingPath
    ) -> Float[Tensor, "depth vocab"]:
        """Logits of the positions after the anchor, from one pass over a block.

        The block is `[anchor, mask × (block_size − 1)]` in the target's input embedding; the target's
        output head reads the mask rows. Its noise rows never enter the context.
        """
        mask_token_id = self.config.mask_token_id
        if mask_token_id >= embeddings.vocab_size:
            raise ValueError(
                f"drafter: mask_token_id {mask_token_id} is outside the target's embedding of "
                f"{embeddings.vocab_size} rows; was it trained for another target?"
            )
        block = [anchor_token_id] + [mask_token_id] * self.num_draft_positions
        with torch.no_grad():
            rows = embeddings.embed(torch.tensor([block])).to(self.device)
            positions, rope = self._consecutive(context.num_rows, len(block))
            logits = embeddings.logits(self.denoise(rows, positions, context, rope=rope))
            return logits[0, 1:]  # the anchor's own row predicts nothing; eight are quicker than seven

    def extend_context(
        self,
        taps: Float[Tensor, "batch rows taps_width"],
        position_ids: Int[Tensor, "batch rows"],
        context: DrafterContext | None = None,
        rope: Rope | None = None,
    ) -> DrafterContext:
        """A context with the rows of newly committed tokens appended; `context` stays as it was.

        Args:
            taps: hidden states of the tapped target layers, concatenated along the last axis.
            position_ids: absolute positions of those tokens.
            rope: cosines and sines of those positions, where they are at hand.
        """
        expected = self.fc.in_features
        if taps.shape[-1] != expected:
            raise ValueError(
                f"taps are {taps.shape[-1]} wide, the drafter expects {expected} "
                f"({len(self.config.target_layer_ids)} taps of {self.config.target_hidden_size}); "
                "was it trained for another target?"
            )
        fused = self.hidden_norm(self.fc(taps.to(self.dtype)))  # (B, rows, H), shared by every layer
        keys, values = self._keys_values(fused, rope or self._rope(fused, position_ids))
        if context is None:
            return DrafterContext(keys, values, position_ids)
        return DrafterContext(
            torch.cat([context.keys, keys], dim=3),
            torch.cat([context.values, values], dim=3),
            torch.cat([context.position_ids, position_ids], dim=1),
        )

    def _keys_values(self, fused: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys and values of every layer, which all see the same rows: two of (L, B, kv_heads, rows, d)."""
        config = self.config
        shape = (len(self.layers), 2, config.num_key_value_heads, config.head_dim)
        heads = self._context_projections(fused).unflatten(-1, shape)  # (B, rows, L, 2, kv_heads, d)
        keys, values = heads.permute(2, 3, 0, 4, 1, 5).unbind(1)
        weights = torch.stack([layer.self_attn.k_norm.weight for layer in self._layers])
        weights = weights.view(len(weights), 1, 1, 1, -1)
        return rotated(rms_norm(keys, weights, config.rms_norm_eps), rope), values

    def _rope(
        self, x: Tensor, position_ids: Int[Tensor, "batch rows"]
    ) -> tuple[Float[Tensor, "batch 1 rows head_dim"], Float[Tensor, "batch 1 rows head_dim"]]:
        """Cosines and sines of positions, in the dtype of `x`, for all heads; a component's sine carries its sign.

        What the library's `rotary_emb(x, position_ids)` gives, but for the sign, which its `rotate_half` gives to
        half of every head; made by half as many calls.
        """
        rotary = self.rotary_emb
        if rotary.rope_type in MOVING_ROPES:
            cos, sin = (full.chunk(2, dim=-1)[0] for full in rotary(x, position_ids))
        else:
            angles = position_ids[..., None] * rotary.inv_freq  # (B, rows, head_dim / 2), float32
            cos, sin = angles.cos(), angles.sin()
            if rotary.attention_scaling != 1:
                cos, sin = cos * rotary.attention_scaling, sin * rotary.attention_scaling
        factors = torch.cat([cos, cos, -sin, sin], dim=-1).to(x.dtype)
        cosines, sines = factors[:, None].chunk(2, dim=-1)
        return cosines, sines

    def _consecutive(self, start: int, num_rows: int) -> tuple[Int[Tensor, "1 rows"], Rope]:
        """Position ids from `start` on, and their rope, cut out of a table that serves some ten rounds."""
        rotary, first = self.rotary_emb, start - start % ROPE_ROWS
        # Nobody could tell whether an inference tensor has been written to.
        if num_rows > ROPE_ROWS or rotary.rope_type in MOVING_ROPES or rotary.inv_freq.is_inference():
            positions = torch.arange(start, start + num_rows, device=self.device)[None]
            return positions, self._rope(self.fc.weight, positions)
        table = self._rope_table
        if table is None or not table.is_of(rotary, first, self.dtype):
            # Twice as many: rows that begin in one stretch may end in the next.
            positions = torch.arange(first, first + 2 * ROPE_ROWS, device=self.device)[None]
            rope = self._rope(self.fc.weight, positions)
            version, scaling = rotary.inv_freq._version, rotary.attention_scaling
            table = RopeTable(rotary.inv_freq, version, scaling, first, positions, rope)
            self._rope_table = table
        rows, (cos, sin) = slice(start - first, start - first + num_rows), table.rope
        return table.position_ids[:, rows], (cos[:, :, rows], sin[:, :, rows])

    def denoise(
        self,
        block_embeddings: Float[Tensor, "batch rows hidden"],
        position_ids: Int[Tensor, "batch rows"],
        context: DrafterContext,
        attention_mask: Bool[Tensor, "batch 1 rows keys"] | None = None,
        rope: Rope | None = None,
    ) -> Float[Tensor, "batch rows hidden"]:
        """Normed hidden states of the block rows; the target's head turns them into logits.

        Args:
            attention_mask: True where a row may attend, over context rows then block rows; given
                in training, where one call holds many blocks. `None` means one block.
            rope: cosines and sines of the block's positions, where they are at hand.
        """
        x = block_embeddings.to(self.dtype)
        rope = rope or self._rope(x, position_ids)
        layers = zip(self._layers, context.keys, context.values, strict=True)
        for i, (layer, keys, values) in enumerate(layers):
            mask = self._layer_mask(i, position_ids, context.position_ids, attention_mask)
            x = layer(x, rope, (keys, values), mask)
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
        (path / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, path / WEIGHTS_NAME, metadata={"format": "pt"})

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        *,
        allow_pickle: bool = False,
    ) -> DFlashDrafter:
        """Read a drafter from a local folder.

        Args:
            dtype: of the weights; the checkpoint's own by default. Not float16, which overflows.
            allow_pickle: read pickled weights (tensors only) where there are no safetensors.

        Raises:
            FileNotFoundError: no `config.json`, no safetensors file, or shards are absent.
            ValueError: the config or the tensors are not those of a DFlash drafter of the first generation;
                missing and unexpected tensors are listed.
        """
        path = Path(folder)
        config = DFlashConfig.from_dict(read_json(path / CONFIG_NAME, "drafter"))
        checkpoint = open_checkpoint(path, "drafter", allow_pickle)
        refuse_second_generation(checkpoint.shapes, f"the weights in {path} have")
        with torch.device("meta"):
            drafter = cls(config)
        checkpoint.check({name: tensor.shape for name, tensor in drafter.state_dict().items()})
        drafter.load_state_dict(checkpoint.read(dtype), assign=True)
        drafter.rotary_emb = Qwen3RotaryEmbedding(config.to_qwen3())  # buffers are not in the checkpoint
        return drafter.to(device).requires_grad_(False).eval()
