"""Any architecture, tiny: its default config with every size replaced by a small one of the same role.

A size is known by its name; configs of the library share most names. Kept as they are: convolution kernels,
ratios, switches, and which layer is of which kind. Of the layers, the first ones are kept, as many as show the
whole pattern of kinds.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ddtree_lab.weightless.scales import thirds

VOCAB = 128
WINDOW = 8
HEAD_DIM = 16
MOST_LAYERS = 24  # a longer pattern is thinned out to its kinds
MOST_PARAMETERS = 30_000_000  # of a shrunk model; more means that some size was not recognised
GAIN = 4.0  # on the library's small initial weights, with which a tiny model is nearly linear
SLOW_DECAY = -2.0  # log of the decay rate of recurrent states, so that they last over a short text
LARGE_GAIN = 16.0  # on embeddings, so that tokens count beside positions, and on short convolutions

# Whole name → small size; the first match counts. Head width × heads = hidden size, as most layers assume.
SIZES = [
    (re.compile(pattern), size)
    for pattern, size in (
        (r".*vocab(_size.*)?|vocab_size_per_layer_input", VOCAB),
        (r"index_topk", 64),
        (r".*(window|window_size|window_len|local_attention|attention_chunk_size)", WINDOW),
        (r"linear_num_value_heads", 4),
        (r"linear_num_key_heads|num_kv_heads|kv_n_heads|num_query_groups|.*key_value_heads", 2),
        (r"mamba_n_heads|mamba_num_heads", 8),
        (r"n_heads?|.*num_heads|index_n_heads|n_mamba_heads|.*attention_heads", 4),
        (r"qk_rope_head_dim|rotary_dim", 8),
        (r"qk_head_dim", 24),
        (r"mamba_head_?dim|mamba_d_head", 16),
        (r"kv_channels|dim_head|d_head|d_kv|attention_head_size|.*head_dim|query_pre_attn_scalar", HEAD_DIM),
        (r"(n_routed|num|num_local|moe_num)_experts|zero_expert_num", 4),
        (r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_?k", 2),
        (r"n_group|topk_group|num_expert_group|o_groups|n_groups|mamba_n_?groups", 1),
        (r"(mamba_d|ssm)_state(_size)?|state_size|mamba_dt_rank|time_step_rank", 8),
        (r"mamba_d_ssm", 128),
        (r".*_rank", 16),
        (r"mamba_chunk_size|chunk_size|block_size|index_block_size", 16),
        (r".*(hidden_size|_embed_dim|ffn_dim|ffn_hidden_size|feed_forward_size|intermediate_size).*", 64),
        (r"d_(model|ff|inner)|dff|dim_ff|n_embd|dim_model|(emb|embedding|embed|word_embed_proj)_dim", 64),
        (r"(|input_|output_)embedding_size|lru_width|.*_(in|out|input|output|mid)_(dim|size)|mlp_dim", 64),
        (r"ngram_vocab_size_base", 64),
    )
]  # fmt: skip
# Numbers of layers besides those of the decoder itself.
DEPTHS = re.compile(r"depth|n_(input|recurrent|output)_layers|num_(layers_per_stack|.*layers)|.*_layers")
SPECIAL_IDS = re.compile(r".*_token_(id|index)$|(unk|mask)_index")
# Sizes that a class works out from others, wrongly in a few classes; the same value said openly.
UNSET = {"head_dim": HEAD_DIM, "num_key_value_heads": 4, "num_attention_heads": 4, "num_experts_per_tok": 2}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
CAUSAL = {"is_decoder", "causal"}  # without these an encoder's class looks both ways
LAYER_KINDS = ("layer_types", "layers_block_type", "attention_layers")
LAYER_INDICES = re.compile(
    r".*(layer_indices|layer_ids|layer_idxs|attn_idxs|only_layers|cross_attention_layers)|moe_layers"
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What a few classes need besides: their defaults do not make a model, or one without the layers they are known for.
GIVEN: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dory": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    # Its sliding layers have sizes of their own.
    "dots3_note_text": {
        "per_layer_config": {
            f"{i:02d}": {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "kv_lora_rank": 8,
                "qk_nope_head_dim": 8,
            }
            for i in (2, 3, 4)
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
    },
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds_dim": [16, 48]},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "whisper": {"max_source_positions": 32},
    "xmod": {"default_language": "en_XX"},
}


def shrink_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A tiny config of a class, its inner configs too.

    Raises:
        Exception: what the config class raises about its own defaults or about the small sizes.
    """
    return config_class(**_small_values(config_class()))


def _small_values(default: PreTrainedConfig) -> dict[str, Any]:
    """What differs from the defaults."""
    own = getattr(type(default), "attribute_map", {})  # a common name → the config's own
    known = {own.get(name, name) for name in inspect.signature(type(default)).parameters}
    values = {name: value for name, value in vars(default).items() if name in known}
    commons = {name: common for common, name in own.items()}
    count, kept = _kept_layers(default, values)
    small: dict[str, Any] = {}
    for name, value in values.items():
        new = _small_value(values, (name, commons.get(name, name)), value, count, kept)
        if new is not value and new != value:
            small[name] = new
    for switch in CAUSAL & values.keys():
        small[switch] = True
    return {**small, **GIVEN.get(default.model_type, {})}


def _small_value(
    values: dict[str, Any], names: tuple[str, str], value: Any, count: int, kept: Sequence[int]
) -> Any:
    """A value's small one.

    Args:
        names: the config's own name for it, and the common one.
        count: layers by default.
        kept: which of them are kept.
    """
    name = names[0]
    if isinstance(value, PreTrainedConfig):
        return {"model_type": value.model_type, **_small_values(value)}
    if isinstance(value, bool):
        return value
    if value is None:
        return UNSET.get(name)
    if isinstance(value, int):
        return _small_number(values, names, value, count, len(kept))
    if isinstance(value, (list, tuple)):
        return _small_list(name, value, count, kept)
    if isinstance(value, dict) and name.startswith("rope"):
        return _small_rope(values, value)
    return value


