import copy
import json
import math
from pathlib import Path

import pytest
import torch
from checks import Counted
from models import VOCAB, hybrid, random_ids, small_drafter_config
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.drafter_config import DFlashConfig
from ddtree_lab.stages.cache import make_cache
from ddtree_lab.stages.draft import draft_block, extend_context
from ddtree_lab.stages.embedding import resolve_embeddings
from ddtree_lab.stages.forward import prefill

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# The config.json of a published 5-layer drafter, as far as a loader reads it.
PUBLISHED = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3",
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 248320,
    "block_size": 16, "num_target_layers": 64, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "use_sliding_window": True,
    "sliding_window": 2048, "rope_theta": 10000000, "rope_scaling": None, "torch_dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}  # fmt: skip


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


def drafter_of(seed=0, **changes):
    """A random drafter with weights large enough for attention to matter."""
    torch.manual_seed(seed)
    drafter = DFlashDrafter(small_drafter_config(**changes)).eval().requires_grad_(False)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            parameter.mul_(3.0)
        elif "norm" in name:
            parameter.add_(torch.rand_like(parameter) - 0.5)
    return drafter


# ── what config.json says ──────────────────────────────────────────────────────────────────────────


def test_the_published_config_is_read():
    config = DFlashConfig.from_dict(PUBLISHED)
    assert (config.mask_token_id, config.target_layer_ids) == (248070, (1, 16, 31, 46, 61))
    assert (config.rope_theta, config.rope_scaling, config.sliding_window) == (1e7, None, 2048)
    assert [config.is_layer_causal(i) for i in range(5)] == [True, True, True, True, False]
    assert config.target_hidden_size == 5120


def test_ids_may_be_nested_or_at_the_top_and_the_nested_ones_win():
    top = {**without(PUBLISHED, "dflash_config"), "mask_token_id": 7, "target_layer_ids": [3, 5]}
    config = DFlashConfig.from_dict(top)
    assert (config.mask_token_id, config.target_layer_ids) == (7, (3, 5))
    both = DFlashConfig.from_dict({**top, "dflash_config": PUBLISHED["dflash_config"]})
    assert (both.mask_token_id, both.target_layer_ids) == (248070, (1, 16, 31, 46, 61))


@pytest.mark.parametrize(
    ("rope", "theta", "scaling"),
    [
        ({"rope_theta": 5e6}, 5e6, None),
        ({"rope_theta": 5e6, "rope_scaling": None}, 5e6, None),
        ({"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}, 5e6, None),
        ({"rope_theta": 5e6, "rope_scaling": YARN}, 5e6, YARN),
        ({"rope_parameters": {"rope_theta": 5e6, **YARN}}, 5e6, {"rope_theta": 5e6, **YARN}),
        ({}, 10000.0, None),
    ],
    ids=["top", "null scaling", "rope_parameters", "yarn", "yarn in rope_parameters", "none"],
)
def test_rope_is_read_from_both_places(rope, theta, scaling):
    config = DFlashConfig.from_dict({**without(PUBLISHED, "rope_theta", "rope_scaling"), **rope})
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)
    assert config.to_qwen3().rope_parameters["rope_theta"] == theta
    assert config.to_qwen3().rope_parameters["rope_type"] == (scaling or {}).get("rope_type", "default")


def test_yarn_changes_the_rotations():
    plain, scaled = (drafter_of(rope_scaling=scaling).rotary_emb for scaling in (None, YARN))
    assert not torch.equal(plain.inv_freq, scaled.inv_freq)


@pytest.mark.parametrize("is_causal", [None, True, False])
def test_an_explicit_is_causal_wins_over_the_layer_type(is_causal):
    values = PUBLISHED if is_causal is None else {**PUBLISHED, "is_causal": is_causal}
    config = DFlashConfig.from_dict(values)
    expected = [True] * 4 + [False] if is_causal is None else [is_causal] * 5
    assert [config.is_layer_causal(i) for i in range(5)] == expected
    assert config.to_dict().get("is_causal", "absent") == ("absent" if is_causal is None else is_causal)


@pytest.mark.parametrize(
    "changes",
    [{}, {"is_causal": False}, {"rope_scaling": YARN}, {"rope_theta": 123.0}, {"target_hidden_size": 77}],
    ids=str,
)
def test_config_survives_the_round_trip(changes):
    config = DFlashConfig.from_dict({**PUBLISHED, **changes})
    through_json = json.loads(json.dumps(config.to_dict()))
    assert DFlashConfig.from_dict(through_json) == config
    assert through_json["torch_dtype"] == "bfloat16"  # what it does not know it keeps


def test_a_window_that_is_not_used_is_no_window():
    full = {**PUBLISHED, "layer_types": ["full_attention"] * 5, "use_sliding_window": False}
    assert DFlashConfig.from_dict(full).sliding_window is None


@pytest.mark.parametrize(
    "key", ["hidden_size", "block_size", "num_target_layers", "head_dim", "dflash_config"]
)
def test_a_config_without_a_needed_key_is_refused_naming_it(key):
    names = "mask_token_id|target_layer_ids" if key == "dflash_config" else key
    with pytest.raises(ValueError, match=names):
        DFlashConfig.from_dict(without(PUBLISHED, key))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types names 4 layers"),
        ({"layer_types": ["linear_attention"] * 5}, "layer_types holds"),
        ({"sliding_window": None}, "sliding_window is not set"),
        ({"block_size": 1}, "block_size is 1"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": []}}, "target_layer_ids is empty"),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 64]}},
            r"target_layer_ids has \[64\]",
        ),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [-1]}}, r"target_layer_ids has \[-1\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DFlashConfig.from_dict({**PUBLISHED, **changes})


