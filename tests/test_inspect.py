"""`inspect`: what is said without weights is what a model with weights does."""

from __future__ import annotations

import json
import time

import models
import pytest
import torch
from transformers import AutoModelForCausalLM

import ddtree_lab as dl
from ddtree_lab.cli import main
from ddtree_lab.compat import get_state
from ddtree_lab.stages.cache import make_cache
from ddtree_lab.stages.forward import prefill
from ddtree_lab.stages.verify import exact_method
from ddtree_lab.weightless.inspection import inspect_model

MEBI = 2**20


def inspect_json(capsys, *arguments: str) -> dict:
    assert main(["inspect", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def state_dtype() -> torch.dtype:
    """What the library keeps the states of a bfloat16 model in."""
    target = models.hybrid(dtype=torch.bfloat16)
    cache = make_cache(target)
    prefill(target, models.random_ids(3), cache)
    return get_state(cache.layers[0], "recurrent_states").dtype


def test_the_27b_is_told_without_weights_and_without_a_network(capsys, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *a: pytest.fail("the network was used"))
    started = time.process_time()
    report = inspect_json(capsys, "qwen3.6-27b")
    assert time.process_time() - started < 15
    assert report["num_tensors"] == 851
    assert report["num_layers"] == 64
    assert report["layer_counts"] == {"linear_attention": 48, "full_attention": 16}
    assert [layer["kind"][0] for layer in report["layers"]] == list("lllf" * 16)
    assert (report["input_path"], report["output_path"], report["tied"]) == (
        "model.embed_tokens",
        "lm_head",
        False,
    )
    assert report["kv_bytes_per_token"] == 16 * 2 * 4 * 256 * 2
    size = state_dtype().itemsize  # float32 from transformers 5.15 on at the latest
    assert report["recurrent_bytes"] == 36 * MEBI * size == 48 * 48 * 128 * 128 * size
    assert {layer["recurrent_dtype"] for layer in report["layers"]} == {"", str(state_dtype())[6:]}
    assert report["conv_bytes"] == 48 * (2 * 16 * 128 + 48 * 128) * 4 * 2
    assert report["num_bytes"]["bfloat16"] == 2 * report["num_parameters"]
    assert report["verify_method"] == "tree"
    assert report["drafter"]["num_tensors"] == 58
    assert report["drafter"]["target_layer_ids"] == [1, 16, 31, 46, 61]


FAMILIES = {
    "hybrid": models.hybrid,
    "moe": lambda: models.hybrid(family="qwen3_5_moe"),
    "wrapped": models.wrapped_hybrid,
    "dense": models.dense,
    "windowed": lambda: models.dense(window=9),
    "mixtral": lambda: models.causal_lm("mixtral"),
    "gpt_oss": lambda: models.causal_lm("gpt_oss"),
    "gemma3_text": lambda: models.causal_lm("gemma3_text"),
    "lfm2": lambda: models.causal_lm("lfm2"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_told_is_a_byte_that_a_loaded_model_holds(family, tmp_path):
    FAMILIES[family]().save_pretrained(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path)
    told = inspect_model(str(tmp_path))
    assert told.architecture == type(target).__name__
    assert told.num_bytes[told.dtype] == sum(p.nbytes for p in target.parameters())
    assert told.verify_method == exact_method(target)
    length = 14  # longer than every window
    cache = make_cache(target)
    prefill(target, models.random_ids(length), cache)
    held = dl.describe_cache(cache).layers
    assert [layer.bytes_at(length) for layer in told.layers] == [layer.num_bytes for layer in held]
    assert [layer.class_name for layer in told.layers] == [layer.class_name for layer in held]
    assert [layer.rollback for layer in told.layers] == [layer.rollback for layer in held]


def test_a_model_that_cannot_be_run_without_weights_is_still_described(tmp_path, monkeypatch):
    def looks_at_values(*args, **kwargs):
        return bool(torch.zeros(1, device="meta"))

    models.dense().save_pretrained(tmp_path)
    monkeypatch.setattr("ddtree_lab.weightless.footprint.run_target", looks_at_values)
    told = inspect_model(str(tmp_path))
    assert told.layers == ()
    assert "without weights" in told.cache_unknown
    assert told.num_tensors == 4 * 11 + 3
    assert "without weights" in str(told)


def test_a_target_without_a_tree_pass_says_why(tmp_path):
    models.causal_lm("lfm2").save_pretrained(tmp_path)
    told = inspect_model(str(tmp_path))
    assert told.verify_method == "paths"
    assert "no tree-structured port" in told.verify_reason


def test_quantised_bytes_are_those_of_linear_layers_and_their_scales():
    told = inspect_model("qwen3-4b")
    embedding = 151936 * 2560 * 2
    rows, weights = 0, 0
    for out, into in (
        (4096, 2560),
        (1024, 2560),
        (1024, 2560),
        (2560, 4096),
        *[(9728, 2560)] * 2,
        (2560, 9728),
    ):
        rows, weights = rows + 36 * out, weights + 36 * out * into
    norms = 36 * (2 * 2560 + 2 * 128) * 2 + 2560 * 2
    assert told.num_bytes["8bit"] == embedding + norms + weights + 4 * rows
    assert told.num_bytes["4bit"] == embedding + norms + weights // 2 + 4 * weights // 64


def test_the_dtype_can_be_asked_for():
    assert inspect_model("qwen3-4b", "float32").num_bytes["float32"] == 4 * 4_022_468_096
    assert inspect_model("qwen3-4b", torch.float32).dtype == "float32"


def test_a_folder_of_a_synthetic_multimodal_checkpoint_is_its_text_model(tmp_path):
    dl.synthesise("qwen3.6-27b", tmp_path, multimodal=True)
    told = inspect_model(str(tmp_path / "target"))
    assert told.architecture == "Qwen3_5ForCausalLM"
    assert told.layer_counts == {"linear_attention": 6, "full_attention": 2}


def test_code_in_a_folder_is_not_run(tmp_path):
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ValueError, match=r"remote_code|custom code"):
        inspect_model(str(tmp_path))


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_the_page(width):
    text = inspect_model("qwen3-8b").to_text(width=width)
    assert max(map(len, text.splitlines())) <= width
    for expected in ("399, 8.19 billion", "model.embed_tokens → lm_head", "144 KiB a token", "taps 1, 9, 17"):
        assert expected in text
    assert inspect_model("qwen3-8b").to_text(width=width, ascii=True).isascii()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "MODEL"),
        (["no-such-model"], "qwen3.6-27b"),
        (["Qwen/Qwen3.6-27B"], "ask for the preset 'qwen3.6-27b'"),
        (["qwen3-4b", "--dtype", "int8"], "dtype"),
        (["qwen3-4b", "--dtype", "nonsense"], "dtype"),
        (["drafter"], "is a drafter"),
        (["empty"], "empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line_and_exit_2(capsys, arguments, said, monkeypatch, tmp_path):
    from transformers import AutoConfig

    real = AutoConfig.from_pretrained
    local = {"local_files_only": True}  # as HF_HUB_OFFLINE=1, which is read at import
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **options: real(name, **options | local))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text(
        json.dumps({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"})
    )
    assert main(["inspect", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err
