"""How a prompt becomes tokens, and which tokens end a text."""

from __future__ import annotations

import json

import models
import pytest
import torch
from transformers import PreTrainedTokenizerBase

import ddtree_lab as dl
from ddtree_lab.cli import main

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if enable_thinking is not defined %}unsaid{% elif enable_thinking %}think{% else %}answer{% endif %}"
)


@pytest.fixture(scope="module")
def embedded() -> dl.Pair:
    return dl.load_pair()


@pytest.fixture
def pair(embedded, monkeypatch) -> dl.Pair:
    """The embedded pair with a template that shows what it was told."""
    monkeypatch.setattr(embedded.tokenizer, "chat_template", THINKING)
    return embedded


@pytest.fixture
def encoded(pair, monkeypatch, capsys):
    """Arguments of `run` → the prompt's text as the target sees it."""
    monkeypatch.setattr("ddtree_lab.loading.load_pair", lambda *args, **kwargs: pair)

    def encode(*arguments: str) -> str:
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr(
                "ddtree_lab.commands.run.compare", lambda pair, ids, **settings: seen.append(ids) or stop()
            )
            main(["run", *arguments])
        assert seen, capsys.readouterr().err
        return pair.decode(seen[0][0].tolist(), skip_special_tokens=False)

    def stop():
        raise ValueError("seen enough")

    return encode


def test_thinking_is_said_only_where_it_is_given(pair):
    said = {value: pair.encode("Hi", enable_thinking=value)[0].tolist() for value in (None, True, False)}
    ends = {value: pair.decode(ids).rpartition("Hi")[2] for value, ids in said.items()}
    assert ends == {None: "unsaid", True: "think", False: "answer"}


@pytest.mark.parametrize(
    ("options", "end"), [([], "unsaid"), (["--thinking"], "think"), (["--no-thinking"], "answer")]
)
def test_the_command_line_says_it_too(encoded, options, end):
    assert encoded("--prompt", "Hi", "--system", "Be kind.", *options) == (
        f"<|im_start|>system Be kind.<|im_end|><|im_start|>user Hi<|im_end|>{end}"
    )


def test_raw_is_raw_for_every_way_of_giving_the_prompt(encoded, tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_text("Hi")
    chat = dl.bundled_prompts("chat")[1]
    for source, text in (
        (("--prompt", "Hi"), "Hi"),
        (("--prompt-file", str(path)), "Hi"),
        (("--bundled", chat.id), chat.text),
        ((), dl.bundled_prompts()[0].text),
    ):
        assert encoded(*source, "--raw") == text
        assert encoded(*source) == f"<|im_start|>user {text}<|im_end|>unsaid"
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert encoded("--prompt-file", "-", "--raw") == "Hi"
    hard = dl.bundled_prompts("docs")[0]
    assert encoded("--bundled", hard.id) == hard.text


@pytest.mark.parametrize("option", [("--system", "Be kind."), ("--thinking",), ("--no-thinking",)])
def test_what_a_raw_prompt_has_no_place_for_is_refused(pair, monkeypatch, capsys, option):
    monkeypatch.setattr("ddtree_lab.loading.load_pair", lambda *args, **kwargs: pair)
    assert main(["run", "--raw", *option]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "raw text" in err


def test_a_tokenizer_without_a_template_takes_no_system_message(pair, monkeypatch):
    monkeypatch.setattr(pair.tokenizer, "chat_template", None)
    assert torch.equal(pair.encode("Hi"), pair.encode("Hi", raw=True))
    with pytest.raises(ValueError, match="system is for a chat template, but the tokenizer has none"):
        pair.encode("Hi", system="Be kind.")


def test_a_target_without_a_drafter_is_shown_the_way(capsys):
    assert main(["run", "--target", "some/model"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "some/model" in err and "--drafter ngram" in err


def test_the_n_gram_drafter_from_the_command_line(capsys):
    options = [
        "--drafter",
        "ngram",
        "--method",
        "ddtree",
        "--max-new-tokens",
        "6",
        "--tree-budget",
        "8",
        "--json",
    ]
    assert main(["run", *options, "--prompt", "a b a b a b", "--raw"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(r["method"], r["lossless"]) for r in results] == [("autoregressive", True), ("ddtree", True)]


def ends(target: torch.nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> frozenset[int]:
    return dl.Pair(target, dl.NgramDrafter(), tokenizer).eos_token_ids


@pytest.mark.parametrize(("given", "expected"), [(3, {3}), ([3, 4], {3, 4}), ((5,), {5}), ([], set())])
def test_ends_of_sequence_are_the_generation_configs(embedded, given, expected):
    target = models.dense()
    target.config.eos_token_id, target.generation_config.eos_token_id = 7, given
    assert ends(target, embedded.tokenizer) == expected


def test_without_any_there_the_decoders_config_and_then_the_tokenizer_say(embedded):
    target = models.dense()
    target.generation_config.eos_token_id = None
    assert ends(target) == frozenset()
    assert ends(target, embedded.tokenizer) == {embedded.tokenizer.eos_token_id}
    target.config.eos_token_id = [7, 8]
    assert ends(target, embedded.tokenizer) == {7, 8}
    target.generation_config = None
    assert ends(target) == {7, 8}


def test_a_multimodal_wrapper_names_them_one_level_down(embedded):
    target = models.wrapped_hybrid()
    target.generation_config.eos_token_id = None
    target.config.text_config.eos_token_id = 11
    assert getattr(target.config, "eos_token_id", None) is None
    assert ends(target, embedded.tokenizer) == {11}


def test_any_of_several_ends_stops_the_text():
    target = models.dense()
    pair = dl.Pair(target, dl.NgramDrafter())
    target.generation_config.eos_token_id = None
    full = dl.generate(pair, [5, 6, 7], "autoregressive", max_new_tokens=12).token_ids
    last = next(token for token in full[3:] if token not in full[:3])
    target.generation_config.eos_token_id = [models.VOCAB - 1, last]
    for method in (dict(method="autoregressive"), dict(method="dflash"), dict(tree_budget=8)):
        found = dl.generate(pair, [5, 6, 7], max_new_tokens=12, **method)
        assert (found.token_ids[-1], found.finish_reason) == (last, "eos")
        assert found.token_ids == full[: full.index(last) + 1]