# ── the checkpoint ─────────────────────────────────────────────────────────────────────────────────


def test_a_five_layer_drafter_has_the_published_58_tensors():
    names = set(drafter_of(num_hidden_layers=5, layer_types=()).state_dict())
    per_layer = [
        "input_layernorm",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    per_layer += [
        f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    ]
    expected = {f"layers.{i}.{part}.weight" for i in range(5) for part in per_layer}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(names) == 58


def test_shapes_are_the_published_ones():
    config = DFlashConfig.from_dict(PUBLISHED)
    with torch.device("meta"):
        shapes = {name: list(tensor.shape) for name, tensor in DFlashDrafter(config).state_dict().items()}
    assert shapes["fc.weight"] == [5120, 5 * 5120]
    assert shapes["layers.0.self_attn.q_proj.weight"] == [32 * 128, 5120]
    assert shapes["layers.4.self_attn.v_proj.weight"] == [8 * 128, 5120]
    assert shapes["layers.2.self_attn.k_norm.weight"] == [128]
    assert shapes["layers.1.mlp.down_proj.weight"] == [5120, 17408]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_give_the_same_drafter(tmp_path, dtype):
    drafter = drafter_of(rope_scaling=YARN).to(dtype)
    drafter.save_pretrained(tmp_path)
    loaded = DFlashDrafter.from_pretrained(tmp_path)
    assert loaded.config == drafter.config
    assert loaded.dtype == dtype
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    block, taps = drafting_input(drafter)
    assert torch.equal(denoise(loaded, block, taps), denoise(drafter, block, taps))
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())


def test_a_dtype_asked_for_is_given(tmp_path):
    drafter_of().save_pretrained(tmp_path)
    assert DFlashDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_checkpoint_in_shards_is_read(tmp_path):
    drafter = drafter_of()
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[:9], names[9:])):
        shard = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / shard)
        weight_map.update(dict.fromkeys(part, shard))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = DFlashDrafter.from_pretrained(tmp_path)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def rewrite(folder, change):
    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_missing_and_unexpected_tensors_are_listed(tmp_path):
    drafter_of().save_pretrained(tmp_path)

    def change(tensors):
        del tensors["layers.1.mlp.up_proj.weight"], tensors["hidden_norm.weight"]
        tensors["embed_tokens.weight"] = torch.zeros(2)

    rewrite(tmp_path, change)
    listed = (
        r"Missing: hidden_norm\.weight, layers\.1\.mlp\.up_proj\.weight\. Unexpected: embed_tokens\.weight"
    )
    with pytest.raises(ValueError, match=listed):
        DFlashDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name", ["layers.0.attention_conv.weight", "layers.0.mlp_conv.weight", "candidate_selector.w"]
)
def test_a_second_generation_drafter_is_refused_by_name(tmp_path, name):
    drafter_of().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(ValueError, match="second-generation DFlash2"):
        DFlashDrafter.from_pretrained(tmp_path)


def test_a_tensor_of_another_shape_is_refused_naming_it(tmp_path):
    drafter_of().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"norm.weight": torch.zeros(3)}))
    with pytest.raises((ValueError, RuntimeError), match=r"norm\.weight"):
        DFlashDrafter.from_pretrained(tmp_path)


def test_pickled_weights_are_refused(tmp_path):
    drafter_of().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin; pickled weights are refused"):
        DFlashDrafter.from_pretrained(tmp_path)


