"""Published DFlash checkpoints: every row of the table is read, every broken variant is refused in one sentence."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from models import hybrid, small_drafter_config
from safetensors.torch import load_file, save_file
from test_drafter import drafter_of, drafting_input, naive_denoise
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

from ddtree_lab.drafter import MOVING_ROPES, DFlashDrafter
from ddtree_lab.drafter_config import DFlashConfig
from ddtree_lab.drafter_layers import rotated
from ddtree_lab.pair import Pair

FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = [SLIDING] * 4 + [FULL]
# name → layers, hidden, MLP, query and key-value heads, taps, target layers, mask id, vocabulary, layer types
TABLE = {
    "Qwen3.6-27B": (5, 5120, 17408, 32, 8, [1, 16, 31, 46, 61], 64, 248070, 248320, MIXED),
    "Qwen3.5-9B": (5, 4096, 12288, 32, 8, [1, 8, 15, 22, 29], 32, 248070, 248320, [FULL] * 5),
    "Qwen3.5-4B": (5, 2560, 9728, 32, 8, [1, 8, 15, 22, 29], 32, 248070, 248320, [FULL] * 5),
    "Qwen3.6-35B-A3B": (8, 2048, 6144, 32, 4, [1, 10, 19, 28, 37], 40, 248070, 248320, [SLIDING] * 6 + [FULL] * 2),
    "Qwen3.6-35B-A3B, full": (8, 2048, 6144, 32, 4, [1, 10, 19, 28, 37], 40, 248070, 248320, [FULL] * 8),
    "Qwen3-8B-b16": (5, 4096, 12288, 32, 8, [1, 9, 17, 25, 33], 36, 151669, 151936, [FULL] * 5),
    "Qwen3-4B-b16": (5, 2560, 9728, 32, 8, [1, 9, 17, 25, 33], 36, 151669, 151936, [FULL] * 5),
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def published(name, width=1):
    """The `config.json` of a row, its widths divided by `width`."""
    layers, hidden, mlp, heads, kv_heads, taps, target_layers, mask_id, vocab, kinds = TABLE[name]
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16",
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "hidden_size": hidden // width, "intermediate_size": mlp // width, "num_hidden_layers": layers,
        "num_attention_heads": heads // min(width, 4), "num_key_value_heads": kv_heads // min(width, 4),
        "head_dim": 128 // min(width, 16), "vocab_size": vocab, "block_size": 16,
        "num_target_layers": target_layers, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
        "layer_types": kinds, "use_sliding_window": SLIDING in kinds,
        "sliding_window": 2048 if SLIDING in kinds else None, "rope_theta": 10000000, "rope_scaling": None,
        "tie_word_embeddings": False, "dflash_config": {"mask_token_id": mask_id, "target_layer_ids": taps},
    }  # fmt: skip


def names_of(layers):
    parts = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts += [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    return {f"layers.{i}.{part}.weight" for i in range(layers) for part in parts} | {
        "fc.weight", "hidden_norm.weight", "norm.weight"
    }  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_every_row_of_the_table_has_its_shapes_at_full_width(name):
    layers, hidden, mlp, heads, kv_heads, taps, *_ = TABLE[name]
    with torch.device("meta"):
        tensors = DFlashDrafter(DFlashConfig.from_dict(published(name))).state_dict()
    assert set(tensors) == names_of(layers)
    last = f"layers.{layers - 1}"
    for tensor, shape in {
        "fc": [hidden, len(taps) * hidden],
        f"{last}.self_attn.q_proj": [heads * 128, hidden],
        f"{last}.self_attn.v_proj": [kv_heads * 128, hidden],
        f"{last}.mlp.down_proj": [hidden, mlp],
        f"{last}.self_attn.q_norm": [128],
    }.items():
        assert list(tensors[f"{tensor}.weight"].shape) == shape


def variant(values, ids, rope, scaling):
    """The same config with its ids and rope settings in one of the places they are published in."""
    values = dict(values)
    nested = values.pop("dflash_config")
    values |= nested if ids == "top" else {"dflash_config": nested}
    theta = values.pop("rope_theta")
    values.pop("rope_scaling")
    if rope == "top":
        return values | {"rope_theta": theta, "rope_scaling": scaling}
    return values | {"rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta}}


@pytest.mark.parametrize("scaling", [None, {"rope_type": "yarn", **YARN}], ids=["plain", "yarn"])
@pytest.mark.parametrize("rope", ["top", "rope_parameters"])
@pytest.mark.parametrize("ids", ["nested", "top"])
@pytest.mark.parametrize("name", ["Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3-4B-b16"])
def test_a_row_shrunk_in_width_is_loaded_from_shards_and_drafts(name, ids, rope, scaling, tmp_path):
    torch.manual_seed(0)
    values = variant(published(name, width=64), ids, rope, scaling)
    layers, *_, taps, _, mask_id, _, kinds = TABLE[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with torch.device("meta"):
        shapes = DFlashDrafter(DFlashConfig.from_dict(values)).state_dict()
    weights = {name: torch.randn(shapes[name].shape).mul(0.2).bfloat16() for name in sorted(names_of(layers))}
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
    for shard in set(shards.values()):
        save_file({name: weights[name] for name in weights if shards[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))

    drafter = DFlashDrafter.from_pretrained(tmp_path)
    config = drafter.config
    assert (config.mask_token_id, config.target_layer_ids) == (mask_id, tuple(taps))
    assert (config.rope_theta, config.layer_types) == (1e7, tuple(kinds))
    assert [config.is_layer_causal(i) for i in range(layers)] == [kind == SLIDING for kind in kinds]
    assert drafter.dtype is torch.bfloat16
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    block, context = drafting_input(drafter, num_context=20, rows=config.block_size)
    out = drafter(block, context, torch.arange(20)[None], torch.arange(20, 36)[None])
    assert out.isfinite().all() and out.std() > 0.1


@pytest.mark.parametrize("place", ["rope_scaling", "rope_scaling, older key", "rope_parameters"])
@pytest.mark.parametrize(
    "more", [{}, {"attention_factor": 0.7}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"factor": 1.5}], ids=str
)
def test_yarn_turns_as_in_the_library_built_from_the_same_config(place, more):
    key = "type" if "older" in place else "rope_type"
    scaling = {key: "yarn", **YARN, **more}
    rope = "rope_parameters" if place == "rope_parameters" else "top"
    values = variant(published("Qwen3-4B-b16", width=64), "nested", rope, scaling)
    library = Qwen3RotaryEmbedding(Qwen3Config.from_dict({**values, "model_type": "qwen3"}))
    ours = DFlashDrafter(DFlashConfig.from_dict(values)).rotary_emb
    plain = DFlashDrafter(DFlashConfig.from_dict(published("Qwen3-4B-b16", width=64))).rotary_emb
    x, positions = torch.zeros(1), torch.tensor([[0, 1, 63, 64, 5000, 200_000]])
    for found, expected, unscaled in zip(
        *(rotary(x, positions) for rotary in (ours, library, plain)), strict=True
    ):
        assert torch.equal(found, expected)
        assert not torch.equal(found, unscaled)


ROPES = {
    "default": None,
    "linear": {"factor": 4.0},
    "yarn": YARN,
    "llama3": {**YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "dynamic": {"factor": 4.0},
    "longrope": {**YARN, "short_factor": [1.0] * 16, "long_factor": [3.0] * 16},
}


@pytest.mark.parametrize("kind", ROPES)
def test_heads_are_turned_as_the_library_turns_them(kind):
    """Also for the kinds whose frequencies change with the length of the text, which is longest in the middle."""
    scaling = ROPES[kind] and {"rope_type": kind, **ROPES[kind]}
    drafter = drafter_of(rope_scaling=scaling, max_position_embeddings=64, head_dim=32)
    library = Qwen3RotaryEmbedding(drafter.config.to_qwen3())
    heads = torch.randn(2, 3, 4, 32)
    found = []
    for last in (40, 5000, 50):
        positions = torch.tensor([[0, 1, 7, last], [3, 4, 5, 6]])
        cos, sin = (factor[:, None] for factor in library(heads, positions))
        expected = heads * cos + rotate_half(heads) * sin
        found.append(rotated(heads, drafter._rope(heads, positions)))
        torch.testing.assert_close(found[-1], expected, rtol=0, atol=1e-6)
    moved = not torch.equal(found[0][1], found[1][1])  # the same positions in a longer text
    assert moved == (kind in MOVING_ROPES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_casting_a_drafter_leaves_its_rotations_exact(dtype):
    drafter = drafter_of(rope_scaling={"rope_type": "yarn", **YARN})
    positions = torch.tensor([[3, 30_000]])
    before = drafter.rotary_emb(torch.zeros(1), positions)
    for found, expected in zip(drafter.to(dtype).rotary_emb(torch.zeros(1), positions), before, strict=True):
        assert torch.equal(found, expected)


# ── windows ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize(
    "kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=lambda kernel: kernel.name
)
@pytest.mark.parametrize("num_context", [2, 9, 40])
def test_a_window_is_honoured_by_every_kernel_also_where_the_context_is_longer(
    num_context, kernel, is_causal
):
    drafter = drafter_of(
        num_hidden_layers=3, layer_types=(SLIDING, SLIDING, FULL), sliding_window=9, is_causal=is_causal
    )
    block, taps = drafting_input(drafter, num_context)
    positions = torch.arange(num_context + block.shape[1])[None]
    with sdpa_kernel(kernel):
        found = drafter(block, taps, positions[:, :num_context], positions[:, num_context:])
    torch.testing.assert_close(found[0], naive_denoise(drafter, block, taps), rtol=1e-4, atol=1e-4)


def test_all_that_is_beyond_the_window_may_be_forgotten():
    drafter = drafter_of(layer_types=(SLIDING,) * 2, sliding_window=8)
    block, taps = drafting_input(drafter, num_context=50)
    context, rows = torch.arange(50)[None], torch.arange(50, 55)[None]
    everything = drafter(block, taps, context, rows)
    recent = drafter(block, taps[:, -7:], context[:, -7:], rows)  # the anchor at 50 sees 43…49 and itself
    torch.testing.assert_close(everything, recent, rtol=1e-5, atol=1e-5)
    fewer = drafter(block, taps[:, -6:], context[:, -6:], rows)
    assert not torch.allclose(everything, fewer, atol=1e-3)


# ── what is refused ────────────────────────────────────────────────────────────────────────────────


def change_config(**changes):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def change_tensors(**changes):
    """Tensors by their name with `__` for dots; `None` removes one."""

    def change(folder):
        file = folder / "model.safetensors"
        tensors = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)

    return change


def cut_weights(num_bytes):
    def change(folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:num_bytes])

    return change


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def index_naming(*shards):
    def change(folder):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        weight_map = {f"tensor{i}": shard for i, shard in enumerate(shards)}
        write("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))(folder)

    return change


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


IDS = {"mask_token_id": 96, "target_layer_ids": [1, 3]}
BROKEN = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
    "config cut short": (
        write("config.json", '{"hidden_size": 3'),
        r"config\.json is not valid JSON \(.*line 1",
    ),
    "config no object": (write("config.json", "[1]"), r"config\.json holds a list"),
    "config of another model": (
        write("config.json", '{"architectures": ["Qwen3ForCausalLM"]}'),
        "has no .*hidden_size.* is it a DFlash drafter",
    ),
    "no layer ids": (change_config(dflash_config={"mask_token_id": 96}), "has no target_layer_ids"),
    "no mask id": (change_config(dflash_config={"target_layer_ids": [1, 3]}), "has no mask_token_id"),
    "taps beyond the layers": (
        change_config(dflash_config={**IDS, "target_layer_ids": [1, 4]}),
        r"target_layer_ids has \[4\]",
    ),
    "negative mask id": (change_config(dflash_config={**IDS, "mask_token_id": -1}), "mask_token_id is -1"),
    "size as text": (change_config(hidden_size="32"), "hidden_size is '32'"),
    "size of none": (change_config(vocab_size=0), "vocab_size is 0"),
    "kv heads": (change_config(num_key_value_heads=3), "num_key_value_heads is 3"),
    "unknown rope": (change_config(rope_scaling={"rope_type": "spiral"}), "rope_type is 'spiral'"),
    "window switched off": (change_config(use_sliding_window=False), "use_sliding_window is false"),
    "DFlash2 by architecture": (
        change_config(architectures=["DFlash2DraftModel"]),
        "DFlash2 .*DFlash2DraftModel",
    ),
    "DFlash2 by model type": (change_config(model_type="dflash_v2"), "DFlash2 .*dflash_v2"),
    "DFlash2 by a key": (change_config(attention_conv_kernel=4), "DFlash2 .*attention_conv_kernel"),
    "DFlash2 by a nested key": (
        change_config(dflash_config={**IDS, "candidate_selector": {"k": 4}}),
        "DFlash2 .*candidate_selector",
    ),
    "DFlash2 by a tensor": (
        change_tensors(layers__0__mlp_conv__weight=torch.zeros(2)),
        r"DFlash2 .*layers\.0\.mlp_conv",
    ),
    "missing tensor": (
        change_tensors(layers__1__mlp__up_proj__weight=None),
        r"Missing: layers\.1\.mlp\.up_proj\.weight\. Unexpected: none",
    ),
    "unexpected tensor": (
        change_tensors(lm_head__weight=torch.zeros(2)),
        r"Missing: none\. Unexpected: lm_head\.weight",
    ),
    "tensor of another shape": (
        change_tensors(norm__weight=torch.zeros(3)),
        r"norm\.weight in .* has shape \[3\], .*asks for \[32\]",
    ),
    "config of another width": (
        change_config(intermediate_size=99),
        r"layers\.0\.mlp\.down_proj\.weight \(and 5 more\) in",
    ),
    "weights cut short": (cut_weights(3000), r"model\.safetensors is not a whole safetensors file"),
    "weights empty": (cut_weights(0), r"model\.safetensors is not a whole safetensors file"),
    "a pointer to weights": (write("model.safetensors", "version 1\noid sha256:0\n"), "Git LFS pointer"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"has no \.safetensors file\.$"),
    "pickled weights": (pickled, r"It holds pytorch_model\.bin; pickled weights are refused.*allow='pickle'"),
    "index naming absent shards": (
        index_naming("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        r"names model-00002-of-00002\.safetensors, absent",
    ),
    "index without names": (index_naming(), "has no weight_map"),
    "index cut short": (
        lambda folder: (index_naming("a")(folder), write("model.safetensors.index.json", "{")(folder)),
        r"index\.json is not valid JSON",
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter")
    drafter_of().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_sentence(name, checkpoint, tmp_path):
    change, message = BROKEN[name]
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    DFlashDrafter.from_pretrained(folder)
    change(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message) as refusal:
        DFlashDrafter.from_pretrained(folder)
    assert "\n" not in str(refusal.value)
    assert refusal.value.__cause__ is None


def test_a_second_generation_config_is_refused_before_the_weights_are_looked_for(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    change_config(dflash_config={**IDS, "mlp_conv": True})(folder)
    with pytest.raises(ValueError, match="second-generation"):
        DFlashDrafter.from_pretrained(folder)
    change_config(dflash_config={**IDS, "mlp_conv": False})(folder)  # says that it has none
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors"):
        DFlashDrafter.from_pretrained(folder)


def test_a_pickle_allowed_by_name_is_read_and_holds_tensors_only(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    expected = DFlashDrafter.from_pretrained(folder).state_dict()
    pickled(folder)
    found = DFlashDrafter.from_pretrained(folder, allow_pickle=True).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    torch.save({"norm.weight": Pair}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match="Weights only load failed"):
        DFlashDrafter.from_pretrained(folder, allow_pickle=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 64, "target_hidden_size": 32}, "hidden size is 64"),
        ({"target_hidden_size": 64}, "hidden size of a tap is 64"),
        ({"num_target_layers": 6, "target_layer_ids": (1, 5)}, "layers of the target is 6"),
        ({"vocab_size": 151936}, "vocabulary is 151936"),
        ({"mask_token_id": 97}, "mask_token_id 97 is outside the target's embedding of 97 rows"),
    ],
    ids=["hidden size", "tap width", "taps beyond the layers", "vocabulary", "mask id"],
)
def test_a_drafter_of_another_target_is_refused_naming_what_differs(changes, named):
    drafter = DFlashDrafter(small_drafter_config(**changes))
    with pytest.raises(ValueError, match=named):
        Pair(hybrid(), drafter)
