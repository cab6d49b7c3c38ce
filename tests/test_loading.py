"""Loading a pair by folder: every family the library loads, where it goes, and what is refused before it is read."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import VOCAB, _finish, causal_lm, dense, hybrid, random_ids, small_drafter_config, wrapped_hybrid
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BertConfig,
    PreTrainedTokenizerFast,
)

import ddtree_lab as dl
from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.loading import load_pair
from ddtree_lab.pretrained import LoadOptions

VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4)
TEXT = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
)  # fmt: skip
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, head_dim=16
)  # fmt: skip
IMAGE_IDS = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)


def multimodal(model_type, text, vision, **more):
    """A random multimodal model of 4 text layers, as it is published."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, text_config={**TEXT, **text}, vision_config=vision, tie_word_embeddings=False, **more
    )
    return _finish(AutoModelForImageTextToText.from_config(config), torch.float32)


def qwen3_5_moe():
    more = dict(spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=16)
    return multimodal("qwen3_5_moe", {**LINEAR, **MOE}, {**VISION, **more}, **IMAGE_IDS)


def qwen2_5_vl():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    vision = {**VISION, "window_size": 8, "fullatt_block_indexes": [0]}
    return multimodal("qwen2_5_vl", {"rope_parameters": rope}, vision, **IMAGE_IDS)


def gemma3():
    vision = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )  # fmt: skip
    text = dict(sliding_window=9, query_pre_attn_scalar=8)
    return multimodal("gemma3", text, vision, mm_tokens_per_image=4, image_token_index=90)


# family → how it is made, the class it is loaded as, how trees are verified
FAMILIES = {
    "Qwen3.5 text": (hybrid, "Qwen3_5ForCausalLM", "tree"),
    "Qwen3.5 multimodal": (wrapped_hybrid, "Qwen3_5ForCausalLM", "tree"),
    "Qwen3.5 MoE text": (lambda: hybrid(family="qwen3_5_moe"), "Qwen3_5MoeForCausalLM", "tree"),
    "Qwen3.5 MoE multimodal": (qwen3_5_moe, "Qwen3_5MoeForCausalLM", "tree"),
    "Qwen3-Next": (lambda: hybrid(family="qwen3_next"), "Qwen3NextForCausalLM", "tree"),
    "Qwen3": (dense, "Qwen3ForCausalLM", "tree"),
    "Qwen2.5-VL": (qwen2_5_vl, "Qwen2_5_VLForConditionalGeneration", "tree"),
    "Llama": (lambda: causal_lm("llama", seed=1), "LlamaForCausalLM", "tree"),
    "gpt-oss": (lambda: causal_lm("gpt_oss"), "GptOssForCausalLM", "tree"),
    "Gemma 2": (lambda: causal_lm("gemma2"), "Gemma2ForCausalLM", "tree"),
    "Gemma 3 text": (lambda: causal_lm("gemma3_text"), "Gemma3ForCausalLM", "tree"),
    "Gemma 3 multimodal": (gemma3, "Gemma3ForConditionalGeneration", "tree"),
    "Jamba, no port": (lambda: causal_lm("jamba"), "JambaForCausalLM", "paths"),
}


def save(model, folder):
    """Target and a random drafter in folders."""
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "target")
    drafter = DFlashDrafter(small_drafter_config())
    drafter.save_pretrained(folder / "drafter")
    return folder / "target", folder / "drafter"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_is_loaded_by_folder_and_decoded_without_loss(name, tmp_path):
    make, class_name, method = FAMILIES[name]
    original, ids = make(), random_ids(9)
    pair = load_pair(*save(original, tmp_path))
    assert type(pair.target).__name__ == class_name
    assert torch.equal(pair.embeddings.input.weight, original.get_input_embeddings().weight)
    session = dl.Session(pair, ids, tree_budget=9).run(rounds=3)
    assert session.records["verify"].method == method
    new = len(session.token_ids)
    plain = original.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)[0, 9:]
    assert list(session.token_ids) == plain.tolist()
    assert len(set(session.token_ids)) > 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(hybrid(), tmp_path_factory.mktemp("pair"))