def test_a_folder_without_config_or_weights_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        DFlashDrafter.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small_drafter_config().to_dict()))
    with pytest.raises(FileNotFoundError, match=r"has no \.safetensors file"):
        DFlashDrafter.from_pretrained(tmp_path)


# ── what it computes ───────────────────────────────────────────────────────────────────────────────


def drafting_input(drafter, num_context=11, rows=5, seed=1):
    """Embeddings of a block and taps of a context."""
    g = torch.Generator().manual_seed(seed)
    block = torch.randn(1, rows, drafter.config.hidden_size, generator=g).to(drafter.dtype)
    taps = torch.randn(1, num_context, drafter.fc.in_features, generator=g).to(drafter.dtype)
    return block, taps


def denoise(drafter, block, taps):
    num_context = taps.shape[1]
    context = drafter.extend_context(taps, torch.arange(num_context)[None])
    return drafter.denoise(block, torch.arange(num_context, num_context + block.shape[1])[None], context)


def rms_norm(x, module):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + module.eps) * module.weight


def rotate(x, position, theta):
    """RoPE of one head at one position, pair by pair."""
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
        out[half + i] = x[half + i] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def naive_denoise(drafter, block, taps):
    """The drafter written down for one row, one head and one key at a time."""
    config, num_context = drafter.config, taps.shape[1]
    groups = config.num_attention_heads // config.num_key_value_heads
    fused = rms_norm(taps[0] @ drafter.fc.weight.T, drafter.hidden_norm)
    x = block[0]
    for layer_idx, layer in enumerate(drafter.layers):
        attention = layer.self_attn
        sliding = config.layer_types[layer_idx] == "sliding_attention"
        causal = sliding if config.is_causal is None else config.is_causal
        normed = rms_norm(x, layer.input_layernorm)
        sources = torch.cat([fused, normed])  # the key and value rows: context, then block
        attended = []
        for row in range(len(x)):
            position, heads = num_context + row, []
            for head in range(config.num_attention_heads):

                def part(module, source, index):
                    return (module.weight @ source).view(-1, config.head_dim)[index]

                query = rms_norm(part(attention.q_proj, normed[row], head), attention.q_norm)
                query = rotate(query, position, config.rope_theta)
                scores, values = [], []
                for key_position, source in enumerate(sources):
                    if causal and key_position > position:
                        continue
                    if sliding and position - key_position >= config.sliding_window:
                        continue
                    key = rms_norm(part(attention.k_proj, source, head // groups), attention.k_norm)
                    scores.append(query @ rotate(key, key_position, config.rope_theta) / config.head_dim**0.5)
                    values.append(part(attention.v_proj, source, head // groups))
                heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            attended.append(attention.o_proj.weight @ torch.cat(heads))
        x = x + torch.stack(attended)
        normed = rms_norm(x, layer.post_attention_layernorm)
        gate = F.silu(normed @ layer.mlp.gate_proj.weight.T)
        x = x + (gate * (normed @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    return rms_norm(x, drafter.norm)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ("full_attention",) * 2},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6, "is_causal": False},
        {"layer_types": ("full_attention",) * 2, "is_causal": True},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 100, "is_causal": True},
    ],
    ids=[
        "bidirectional",
        "window then full",
        "short window",
        "window, not causal",
        "full, causal",
        "all causal",
    ],
)
def test_the_block_attends_as_defined(changes):
    drafter = drafter_of(**changes)
    block, taps = drafting_input(drafter)
    expected = naive_denoise(drafter, block, taps)
    torch.testing.assert_close(denoise(drafter, block, taps)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "seen_by_first"),
    [
        ({"layer_types": ("full_attention",) * 2}, True),
        ({"layer_types": ("full_attention",) * 2, "is_causal": True}, False),
    ],
    ids=["bidirectional", "causal"],
)
def test_a_later_row_reaches_an_earlier_one_only_in_a_bidirectional_block(changes, seen_by_first):
    drafter = drafter_of(**changes)
    block, taps = drafting_input(drafter)
    changed = block.clone()
    changed[0, -1] += 1
    first = denoise(drafter, block, taps)[0, 0], denoise(drafter, changed, taps)[0, 0]
    assert torch.equal(*first) is not seen_by_first


