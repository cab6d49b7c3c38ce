"""`synth`: the published layout with random numbers, loaded by the paths that load the published ones."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import ddtree_lab as dl
from ddtree_lab.cli import main
from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.weightless.inspection import num_stored_tensors
from ddtree_lab.weightless.models import build_weightless, build_weightless_drafter
from ddtree_lab.weightless.presets import bundled_presets, config_from_dict
from ddtree_lab.weightless.rehearsal import LiveBytes
from ddtree_lab.weightless.scales import pair_configs
from ddtree_lab.weightless.shards import Shards
from ddtree_lab.weightless.synth import SHARD_BYTES, synthesise

WRAPPED = [name for name, preset in bundled_presets().items() if preset.wrapper]
LAYOUTS = [(name, False) for name in bundled_presets()] + [(name, True) for name in WRAPPED]


def layout_id(layout) -> str:
    return f"{layout[0]}{' multimodal' if layout[1] else ''}"


@pytest.fixture(scope="module", params=LAYOUTS, ids=layout_id)
def written(request, tmp_path_factory):
    name, multimodal = request.param
    return synthesise(name, tmp_path_factory.mktemp("pair"), multimodal=multimodal)


def headers(folder: Path) -> dict[str, tuple]:
    """Every tensor of a folder: shape and dtype, from its safetensors files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            found.update(
                {n: (tuple(file.get_slice(n).get_shape()), file.get_slice(n).get_dtype()) for n in names}
            )
    return found


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---- the pair works -------------------------------------------------------------------------------


def test_a_pair_loads_and_three_rounds_are_lossless(written):
    pair = dl.load_pair(written.target, written.drafter, dtype=torch.float32)
    prompt = dl.bundled_prompts()[0]
    plain = dl.generate(pair, prompt, "autoregressive", max_new_tokens=30)
    assert torch.isfinite(pair.target(pair.encode(prompt)).logits).all()
    session = dl.Session(pair, prompt, tree_budget=16)
    session.run(rounds=3)
    tree = session.trace
    assert len(tree.rounds) == 3
    assert all(round_.tree.num_nodes == 17 for round_ in tree.rounds)
    assert tree.token_ids == plain.token_ids[: len(tree.token_ids)]
    assert len(tree.token_ids) >= 4


def test_logits_are_of_a_wide_models_size(written):
    """Unit hidden states on a head of spread 0.02 √(width of the real model)."""
    pair = dl.load_pair(written.target, written.drafter, dtype=torch.float32)
    width = bundled_presets()[written.preset].target["hidden_size"]
    with torch.no_grad():
        spread = float(pair.target(torch.arange(40)[None]).logits.std())
    assert spread == pytest.approx(0.02 * width**0.5, rel=0.15)


def test_the_tokenizer_is_one_that_reads_and_writes(written):
    pair = dl.load_pair(written.target, written.drafter)
    ids = pair.encode("Count from 3 to 8.")
    assert "Count from 3 to 8." in pair.decode(ids[0].tolist())
    assert pair.eos_token_ids == {0, 2}


# ---- the layout is the published one --------------------------------------------------------------


