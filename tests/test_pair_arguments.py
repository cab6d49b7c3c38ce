"""Options of the command line that say how a pair is loaded."""

from __future__ import annotations

import inspect
import json

import pytest
from models import VOCAB, hybrid
from test_loading import save
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ddtree_lab.cli import main
from ddtree_lab.loading import load_pair


def test_every_way_of_loading_can_be_asked_for(monkeypatch, capsys):
    asked = {}

    def load(target, drafter, **options):
        asked.update(options)
        raise ValueError("enough")

    monkeypatch.setattr("ddtree_lab.loading.load_pair", load)
    words = (
        "--dtype float32 --max-memory 40GiB,8192,cpu=1.5GB --offload-folder away --quantization 4bit --revision v1 "
        "--drafter-revision v2 --attn-implementation eager --tp-plan auto --device-map auto --local-files-only "
        "--allow pickle --allow remote_code"
    )
    assert main(["run", "--target", "t", "--drafter", "d", *words.split()]) == 2
    assert "enough" in capsys.readouterr().err
    assert asked["max_memory"] == {0: "40GiB", 1: 8192, "cpu": "1.5GB"}
    assert asked["allow"] == ["pickle", "remote_code"] and asked["local_files_only"] is True
    assert set(asked) == set(inspect.signature(load_pair).parameters) - {"target", "drafter"}


def test_what_is_not_asked_for_is_left_to_load_pair(monkeypatch):
    asked = {}

    def load(target, drafter, **options):
        asked.update(options)
        raise ValueError("enough")

    monkeypatch.setattr("ddtree_lab.loading.load_pair", load)
    assert main(["run"]) == 2
    defaults = inspect.signature(load_pair).parameters
    assert {name: value or None for name, value in asked.items()} == {
        name: defaults[name].default or None for name in asked
    }


@pytest.mark.parametrize("sizes", ["much", "cpu", "40GiB,gpu=3GB", ""])
def test_sizes_that_are_none_are_a_usage_error(sizes, capsys):
    assert main(["run", "--max-memory", sizes]) == 2
    assert "is not a size such as 40GiB or cpu=100GiB" in capsys.readouterr().err


def test_a_pair_is_spread_from_the_command_line(tmp_path, capsys):
    target, drafter = save(hybrid(), tmp_path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(target)
    options = "--max-memory cpu=160KB --attn-implementation eager --max-new-tokens 3 --tree-budget 4 --json"
    names = ["--target", str(target), "--drafter", str(drafter), "--prompt", "w7"]
    assert main(["run", *names, *options.split()]) == 0
    assert all(result["lossless"] for result in json.loads(capsys.readouterr().out)["results"])