def _small_number(values: dict[str, Any], names: tuple[str, str], value: int, count: int, kept: int) -> int:
    name = names[0]
    if name in LAYER_COUNTS and value == count:
        return kept
    if name == "head_dim" and value == values.get("qk_rope_head_dim"):
        return 8  # of latent attention: the rotated part
    if name == "num_key_value_heads" and value == values.get("num_attention_heads"):
        return 4
    if SPECIAL_IDS.fullmatch(name):
        return min(value, VOCAB - 1)
    if name == "first_k_dense_replace":
        return min(value, 1)
    if "layer" in name and name.endswith(("index", "index_start", "index_end", "idx")):
        return value * kept // count
    if name == "num_kv_shared_layers":
        return value * kept // count
    for candidate in names:
        for pattern, size in SIZES:
            if pattern.fullmatch(candidate):
                return min(value, size)
    return min(value, 2) if DEPTHS.fullmatch(name) else value


def _small_list(name: str, value: Sequence[Any], count: int, kept: Sequence[int]) -> list[Any]:
    items = list(value)
    if LAYER_INDICES.fullmatch(name):
        items = [kept.index(i) for i in items if i in kept]
    elif len(items) == count and count > 2:  # an entry for each layer
        items = [items[i] for i in kept]
    size = next((size for pattern, size in SIZES if pattern.fullmatch(name)), None)
    if size is not None or SPECIAL_IDS.fullmatch(name):
        limit = size or VOCAB - 1
        items = [min(i, limit) if isinstance(i, int) else i for i in items]
    return items


def _small_rope(values: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of one kind of layer, or of each kind: as many factors as there are pairs."""
    if rope and all(isinstance(value, dict) for value in rope.values()):
        return {kind: _small_rope(values, inner) for kind, inner in rope.items()}
    width = HEAD_DIM if values.get("qk_rope_head_dim") is None else 8
    pairs = int(width * (rope.get("partial_rotary_factor") or 1.0)) // 2
    small = dict(rope)
    for name, value in rope.items():
        if name == "mrope_section":
            small[name] = thirds(pairs)
        elif isinstance(value, (list, tuple)):
            small[name] = list(value)[:pairs]
    return small


def _kept_layers(default: PreTrainedConfig, values: dict[str, Any]) -> tuple[int, list[int]]:
    """The number of layers by default, and which of them are kept."""
    count = next((values[n] for n in LAYER_COUNTS if isinstance(values.get(n), int)), 0)
    count = getattr(default, "num_hidden_layers", None) or count
    per_layer = [
        value for name, value in values.items()
        if isinstance(value, (list, tuple)) and len(value) == count and not LAYER_INDICES.fullmatch(name)
    ]  # fmt: skip
    for name in LAYER_KINDS:
        derived = getattr(default, name, None)
        if isinstance(derived, (list, tuple)) and len(derived) == count:
            per_layer.append(derived)
    kinds = [tuple(map(str, layer)) for layer in zip(*per_layer, strict=True)] if per_layer else []
    if not kinds:
        return count, list(range(min(count, 4)))
    turn = period(kinds)
    shared = getattr(
        default, "num_kv_shared_layers", 0
    )  # these come last and need whole patterns before them
    number = max(2, turn * 2 if shared else turn) if turn * 2 <= count else _twice_each(kinds)
    if number <= MOST_LAYERS:
        return count, list(range(min(number, count)))
    return count, sorted({kinds.index(kind) for kind in kinds} | {count - 1})


def _twice_each(kinds: Sequence[Any]) -> int:
    """Layers without a repeated pattern: as many as show each kind twice, if it comes twice."""
    places = [[i for i, other in enumerate(kinds) if other == kind][:2] for kind in set(kinds)]
    return max(2, *(place[-1] + 1 for place in places))


def period(kinds: Sequence[Any]) -> int:
    """The shortest pattern that the layers repeat, a cut last turn included.

    >>> period(["a", "a", "b", "a", "a", "b", "a"])
    3
    >>> period(["a", "b", "b"])
    3
    """
    return next(
        p for p in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i - p] for i in range(p, len(kinds)))
    )


def enliven(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Weights of a size at which layers do something: attention that looks, states that carry, logits that differ."""
    generator = torch.Generator().manual_seed(seed)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(end.weight) for end in ends if hasattr(end, "weight")}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(SLOW_DECAY)
            elif parameter.is_floating_point() and not name.endswith(("bias", ".D")):
                if not parameter.any():  # left at zero to be trained
                    spread = 0.5 if parameter.ndim < 2 else 0.02
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
                if parameter.ndim >= 2:
                    parameter.mul_(LARGE_GAIN if id(parameter) in tables or "conv" in name else GAIN)
    return model.eval().requires_grad_(False)


def build_tiny(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0
) -> PreTrainedModel:
    """A random model of a tiny config, in float32 on the CPU.

    Raises:
        ValueError: it is not tiny.
        Exception: what the model class raises about the config.
    """
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in model_class._from_config(config).named_parameters()}
    total = sum(sizes.values())
    if total > MOST_PARAMETERS:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"the shrunk model has {total:,} parameters, {sizes[largest]:,} of them in {largest}: a size of its config "
            "is not known to the shrinker."
        )
    torch.manual_seed(seed)
    return enliven(model_class._from_config(config, dtype=torch.float32), seed)