def test_context_beyond_the_window_is_not_seen():
    drafter = drafter_of(layer_types=("sliding_attention",) * 2, sliding_window=4)
    block, taps = drafting_input(drafter)
    changed = taps.clone()
    changed[0, :7] += 1  # 11 context rows: the first block row at 11 sees positions from 8 on
    assert torch.equal(denoise(drafter, block, taps), denoise(drafter, block, changed))
    changed[0, 8] += 1
    assert not torch.equal(denoise(drafter, block, taps), denoise(drafter, block, changed))


@pytest.mark.parametrize("parts", [[11], [1] * 11, [4, 7], [6, 1, 4]], ids=str)
def test_context_taken_in_parts_is_the_context_at_once(parts):
    drafter = drafter_of()
    block, taps = drafting_input(drafter)
    context = None
    for part in taps[0].split(parts):
        context = extend_context(drafter, part, context)
    assert context.num_rows == 11
    found = drafter.denoise(block, torch.arange(11, 16)[None], context)
    torch.testing.assert_close(found, denoise(drafter, block, taps), rtol=1e-5, atol=1e-5)


def test_extending_a_context_leaves_the_shorter_one_valid():
    drafter = drafter_of()
    block, taps = drafting_input(drafter)
    short = extend_context(drafter, taps[0, :6])
    before = [tensor.clone() for tensor in (*short.keys, *short.values)]
    extend_context(drafter, taps[0, 6:], short)
    drafter.denoise(block, torch.arange(6, 11)[None], short)
    assert short.num_rows == 6
    for tensor, was in zip((*short.keys, *short.values), before, strict=True):
        assert torch.equal(tensor, was)


def test_forward_is_extend_and_denoise():
    drafter = drafter_of()
    block, taps = drafting_input(drafter)
    found = drafter(block, taps, torch.arange(11)[None], torch.arange(11, 16)[None])
    assert torch.equal(found, denoise(drafter, block, taps))


def test_taps_of_another_width_are_refused():
    drafter = drafter_of()
    with pytest.raises(ValueError, match="taps are 5 wide, the drafter expects 64"):
        extend_context(drafter, torch.zeros(3, 5))


# ── the draft stage ────────────────────────────────────────────────────────────────────────────────


def test_a_draft_is_the_targets_head_over_the_mask_rows():
    target, drafter = hybrid(), drafter_of()
    embeddings, config = resolve_embeddings(target), drafter.config
    taps = prefill(target, random_ids(9), make_cache(target), config.target_layer_ids).taps
    context = extend_context(drafter, taps[0])
    draft = draft_block(drafter, embeddings, context, anchor_token_id=5)
    assert draft.logits.shape == (config.block_size - 1, VOCAB)
    assert (draft.depth, draft.anchor_token_id, draft.num_context_rows) == (config.block_size - 1, 5, 9)
    with torch.no_grad():
        ids = torch.tensor([5] + [config.mask_token_id] * (config.block_size - 1))
        hidden = naive_denoise(drafter, target.model.embed_tokens(ids)[None], taps)
        expected = target.lm_head(hidden[1:])
    torch.testing.assert_close(draft.logits, expected, rtol=1e-3, atol=1e-3)
    assert context.num_rows == 9  # noise rows are not kept
    assert torch.equal(draft_block(drafter, embeddings, context, 5).logits, draft.logits)