@pytest.fixture
def folders(saved, tmp_path):
    """A pair in folders that a test may spoil."""
    return tuple(shutil.copytree(folder, tmp_path / folder.name) for folder in saved)


@pytest.fixture(scope="module")
def expected(saved):
    return dl.generate(load_pair(*saved), random_ids(9), max_new_tokens=6).token_ids


def check_same_text(pair, expected):
    for method in ("autoregressive", "ddtree"):
        assert dl.generate(pair, random_ids(9), method, max_new_tokens=6).token_ids == expected


# ── where it goes ──────────────────────────────────────────────────────────────────────────────────

DISK = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
DISK |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}


@pytest.mark.parametrize(
    ("placing", "away"),
    [
        ({"device_map": "auto"}, 0),
        ({"device_map": DISK}, 26),
        ({"max_memory": {"cpu": "160KB"}}, 27),
        ({"device_map": "auto", "max_memory": {"cpu": "1GB"}}, 0),
    ],
    ids=["auto", "map", "memory for a part", "memory for all"],
)
def test_where_the_weights_are_makes_no_difference(saved, expected, placing, away):
    pair = load_pair(*saved, **placing)
    assert sum(tensor.is_meta for tensor in pair.target.parameters()) == away
    assert pair.drafter.device == torch.device("cpu")
    check_same_text(pair, expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "auto"), ({"device_map": "cpu"}, "cpu"), ({"tp_plan": "auto"}, None)],
    ids=["default", "a map", "split layers"],
)
def test_an_accelerator_is_used_unless_something_else_is_asked_for(options, expected, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert LoadOptions(**options).placing.get("device_map") == expected
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert LoadOptions().placing.get("device_map") is None


def test_merged_experts_are_offloaded_to_a_folder_of_their_own(tmp_path):
    folders = save(hybrid(family="qwen3_5_moe"), tmp_path)
    expected = dl.generate(load_pair(*folders), random_ids(9), max_new_tokens=6).token_ids
    pair = load_pair(*folders, max_memory={"cpu": "250KB"}, offload_folder=tmp_path / "away")
    assert sum(tensor.is_meta for tensor in pair.target.parameters()) == 35
    assert len(list((tmp_path / "away").iterdir())) >= 4  # two layers' merged experts
    check_same_text(pair, expected)


def test_a_target_that_is_all_on_disk_runs_or_is_refused(saved, expected):
    pair, refusal = None, ""
    try:
        pair = load_pair(*saved, max_memory={"cpu": "30KB"})
    except ValueError as error:  # transformers 5.8 leaves such a model without weights
        refusal = str(error)
    if pair is None:
        assert "all of it would be on disk" in refusal
    else:
        assert all(tensor.is_meta for tensor in pair.target.parameters())
        check_same_text(pair, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_attention_back_end_asked_for_is_used(saved, expected, implementation):
    pair = load_pair(*saved, attn_implementation=implementation)
    assert pair.target.config._attn_implementation == implementation
    check_same_text(pair, expected)


@pytest.mark.parametrize(("dtype", "drafter_dtype"), [("float16", "bfloat16"), ("float64", "float64")])
def test_the_drafter_runs_in_the_targets_dtype_but_never_in_half_precision(saved, dtype, drafter_dtype):
    pair = load_pair(*saved, dtype=dtype)
    assert str(pair.target.dtype) == f"torch.{dtype}"
    assert str(pair.drafter.dtype) == f"torch.{drafter_dtype}"


def test_what_is_loaded_already_stays_where_and_as_it_is(saved):
    target, drafter = hybrid(), DFlashDrafter(small_drafter_config()).to(torch.bfloat16)
    pair = load_pair(target, drafter)
    assert pair.target is target and pair.drafter is drafter
    assert load_pair(saved[0], drafter).drafter.dtype is torch.bfloat16
    assert load_pair(target, saved[1]).drafter.dtype is torch.float32


def test_two_ways_to_spread_a_model_exclude_each_other(saved):
    with pytest.raises(ValueError, match="tp_plan and device_map are both given"):
        load_pair(*saved, tp_plan="auto", device_map="auto")
    with pytest.raises(ValueError, match=r"tp_plan='auto' splits layers over processes, .* torchrun"):
        load_pair(*saved, tp_plan="auto")


# ── packages that may be absent ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "module", "package"),
    [
        ({"quantization": "4bit"}, "bitsandbytes", "bitsandbytes"),
        ({"quantization": "8bit"}, "bitsandbytes", "bitsandbytes"),
        ({"attn_implementation": "flash_attention_2"}, "flash_attn", "flash-attn"),
    ],
    ids=["4bit", "8bit", "flash attention"],
)
def test_an_absent_package_is_named_before_anything_is_read(asked, module, package, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == module else find(name, *rest)
    )
    with pytest.raises(ModuleNotFoundError, match=rf"needs the package {package}: pip install {package}"):
        load_pair(tmp_path, tmp_path, **asked)


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes (an optional package) is not installed",
)
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize(("bits", "stored"), [("4bit", torch.uint8), ("8bit", torch.int8)])
def test_a_quantised_target_is_decoded_without_loss_by_a_drafter_that_is_not(bits, stored, tmp_path):
    sizes = dict(
        hidden_size=128, linear_num_key_heads=2, linear_num_value_heads=32
    )  # what its CPU kernels can take
    config = AutoConfig.for_model("qwen3_5_text", **{**TEXT, **LINEAR, **sizes, "intermediate_size": 128})
    torch.manual_seed(0)
    target, _ = save(_finish(AutoModelForCausalLM.from_config(config), torch.float32), tmp_path)
    drafter = DFlashDrafter(small_drafter_config(hidden_size=128))
    drafter.save_pretrained(tmp_path / "wide")
    pair, ids = load_pair(target, tmp_path / "wide", quantization=bits), random_ids(9)
    assert pair.target.model.layers[0].mlp.up_proj.weight.dtype is stored
    assert {tensor.dtype for tensor in pair.drafter.parameters()} == {torch.float32}
    plain = dl.generate(pair, ids, "autoregressive", max_new_tokens=12)
    for method in ("dflash", "ddtree"):
        assert dl.generate(pair, ids, method, max_new_tokens=12).token_ids == plain.token_ids


