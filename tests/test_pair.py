"""The embedded pair: loads offline, answers, and the tree pays."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import ddtree_lab as dl
from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.pair import assets_folder

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def pair() -> dl.Pair:
    return dl.load_pair()


def test_it_is_a_real_hybrid_in_the_published_format(pair):
    assert type(pair.target).__name__ == "Qwen3_5ForCausalLM"
    kinds = [layer.kind for layer in dl.describe_cache(pair.target).layers]
    assert len(kinds) >= 8
    assert kinds == (["linear_attention"] * 3 + ["full_attention"]) * (len(kinds) // 4)
    config = json.loads((assets_folder() / "embedded_pair" / "drafter" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] >= 8
    assert set(config["dflash_config"]) == {"mask_token_id", "target_layer_ids"}


def test_assets_are_small_and_hold_no_pickle():
    files = [path for path in assets_folder().glob("embedded_pair/**/*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 24 * MEGABYTE
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors", ".md", ".txt"}


def test_bundled_prompts_are_many_kinds_in_both_domains():
    prompts = dl.bundled_prompts()
    assert prompts[0].id == "default"
    assert len({prompt.id for prompt in prompts}) == len(prompts) >= 12
    assert len({prompt.kind for prompt in prompts if prompt.domain == "chat"}) >= 6
    assert {prompt.domain for prompt in prompts} == {"chat", "docs", "code"}


def test_the_default_prompt_is_answered_right(pair):
    prompt = dl.bundled_prompts()[0]
    generation = dl.generate(pair, prompt, max_new_tokens=160)
    assert generation.finish_reason == "eos"
    assert generation.text.split() == prompt.answer.split()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_method_gives_plain_decodings_text(pair, temperature):
    hard = [prompt for prompt in dl.bundled_prompts() if prompt.is_raw][:2]
    for prompt in [*dl.bundled_prompts("chat")[:3], *hard]:
        settings = dict(max_new_tokens=50, temperature=temperature, seed=2)
        plain = dl.generate(pair, prompt, "autoregressive", **settings)
        for method in (dict(method="dflash"), dict(tree_budget=32), dict(tree_budget=64)):
            assert dl.generate(pair, prompt, **method, **settings).token_ids == plain.token_ids, prompt.id


def test_trees_accept_more_drafts_than_the_chain(pair):
    emitted = {}
    for name, method in {"chain": dict(method="dflash"), "tree": dict(tree_budget=32)}.items():
        prompts = [
            *dl.bundled_prompts("chat")[:8],
            *dl.bundled_prompts("docs")[:2],
            *dl.bundled_prompts("code")[:2],
        ]
        runs = [dl.generate(pair, prompt, max_new_tokens=50, **method) for prompt in prompts]
        emitted[name] = sum(run.num_emitted_tokens - 1 for run in runs) / sum(run.num_rounds for run in runs)
    assert emitted["tree"] > emitted["chain"] * 1.05


def test_the_naive_port_is_slower_and_wrong(pair):
    """The seed's story: same drafter, same target, contaminated recurrent states."""
    prompts = dl.bundled_prompts("chat")[:4]
    wrong, emitted = 0, {"exact": [], "flattened": []}
    for prompt in prompts:
        exact = dl.generate(pair, prompt, tree_budget=32, max_new_tokens=60)
        naive = dl.generate(pair, prompt, tree_budget=32, max_new_tokens=60, verify_method="flattened")
        wrong += naive.token_ids != exact.token_ids
        emitted["exact"].append(exact.mean_emitted_tokens)
        emitted["flattened"].append(naive.mean_emitted_tokens)
    assert wrong >= 2
    assert sum(emitted["flattened"]) < 0.7 * sum(emitted["exact"])


def test_ids_and_text_are_the_same_prompt(pair):
    prompt = dl.bundled_prompts()[0]
    ids = pair.encode(prompt)
    assert torch.equal(pair.encode(prompt.text), ids)
    assert torch.equal(pair.encode(ids[0].tolist()), ids)
    assert not torch.equal(pair.encode(prompt.text, raw=True), ids)
    assert pair.tokenizer.decode(ids[0]).count("<|im_start|>") == 2
    assert pair.tokenizer.decode(pair.encode("Hi", system="Be kind.")[0]).count("<|im_start|>") == 3


def test_the_hook_equals_plain_generate(pair):
    inputs = {"input_ids": pair.encode(dl.bundled_prompts()[1])}
    plain = pair.target.generate(**inputs, max_new_tokens=50, do_sample=False)
    tree = pair.target.generate(
        **inputs, max_new_tokens=50, do_sample=False, custom_generate=dl.DDTree(pair.drafter, tree_budget=64)
    )
    assert torch.equal(plain, tree)


def test_loading_from_folders(pair, tmp_path):
    folder = assets_folder() / "embedded_pair"
    loaded = dl.load_pair(folder / "target", str(folder / "drafter"))
    assert torch.equal(loaded.embeddings.input.weight.float(), pair.embeddings.input.weight)
    with pytest.raises(ValueError, match="target"):
        dl.load_pair(drafter=folder / "drafter")
    with pytest.raises(ValueError, match="quantization"):
        dl.load_pair(folder / "target", folder / "drafter", quantization="3bit")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("vocab_size", 999, "vocabulary"),
        ("num_target_layers", 80, "layers of the target"),
        ("target_hidden_size", 32, "hidden size of a tap"),
    ],
)
def test_a_drafter_of_another_target_is_refused(pair, key, value, named):
    values = {**pair.drafter.config.to_dict(), key: value}
    other = DFlashDrafter(dl.DFlashConfig.from_dict(values))
    with pytest.raises(ValueError, match=named):
        dl.Pair(pair.target, other)


def test_missing_assets_are_explained(monkeypatch, tmp_path):
    monkeypatch.setattr("ddtree_lab.pair.__file__", str(tmp_path / "ddtree_lab" / "pair.py"))
    with pytest.raises(FileNotFoundError, match="embedded pair is missing"):
        dl.load_pair()
    shutil.rmtree(tmp_path)