def test_the_index_names_every_tensor_and_its_shard(written):
    index = json.loads((written.target / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in written.target.glob("*.safetensors"))
    assert len(shards) == written.num_shards > 1
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    for shard in shards:
        with safe_open(written.target / shard, framework="pt") as file:
            assert set(file.keys()) == {name for name, home in index["weight_map"].items() if home == shard}
            assert file.metadata() == {"format": "pt"}
    assert len(index["weight_map"]) == written.num_target_tensors
    assert index["metadata"]["total_size"] == sum(
        2 * torch.Size(shape).numel() for shape, _ in headers(written.target).values()
    )


def test_target_names_and_shapes_are_the_published_ones(written):
    config = json.loads((written.target / "config.json").read_text())
    tensors = headers(written.target)
    assert {dtype for _, dtype in tensors.values()} == {"BF16"}
    multimodal = "text_config" in config
    assert config["architectures"][0].endswith("ForConditionalGeneration" if multimodal else "ForCausalLM")
    text = config["text_config"] if multimodal else config
    root = "model.language_model" if multimodal else "model"
    assert tensors[f"{root}.embed_tokens.weight"][0] == (text["vocab_size"], text["hidden_size"])
    assert ("lm_head.weight" in tensors) is not text["tie_word_embeddings"]
    assert len({name for name in tensors if name.startswith(f"{root}.layers.0.")}) >= 11
    preset = bundled_presets()[written.preset]
    if "num_experts" in preset.target:  # published as one tensor of all experts
        experts = (text["num_experts"], 2 * text["moe_intermediate_size"], text["hidden_size"])
        assert tensors[f"{root}.layers.0.mlp.experts.gate_up_proj"][0] == experts
    assert text["layer_types"] == config_from_dict(preset.target).layer_types[: text["num_hidden_layers"]]
    ratio = preset.target["num_attention_heads"] // preset.target["num_key_value_heads"]
    assert text["num_attention_heads"] == ratio * text["num_key_value_heads"]
    generation = json.loads((written.target / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]


def test_drafter_names_and_config_are_the_published_ones(written):
    config = json.loads((written.drafter / "config.json").read_text())
    published = bundled_presets()[written.preset].drafter
    assert list(config) == list(published)
    assert config["layer_types"] == published["layer_types"]
    assert set(config["dflash_config"]) == {"mask_token_id", "target_layer_ids"}
    layers, num_taps = config["num_hidden_layers"], len(published["dflash_config"]["target_layer_ids"])
    tensors = headers(written.drafter)
    assert [path.name for path in written.drafter.glob("*.safetensors")] == ["model.safetensors"]
    assert len(tensors) == 11 * layers + 3 == written.num_drafter_tensors
    assert tensors["fc.weight"] == ((config["hidden_size"], num_taps * config["hidden_size"]), "BF16")
    assert {"hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_norm.weight"} <= set(tensors)


@pytest.mark.parametrize("name", WRAPPED)
def test_the_multimodal_layout_loads_whole_and_as_its_text_model(name, tmp_path):
    written = synthesise(name, tmp_path, multimodal=True)
    for auto in (AutoModelForImageTextToText, AutoModelForCausalLM):
        model, info = auto.from_pretrained(written.target, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["mismatched_keys"]
        unexpected = {key.split(".")[1] for key in info["unexpected_keys"]}
        assert unexpected <= ({"visual"} if auto is AutoModelForCausalLM else set())
    assert type(model).__name__.endswith("ForCausalLM")


# ---- the same bytes, whatever happens -------------------------------------------------------------


def test_an_interrupted_run_is_continued_to_the_same_bytes(tmp_path):
    whole = synthesise("qwen3.6-27b", tmp_path / "whole")
    total = whole.num_bytes
    for share in (0.1, 0.5, 0.9):
        folder = tmp_path / f"interrupted at {share}"

        def interrupt(done: int, num_bytes: int, share: float = share) -> None:
            if done > share * num_bytes:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            synthesise("qwen3.6-27b", folder, on_progress=interrupt)
        assert (
            digests(folder).items() < digests(tmp_path / "whole").items()
        )  # fewer files, each of them whole
        seen: list[int] = []
        continued = synthesise(
            "qwen3.6-27b", folder, on_progress=lambda done, _, seen=seen: seen.append(done)
        )
        assert seen == sorted(seen) and seen[-1] == total
        assert 0 < continued.kept_bytes < total if share > 0.2 else continued.kept_bytes == 0
        assert digests(folder) == digests(tmp_path / "whole")


def test_files_are_as_readable_as_any_other(written):
    assert len({path.stat().st_mode for path in written.target.iterdir()}) == 1


def test_a_finished_folder_is_left_as_it_is(tmp_path):
    synthesise("qwen3-4b", tmp_path)
    before = digests(tmp_path)
    shard = next((tmp_path / "target").glob("*.safetensors"))
    stamp = shard.stat().st_mtime_ns
    again = synthesise("qwen3-4b", tmp_path)
    assert again.kept_bytes == again.num_bytes
    assert shard.stat().st_mtime_ns == stamp
    assert digests(tmp_path) == before


def test_the_process_may_be_killed(tmp_path):
    """A kill leaves a part file at most, and it is not taken for a shard."""
    script = (
        "import sys, time; from ddtree_lab.weightless.synth import synthesise\n"
        "synthesise('qwen3-8b', sys.argv[1], on_progress=lambda done, _: (time.sleep(0.05), print(done, flush=True)))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "killed")], stdout=subprocess.PIPE, env={**os.environ}
    )
    for _ in range(40):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    process.stdout.close()
    assert 0 < len(list((tmp_path / "killed").rglob("*.safetensors"))) < 5
    synthesise("qwen3-8b", tmp_path / "killed")
    synthesise("qwen3-8b", tmp_path / "whole")
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")


def test_the_seed_decides_the_numbers(tmp_path):
    folders = [synthesise("qwen3-4b", tmp_path / str(seed), seed=seed).target for seed in (0, 1)]
    name = "model.layers.0.mlp.up_proj.weight"
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    first, second = (model.get_parameter(name).detach() for model in models)
    assert not torch.equal(first, second)
    assert float(first.float().std()) == pytest.approx(float(second.float().std()), rel=0.05)


def test_no_two_tensors_are_alike_and_norms_are_the_librarys(written):
    pair = dl.load_pair(written.target, written.drafter)
    matrices = [p.float().flatten()[:64] for p in pair.target.parameters() if p.ndim >= 2]
    assert len({tuple(matrix.tolist()) for matrix in matrices}) == len(matrices)
    fresh = AutoModelForCausalLM.from_config(pair.target.config)
    for name, parameter in fresh.named_parameters():
        if "norm" in name or name.endswith("dt_bias"):
            assert torch.equal(pair.target.get_parameter(name).float(), parameter.float()), name
        if name.endswith("A_log"):
            assert float(pair.target.get_parameter(name).detach().exp().max()) <= 16.1
    assert torch.equal(pair.drafter.norm.weight, torch.ones_like(pair.drafter.norm.weight))


class HostBytes(LiveBytes):
    """Real memory only: tensors on the meta device have none."""

    def _count(self, storage):
        if storage.device.type == "cpu":
            super()._count(storage)


def test_never_more_than_one_shard_is_in_memory(tmp_path):
    configs = pair_configs(dl.find_preset("qwen3.6-27b"), "tiny")
    target = build_weightless(config_from_dict(configs.target), torch.bfloat16)
    shards = Shards(target, tmp_path, SHARD_BYTES["tiny"])
    largest = max(shards.num_bytes(names) for names in shards.split.filename_to_tensors.values())
    assert largest <= SHARD_BYTES["tiny"] < shards.num_bytes() / 3
    with HostBytes() as counted:
        shards.write(lambda name, module: target._init_weights(module), seed=0)
    float32_copy = 2 * max(tensor.nbytes for tensor in shards.tensors.values())  # where the library needs one
    assert largest <= counted.peak <= largest + float32_copy < shards.num_bytes()
    assert all(parameter.is_meta for parameter in target.parameters())


# ---- scales ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", bundled_presets())
def test_small_keeps_real_widths_and_fits_24_gib_with_its_drafter(name):
    preset = bundled_presets()[name]
    configs = pair_configs(preset, "small")
    target = build_weightless(config_from_dict(configs.target), torch.bfloat16)
    drafter = build_weightless_drafter(dl.DFlashConfig.from_dict(configs.drafter))
    changed = {key for key, value in configs.target.items() if value != preset.target[key]}
    assert changed == {"num_hidden_layers"}
    assert num_stored_tensors(drafter) == 11 * preset.drafter["num_hidden_layers"] + 3
    taps = configs.drafter["dflash_config"]["target_layer_ids"]
    assert taps == sorted(taps)
    assert len(taps) == len(preset.drafter["dflash_config"]["target_layer_ids"])
    assert set(taps) == set(range(4))
    weights = sum(p.nbytes for model in (target, drafter) for p in model.parameters())
    assert weights < 24 * 2**30
    assert configs.drafter["dflash_config"]["mask_token_id"] < target.get_input_embeddings().weight.shape[0]


def test_full_is_the_preset_itself():
    preset = bundled_presets()["qwen3.6-27b"]
    configs = pair_configs(preset, "full")
    assert (configs.target, configs.drafter) == (preset.target, preset.drafter)
    assert configs.generation["eos_token_id"][0] == 248046


def test_small_27b_is_the_27b_in_width():
    target = pair_configs(bundled_presets()["qwen3.6-27b"], "small").target
    assert (target["hidden_size"], target["linear_num_value_heads"], target["vocab_size"]) == (
        5120,
        48,
        248320,
    )
    assert (
        pair_configs(bundled_presets()["qwen3.6-27b"], "small", num_layers=8).target["num_hidden_layers"] == 8
    )


def test_a_tiny_pair_is_a_few_megabytes(written):
    folder = written.target.parent
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 8_000_000


# ---- refusals -------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 0, 10**8))
    with pytest.raises(
        OSError, match=r"needs 1\.\d+ MiB and 100 MiB to spare, but its disk has 95\.4 MiB free"
    ):
        synthesise("qwen3-4b", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_full_scale_pair_needs_what_it_weighs(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(2**40, 0, 50 * 2**30))
    with pytest.raises(OSError, match=r"needs 53\.3 GiB"):
        synthesise("qwen3.6-27b", tmp_path / "new", scale="full")


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        synthesise("qwen3-4b", tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        synthesise("qwen3-4b", tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [(dict(preset="qwen3-8b"), "preset qwen3-4b, not qwen3-8b"), (dict(seed=1), "seed 0, not 1")],
    ids=str,
)
def test_a_folder_begun_otherwise_is_refused(tmp_path, changed, said):
    synthesise("qwen3-4b", tmp_path)
    before = digests(tmp_path)
    with pytest.raises(ValueError, match=said):
        synthesise(**{"preset": "qwen3-4b", "folder": tmp_path, **changed})
    assert digests(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--like", "qwen3-4b"], "--out"),
        (["--like", "gpt-7", "--out", "new"], "qwen3.6-27b"),
        (["--like", "qwen3-4b", "--out", "new", "--scale", "huge"], "--scale"),
        (["--like", "qwen3-4b", "--out", "new", "--layers", "99"], "num_layers"),
        (["--like", "qwen3-4b", "--out", "new", "--multimodal"], "text model only"),
        (["--like", "qwen3-4b", "--out", "."], "not empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line_and_exit_2(capsys, arguments, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("")
    assert main(["synth", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_command_writes_and_says_what(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["synth", "--like", "qwen3.6-27b", "--scale", "tiny", "--out", str(tmp_path / "new")]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_drafter_tensors"], report["kept_bytes"]) == (58, 0)
    assert DFlashDrafter.from_pretrained(report["drafter"]).config.block_size == 16
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "kept" in out and "58 tensors" in out
    suggested = shlex.split(out.splitlines()[-1])[1:]
    assert main([*suggested, "--max-new-tokens", "6", "--tree-budget", "4"]) == 0
