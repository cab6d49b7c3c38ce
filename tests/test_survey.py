"""The survey: any architecture shrunk, examined in a process of its own, and written down."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
import transformers

from ddtree_lab.cli import main
from ddtree_lab.stages.cache import layer_kinds
from ddtree_lab.stages.verify import verify_tree
from ddtree_lab.survey import run
from ddtree_lab.survey.architectures import (
    causal_architectures,
    examine_architecture,
    multimodal_architectures,
)
from ddtree_lab.survey.examine import examine_target
from ddtree_lab.survey.isolation import call_isolated
from ddtree_lab.survey.page import INTRODUCTION, QUESTIONS, to_markdown
from ddtree_lab.survey.results import COLUMNS, OUTCOMES, Row, Survey, judge
from ddtree_lab.survey.shrink import build_tiny, shrink_config
from ddtree_lab.survey.subject import LONG, Subject

DOCUMENT = Path(__file__).parent.parent / "docs" / "survey.md"
LIMITS = dict(seconds=60.0, memory_bytes=2**31)


def tiny(class_name):
    model_class = getattr(transformers, class_name)
    return build_tiny(model_class, shrink_config(model_class.config_class))


# The shrinker


@pytest.mark.parametrize(
    "class_name",
    [
        "LlamaForCausalLM",
        "GPT2LMHeadModel",
        "Gemma3ForCausalLM",
        "MixtralForCausalLM",
        "DeepseekV3ForCausalLM",
        "Phi3ForCausalLM",
        "Qwen3_5ForCausalLM",
        "JambaForCausalLM",
        "OPTForCausalLM",
    ],
)
def test_the_shrinker_makes_a_small_model_with_every_kind_of_layer(class_name):
    model_class = getattr(transformers, class_name)
    config = shrink_config(model_class.config_class)
    target = build_tiny(model_class, config)
    assert target.num_parameters() < 2_000_000
    logits = target(torch.arange(10, 30)[None]).logits[0]
    assert logits.isfinite().all()
    assert logits.std(0).mean() > 0.1  # tokens make a difference
    published = getattr(model_class.config_class(), "layer_types", None) or []
    assert set(layer_kinds(target)) >= set(published)
    assert len(layer_kinds(target)) >= 2


def test_a_whole_pattern_of_layers_is_kept():
    config = shrink_config(transformers.Gemma3TextConfig)
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    config = shrink_config(transformers.Qwen3_5TextConfig)
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]


def test_a_model_that_is_not_small_is_refused_with_its_largest_tensor():
    config = shrink_config(transformers.LlamaConfig)
    config.vocab_size = 10**6
    with pytest.raises(
        ValueError, match=r"in model\.embed_tokens\.weight: a size of its config is not known"
    ):
        build_tiny(transformers.LlamaForCausalLM, config)


def test_a_class_is_surveyed_once_under_the_name_it_is_called_after():
    causal = causal_architectures()
    assert len(set(causal.values())) == len(causal) > 100
    assert causal["llama"] == "LlamaForCausalLM"
    assert causal["gpt2"] == "GPT2LMHeadModel"
    assert causal["qwen3_5"] == "Qwen3_5ForCausalLM"
    assert not set(multimodal_architectures().values()) & set(causal.values())


# The answers


def test_a_hybrid_is_exact_by_a_tree_pass_and_cannot_be_cropped():
    found = examine_architecture("Qwen3_5ForCausalLM")
    verdicts = {question: answer["verdict"] for question, answer in found["answers"].items()}
    assert verdicts.pop("crop") in ("no", "raises")
    assert set(verdicts.values()) == {"yes"}
    assert judge(found["answers"]) == ("tree", "")
    assert [cache["rollback"] for cache in found["caches"]] == ["snapshot", "crop"]
    assert "model.embed_tokens → lm_head" in found["embeddings"]
    assert found["signal"] > 10 * found["tolerance"]


def test_positions_from_the_slot_are_verified_by_paths_and_the_reason_is_told():
    outcome, reason = judge(examine_architecture("BloomForCausalLM")["answers"])
    assert outcome == "paths"
    assert "a trial tree pass" in reason


def test_a_wrong_verify_pass_is_seen(monkeypatch):
    from ddtree_lab.survey import examine

    def naive(target, cache, tree, method="auto", **kwargs):
        return verify_tree(target, cache, tree, "flattened" if method == "auto" else method, **kwargs)

    monkeypatch.setattr(examine, "verify_tree", naive)
    outcome, reason = judge(examine_target(tiny("Qwen3_5ForCausalLM"))["answers"])
    assert outcome == "wrong"
    assert reason.startswith("verify: the logits are off by")


def test_a_model_that_looks_ahead_is_not_judged():
    target = tiny("BertLMHeadModel")
    plain = target.forward

    def looks_ahead(input_ids, **kwargs):
        out = plain(input_ids=input_ids, **kwargs)
        out.logits = out.logits + out.logits.mean(1, keepdim=True)
        return out

    target.forward = looks_ahead
    outcome, reason = judge(examine_target(target)["answers"])
    assert outcome == "unjudged"
    assert "depend on the tokens after it" in reason


# What the survey found, and what the stages do about it


def test_positions_that_begin_after_the_padding_id_are_the_models_own():
    assert judge(examine_architecture("RobertaForCausalLM")["answers"]) == ("tree", "")


@pytest.mark.parametrize(
    ("class_name", "reason"),
    [
        ("RecurrentGemmaForCausalLM", "a trial continuation from a cache"),  # keeps states on its modules
        ("MoshiForCausalLM", "its attention has no such window"),  # and its cache has one
        ("OpenAIGPTLMHeadModel", "left the cache empty"),
    ],
)
def test_what_cannot_go_on_from_a_cache_is_refused(class_name, reason):
    target = tiny(class_name)
    subject = Subject(target)
    with pytest.raises(ValueError, match=reason):
        verify_tree(target, subject.filled(LONG), subject.tree(LONG))


# Isolation


def misbehave(how, tell):
    """A tiny Llama whose forward fails in some way, examined."""
    target = tiny("LlamaForCausalLM")
    tell("forward")

    def forward(*args, **kwargs):
        if how == "raise":
            raise KeyError("weights")
        if how == "hang":
            time.sleep(600)
        if how == "die":
            os.abort()
        return bytearray(2**40)

    target.model.forward = forward
    found = examine_target(target)
    return found["answers"]["causal"]


def test_a_model_that_raises_has_an_answer():
    ended = call_isolated(misbehave, "raise", **LIMITS)
    assert ended.value["verdict"] == "raises"
    assert "KeyError" in ended.value["detail"]
    assert ended.peak_bytes > 2**20


def test_a_model_that_hangs_is_killed():
    started = time.monotonic()
    ended = call_isolated(misbehave, "hang", seconds=10.0, memory_bytes=2**31)
    assert ended.failure == "no answer within 10 s at forward"
    assert time.monotonic() - started < 30


def test_a_model_that_dies_takes_nobody_along():
    ended = call_isolated(misbehave, "die", **LIMITS)
    assert ended.failure == "its process was killed by SIGABRT at forward"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no limit of memory here")
def test_a_model_that_wants_all_memory_does_not_get_it():
    ended = call_isolated(misbehave, "eat", **LIMITS)
    assert ended.value["verdict"] == "raises"
    assert "MemoryError" in ended.value["detail"]


# A whole survey


def stand_in(class_name, tell):
    """Instead of an examination: answers at once, or what the name says."""
    if class_name == "Broken":
        raise RuntimeError("no such layer")
    if class_name == "Dying":
        os._exit(3)
    yes = {"verdict": "yes", "detail": "", "error": 1e-7}
    names = (
        "causal",
        "sensitive",
        "one_token",
        "crop",
        "snapshot",
        "mask",
        "tree_pass",
        "verify",
        "paths",
        "commit",
    )
    return {
        "answers": dict.fromkeys(names, yes),
        "caches": [{"kind": "full_attention", "class": "DynamicLayer", "rollback": "crop", "layers": 2}],
        "embeddings": "", "num_layers": 2, "num_parameters": 1000, "scale": 1.0,
    }  # fmt: skip


def test_one_broken_architecture_stops_nothing():
    seen = []
    found = run.survey(
        {"a": "Broken", "b": "Dying", "c": "Fine"},
        examine=stand_in,
        on_progress=lambda name, step, done, total: seen.append((name, done, total)),
    )
    assert [row.outcome for row in found.rows] == ["unjudged", "no answer", "tree"]
    assert found.rows[0].reason == "no such layer"
    assert found.rows[1].reason == "its process ended with status 3 at starting"
    assert ("b", 1, 3) in seen
    assert found.ok


def test_a_survey_goes_on_where_it_stopped(tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("examined again")

    file = tmp_path / "out" / run.RESULTS
    first = run.survey({"a": "Fine", "b": "Dying"}, out=file.parent, examine=stand_in)
    kept = file.read_text()
    assert len(kept.splitlines()) == 2
    with monkeypatch.context() as patch:
        patch.setattr(run, "call_isolated", never)
        assert run.survey({"a": "Fine", "b": "Dying"}, out=file.parent).rows == first.rows
    file.write_text(kept[:-20])  # an interrupt in the middle of a line
    again = run.survey({"a": "Fine", "b": "Dying", "c": "Fine"}, out=file.parent, examine=stand_in)
    assert [row.outcome for row in again.rows] == ["tree", "no answer", "tree"]
    assert len(file.read_text().splitlines()) == 4  # the torn line, and two new ones
    monkeypatch.setattr(run, "code_version", lambda: "other code")
    run.survey({"a": "Fine"}, out=file.parent, examine=stand_in)
    assert len(file.read_text().splitlines()) == 5


def test_the_table_fits_in_eighty_columns():
    cache = {"kind": "heavily_compressed_attention", "class": "L", "rollback": "crop", "layers": 12}
    common = dict(transformers="5", code="0", seconds=1.0, caches=[cache, cache])
    rows = [
        Row("a_name_that_goes_on_and_on", "A", outcome, "layer 3 (full) is odd", **common)
        for outcome in OUTCOMES
    ]
    text = Survey(tuple(rows)).to_text(width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    for word in (*COLUMNS, *OUTCOMES, "a_name_that_goes_on_", "is odd"):
        assert word in text


def test_the_command_writes_json_and_a_page(tmp_path, capsys):
    page = tmp_path / "survey.md"
    names = "llama,BloomForCausalLM"
    assert main(["survey", "--only", names, "--json", "--markdown", str(page), "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["outcome"] for row in found["architectures"]] == ["tree", "paths"]
    assert found["outcomes"]["wrong"] == 0
    assert "| `llama` |" in page.read_text(encoding="utf-8")
    assert main(["survey", "--only", names, "--out", str(tmp_path)]) == 0
    assert "2 architectures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--only", "lama"], "Did you mean llama"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--memory", "much"], "--memory is 'much'"),
        (["--only", "llama", "--markdown", "no/such/folder.md"], "there is no folder"),
    ],
)
def test_usage_errors_are_one_line(arguments, reason, capsys):
    assert main(["survey", *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_the_document_is_one_that_the_command_writes():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text.startswith(INTRODUCTION)
    assert QUESTIONS in text
    empty = to_markdown(Survey(()))
    assert re.findall(r"^\* (.+?):", text.split("without a word")[1], re.MULTILINE) == re.findall(
        r"^\* (.+?):", empty.split("without a word")[1], re.MULTILINE
    )
    counts = {
        name: int(count) for name, count in re.findall(r"^\| ([a-z ]+) \| (\d+) \|", text, re.MULTILINE)
    }
    assert list(counts) == list(OUTCOMES)
    assert sum(counts.values()) == int(re.search(r"## Summary: (\d+) architectures", text)[1])
    assert counts["wrong"] == 0
    tables = re.findall(r"^\| `[^|]+\|(?:[^|]*\|){4} (\w+) \|", text, re.MULTILINE)
    assert (tables.count("tree"), tables.count("paths")) == (counts["tree"], counts["paths"])