def test_taps_are_concatenated_in_the_drafters_order():
    target, ids = hybrid(), random_ids(9)
    taps = prefill(target, ids, make_cache(target), (2, 0)).taps
    with torch.no_grad():
        hidden = target(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    torch.testing.assert_close(taps, torch.cat([hidden[3], hidden[1]], dim=-1), rtol=1e-4, atol=1e-4)


def test_a_drafter_of_another_target_is_refused():
    target, embeddings = hybrid(), resolve_embeddings(hybrid())
    drafter = drafter_of(mask_token_id=VOCAB)
    context = extend_context(drafter, torch.zeros(3, 64))
    with pytest.raises(ValueError, match="mask_token_id 97 is outside the target's embedding of 97 rows"):
        draft_block(drafter, embeddings, context, 5)
    with pytest.raises(ValueError, match=r"tap_layer_ids has \[4\], but the target has 4 layers"):
        prefill(target, random_ids(3), make_cache(target), (1, 4))


def test_hooks_on_its_layers_and_their_parts_run_once_a_block():
    """The doctor looks at the masks of the layers so, and whoever wants to see inside does as well."""
    drafter = drafter_of()
    block, taps = drafting_input(drafter)
    seen = []
    for i, layer in enumerate(drafter.layers):
        for module in (layer, layer.self_attn, layer.mlp, layer.self_attn.q_proj, layer.self_attn.o_proj):
            module.register_forward_hook(lambda module, *args, i=i: seen.append((i, type(module).__name__)))
    denoise(drafter, block, taps)
    kinds = ["Linear", "Linear", "DFlashAttention", "Qwen3MLP", "DFlashLayer"]
    assert seen == [(i, kind) for i in range(len(drafter.layers)) for kind in kinds]


# ── fewer calls ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scaling", [None, YARN, {"rope_type": "dynamic", "factor": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rope_of_consecutive_rows_is_that_of_their_positions(scaling, dtype):
    drafter = drafter_of(rope_scaling=scaling).to(dtype)
    for start, num_rows in [(0, 1), (3, 8), (60, 8), (63, 64), (64, 1), (5, 200), (7, 8), (10_000, 8)]:
        positions, rope = drafter._consecutive(start, num_rows)
        assert positions.tolist() == [list(range(start, start + num_rows))]
        expected = drafter._rope(torch.zeros(1, dtype=dtype), positions)
        for found, part in zip(rope, expected, strict=True):
            torch.testing.assert_close(found, part)


@pytest.mark.parametrize(
    "change",
    [
        lambda drafter: drafter.rotary_emb.inv_freq.mul_(0.5),
        lambda drafter: setattr(drafter.rotary_emb, "inv_freq", drafter.rotary_emb.inv_freq * 0.5),
        lambda drafter: setattr(drafter, "rotary_emb", drafter_of(rope_theta=100.0).rotary_emb),
        lambda drafter: setattr(drafter.rotary_emb, "attention_scaling", 2.0),
        lambda drafter: drafter.bfloat16(),
    ],
    ids=["written in place", "other frequencies", "another module", "another scale", "another dtype"],
)
@pytest.mark.parametrize("how", ["plain", "inference"])
def test_a_changed_rotary_embedding_is_seen(change, how):
    with torch.inference_mode(how == "inference"):
        drafter = drafter_of()
        before = drafter._consecutive(8, 8)[1][0].clone()
        change(drafter)
        positions, (cos, _) = drafter._consecutive(8, 8)
        assert cos.dtype != before.dtype or not torch.equal(cos, before)
        torch.testing.assert_close(cos, drafter._rope(drafter.fc.weight, positions)[0])


def test_rows_are_drafted_and_remembered_with_the_rope_of_their_positions():
    """By the table that `propose` and `remember` cut from, and by position ids as they are in training."""
    drafter, embeddings = drafter_of(), resolve_embeddings(hybrid())
    config = drafter.config
    taps = torch.randn(140, drafter.fc.in_features, generator=torch.Generator().manual_seed(1))
    context = given = None
    for start, end in [
        (0, 50),
        (50, 58),
        (58, 66),
        (66, 140),
    ]:  # across the ends of tables, and longer than one
        context = drafter.remember([0] * (end - start), taps[start:end], context)
        given = drafter.extend_context(taps[None, start:end], torch.arange(start, end)[None], given)
        torch.testing.assert_close((context.keys, context.values), (given.keys, given.values))
        assert torch.equal(context.position_ids, given.position_ids)
        block = torch.tensor([[5] + [config.mask_token_id] * (config.block_size - 1)])
        positions = torch.arange(end, end + config.block_size)[None]
        hidden = drafter.denoise(embeddings.embed(block), positions, given)
        expected = embeddings.logits(hidden)[0, 1:].detach()
        torch.testing.assert_close(drafter.propose(context, 5, embeddings), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_a_context_takes_one_product_and_stays_right_when_the_drafter_is_moved(bias, tmp_path):
    drafter = drafter_of(attention_bias=bias)
    taps = torch.randn(1, 6, drafter.fc.in_features, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(6)[None]
    with torch.no_grad(), Counted() as counted:
        first = drafter.extend_context(taps, positions)
    count = 1 + 2 * len(drafter.layers) if bias else 2  # the fusion of taps is the other one
    assert counted.products == count
    drafter.save_pretrained(tmp_path)
    torch.save(drafter, tmp_path / "whole.pt")
    with torch.inference_mode():
        moved = drafter_of(attention_bias=bias).double().float()
    for other in (
        copy.deepcopy(drafter),
        torch.load(tmp_path / "whole.pt", weights_only=False),
        DFlashDrafter.from_pretrained(tmp_path),
        drafter_of(attention_bias=bias).double().float(),
        moved,
    ):
        with torch.no_grad(), Counted() as counted:
            found = other.extend_context(taps, positions)
        assert counted.products == count
        torch.testing.assert_close((found.keys, found.values), (first.keys, first.values))