# ── the tokenizer ──────────────────────────────────────────────────────────────────────────────────


def test_a_folder_without_a_tokenizer_takes_ids_and_one_with_it_text(folders):
    assert load_pair(*folders).tokenizer is None
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folders[0])
    pair = load_pair(*folders)
    assert pair.encode("w7").tolist() == [[7]]
    assert dl.generate(pair, "w7", max_new_tokens=3).text.count("w") == 3


# ── what is refused ────────────────────────────────────────────────────────────────────────────────


def change_json(folder, name, **changes):
    values = {**json.loads((folder / name).read_text()), **changes}
    (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def change_tensors(folder, **changes):
    tensors = load_file(folder / "model.safetensors") | {n.replace("__", "."): t for n, t in changes.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pickle_weights(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def name_absent_shard(folder):
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00007-of-00009.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN_TARGETS = {
    "no config": (lambda f: (f / "config.json").unlink(), r"target: .* has no config\.json"),
    "config cut short": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    "unknown model type": (
        lambda f: change_json(f, "config.json", model_type="qwen9"),
        r"model_type 'qwen9', which",
    ),
    "no model type": (lambda f: change_json(f, "config.json", model_type=None), "model_type None, which"),
    "an encoder": (
        lambda f: BertConfig().save_pretrained(f),
        "'bert' is no causal language model|hidden size",
    ),
    "weights cut short": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:9000]),
        r"model\.safetensors is not a whole safetensors file",
    ),
    "absent shard": (name_absent_shard, r"names model-00007-of-00009\.safetensors, absent"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"has no \.safetensors file\.$"),
    "pickled weights": (pickle_weights, r"pytorch_model\.bin; pickled weights are refused.*allow='pickle'"),
    "missing tensor": (
        lambda f: change_tensors(f, model__norm__weight=None, lm_head__weight=None),
        r"lm_head\.weight \(and 1 more\) is missing in .*random weights",
    ),
    "tensor of another shape": (
        lambda f: change_tensors(f, model__norm__weight=torch.zeros(7)),
        r"model\.norm\.weight is of another shape in .*random weights",
    ),
}


