"""What a DFlash drafter's `config.json` says, read and written in the published layout."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SECOND_GENERATION = (
    "attention_conv",
    "mlp_conv",
    "candidate_selector",
)  # parts of names in DFlash2 checkpoints


def refuse_second_generation(names: Iterable[str], where: str) -> None:
    """Recognise a DFlash2 checkpoint by a name in its config or among its tensors.

    Raises:
        ValueError: naming what gave it away.
    """
    for name in sorted(names):
        if any(part in name for part in SECOND_GENERATION) or re.search("dflash[-_]?v?2", name.lower()):
            raise ValueError(
                f"drafter: this is a second-generation DFlash2 drafter ({where} {name}), which is not supported; "
                "use one of the first generation."
            )


@dataclass(frozen=True)
class DFlashConfig:
    """Configuration of a DFlash drafter, as published in its `config.json`.

    Args:
        target_layer_ids: taps, in the order in which their hidden states are concatenated. Id `i`
            is what the target's layer `i` returns, `hidden_states[i + 1]` in Hugging Face terms.
        mask_token_id: the token whose target embedding fills the positions to be drafted.
        block_size: rows of a block, the anchor included; `block_size - 1` positions are drafted.
        num_target_layers: decoder layers of the target it was trained for.
        target_hidden_size: width of a tap; `hidden_size` when the checkpoint does not say.
        layer_types: one of `"full_attention"`, `"sliding_attention"` per drafter layer.
        sliding_window: positions a sliding layer sees, the query's own included.
        is_causal: overrides causality inside the block for every layer; `None` means what the
            reference does without the key: sliding layers causal, full layers bidirectional.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_target_layers: int
    target_hidden_size: int = 0
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    hidden_act: str = "silu"
    extra: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.target_hidden_size:
            object.__setattr__(self, "target_hidden_size", self.hidden_size)
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_hidden_layers)
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        self._validate()

    def _validate(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}, which does not divide the "
                f"{self.num_attention_heads} attention heads."
            )
        rope_type = (self.rope_scaling or {}).get("rope_type", "default")
        if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            raise ValueError(
                f"rope_type is {rope_type!r}; transformers knows {', '.join(sorted(ROPE_INIT_FUNCTIONS))}."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers but num_hidden_layers is "
                f"{self.num_hidden_layers}; give one type for each drafter layer."
            )
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(
                f"layer_types holds {sorted(unknown)}; a DFlash drafter has only "
                "'full_attention' and 'sliding_attention' layers."
            )
        if "sliding_attention" in self.layer_types and not self.sliding_window:
            raise ValueError(
                "layer_types has sliding layers but sliding_window is not set, or use_sliding_window is false; "
                "give the window in positions."
            )
        if self.block_size < 2:
            raise ValueError(
                f"block_size is {self.block_size}; a block needs an anchor and a mask, so at least 2."
            )
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids is empty; a drafter needs at least one tap.")
        if self.mask_token_id < 0:
            raise ValueError(f"mask_token_id is {self.mask_token_id}; it is a row of the target's embedding.")
        bad = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        if bad:
            raise ValueError(
                f"target_layer_ids has {bad}, outside the target's {self.num_target_layers} layers; "
                "ids count decoder layers from 0."
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DFlashConfig:
        """Read a published `config.json`.

        `mask_token_id` and `target_layer_ids` are taken from `dflash_config` first, then from the
        top level; they are never guessed. `rope_theta` may be at the top or in `rope_parameters`.

        Raises:
            ValueError: naming the key that is missing or wrong, or the sign of a second-generation drafter.
        """
        nested = values.get("dflash_config") or {}
        named = [str(values.get("model_type")), *(values.get("architectures") or ())]
        keys = [
            key for key, value in {**values, **nested}.items() if value
        ]  # `false` and `null` say it has none
        refuse_second_generation([*named, *keys], "its config.json says")
        rope = values.get("rope_parameters") or {}
        merged = {**values, **nested}
        merged["rope_theta"] = values.get("rope_theta") or rope.get("rope_theta") or cls.rope_theta
        scaling = values.get("rope_scaling") or rope
        rope_type = scaling.get("rope_type", scaling.get("type", "default"))  # `type` is the older key
        merged["rope_scaling"] = None if rope_type == "default" else {**scaling, "rope_type": rope_type}
        if not values.get("use_sliding_window", True):
            merged["sliding_window"] = None
        names = {f.name for f in fields(cls)} - {"extra"}
        required = {f.name for f in fields(cls)[:11]}
        missing = sorted(required - {key for key, value in merged.items() if value is not None})
        if missing:
            raise ValueError(
                f"the drafter's config.json has no {', '.join(missing)}; is it a DFlash drafter? "
                f"Its architectures entry says {values.get('architectures')}."
            )
        known = {key: value for key, value in merged.items() if key in names and value is not None}
        wrong = [
            name for name in (*_SIZES, "block_size", "mask_token_id") if not isinstance(known[name], int)
        ]
        if wrong:
            raise ValueError(
                f"{wrong[0]} is {known[wrong[0]]!r} in the drafter's config.json; a whole number is expected."
            )
        known |= {key: tuple(known[key]) for key in ("target_layer_ids", "layer_types") if key in known}
        known["rope_theta"] = float(known["rope_theta"])
        known["extra"] = {k: v for k, v in values.items() if k not in names and k != "dflash_config"}
        return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """The published `config.json` layout."""
        nested = ("mask_token_id", "target_layer_ids")
        flat = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in (*nested, "extra")}
        if self.is_causal is None:
            del flat["is_causal"]  # its mere presence changes what sliding layers do
        return {
            **self.extra,
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **flat,
            "layer_types": list(self.layer_types),
            "use_sliding_window": self.sliding_window is not None,
            "tie_word_embeddings": False,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
        }

    def to_qwen3(self) -> Qwen3Config:
        """The same dimensions as a `Qwen3Config`, for the library's MLP and rotary modules."""
        rope = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        return Qwen3Config(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            hidden_act=self.hidden_act,
            rope_parameters=rope,
        )

    def is_layer_causal(self, layer_idx: int) -> bool:
        """Whether block rows of a layer are hidden from earlier block rows."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer_idx] == "sliding_attention"


_SIZES = (*(f.name for f in fields(DFlashConfig)[:7]), "num_target_layers")  # hidden_size to vocab_size