@pytest.mark.parametrize("name", BROKEN_TARGETS)
def test_a_broken_target_is_refused_in_one_sentence(name, folders):
    change, message = BROKEN_TARGETS[name]
    change(folders[0])
    with pytest.raises((ValueError, FileNotFoundError), match=message) as refusal:
        load_pair(*folders)
    assert "\n" not in str(refusal.value)


def test_a_drafter_that_does_not_fit_is_found_out_before_the_targets_weights_are_read(folders):
    (folders[0] / "model.safetensors").write_bytes(b"nothing of use")
    change_json(folders[1], "config.json", vocab_size=98)
    with pytest.raises(
        ValueError, match=r"another target: vocabulary is 98 in its config, 97 in Qwen3_5ForCausalLM"
    ):
        load_pair(*folders)
    change_json(folders[1], "config.json", attention_conv=True)
    with pytest.raises(ValueError, match="second-generation DFlash2"):
        load_pair(*folders)


def test_pickles_are_read_where_they_are_allowed_by_name(folders, expected):
    for folder in folders:
        pickle_weights(folder)
    with pytest.raises(FileNotFoundError, match=r"drafter: .* pickled weights are refused"):
        load_pair(*folders)
    check_same_text(load_pair(*folders, allow="pickle"), expected)


OWN_CODE = """
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM
Path({mark!r}).touch()

class OwnConfig(Qwen3Config):
    model_type = "{model_type}"

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


def bring_code(folder, mark, model_type):
    dense().save_pretrained(folder)
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change_json(folder, "config.json", model_type=model_type, auto_map=code, architectures=["OwnForCausalLM"])
    (folder / "own.py").write_text(OWN_CODE.format(mark=str(mark), model_type=model_type))


def test_code_of_a_checkpoint_runs_only_where_it_is_allowed_by_name(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "it ran"
    bring_code(folders[0], mark, "own")
    with pytest.raises(
        ValueError, match=r"its own code \(own\.OwnConfig, own\.OwnForCausalLM\), which is refused"
    ):
        load_pair(*folders)
    assert not mark.exists()
    pair = load_pair(*folders, allow=["remote_code"])
    assert mark.exists() and type(pair.target).__name__ == "OwnForCausalLM"


def test_a_known_model_that_brings_code_is_loaded_without_it(folders, tmp_path):
    bring_code(folders[0], tmp_path / "it ran", "qwen3")
    assert type(load_pair(*folders).target).__name__ == "Qwen3ForCausalLM"
    assert not (tmp_path / "it ran").exists()


def test_what_can_be_allowed_is_named(saved):
    with pytest.raises(
        ValueError, match="allow has 'network'; what can be allowed is 'pickle' and 'remote_code'"
    ):
        load_pair(*saved, allow="network")


# ── without a network ──────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def no_network(monkeypatch):
    def connect(*args):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.mark.usefixtures("no_network")
def test_folders_and_local_files_only_never_ask_the_network(saved):
    load_pair(*saved)
    for role, names in {
        "drafter": (saved[0], "nobody/drafter"),
        "target": ("nobody/target", saved[1]),
    }.items():
        message = (
            rf"{role}: 'nobody/{role}' is no folder and not in the hub's cache, and the network is not to be"
        )
        with pytest.raises(ValueError, match=message) as refusal:
            load_pair(*names, local_files_only=True)
        assert refusal.value.__cause__ is None and "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["no/such/folder", "./here", "a b"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(saved, name):
    with pytest.raises(ValueError, match=rf"target: '{name}' is neither a folder nor a hub id"):
        load_pair(name, saved[1])


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_hub_id_while_offline_gives_one_line_on_the_command_line(variable, tmp_path):
    command = [
        sys.executable,
        "-m",
        "ddtree_lab",
        "run",
        "--target",
        "nobody/target",
        "--drafter",
        "nobody/drafter",
    ]
    environment = {**os.environ, variable: "1", "HF_HOME": str(tmp_path)}
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert found.returncode == 2
    assert len(found.stderr.strip().splitlines()) == 1
    assert "'nobody/drafter' is no folder and not in the hub's cache" in found.stderr
