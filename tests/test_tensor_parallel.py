"""Layers split over two processes (`torchrun`, gloo, the library's own plan): the tokens of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import _finish, random_ids, small_drafter_config
from transformers import AutoConfig, AutoModelForCausalLM

import ddtree_lab as dl
from ddtree_lab.drafter import DFlashDrafter

SIZES = dict(
    vocab_size=98, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, eos_token_id=None,
)  # fmt: skip
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
FAMILIES = {"qwen3_5_text": LINEAR, "qwen3_5_moe_text": {**LINEAR, **MOE}, "qwen3": {}}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of two processes saw of each family; tokens and number of weights of one that holds all."""
    root, out = tmp_path_factory.mktemp("pairs"), tmp_path_factory.mktemp("seen")
    alone = {}
    for family, more in FAMILIES.items():
        torch.manual_seed(0)
        target = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **more))
        _finish(target, torch.float32).save_pretrained(root / family / "target")
        drafter = DFlashDrafter(small_drafter_config(vocab_size=98, mask_token_id=97))
        drafter.save_pretrained(root / family / "drafter")
        plain = dl.generate(dl.Pair(target, drafter), random_ids(9), "autoregressive", max_new_tokens=12)
        alone[family] = plain.token_ids, target.num_parameters()
    worker = Path(__file__).with_name("two_processes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(worker), str(root), str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)], alone


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_give_the_tokens_of_one_with_every_method(seen, family):
    processes, alone = seen
    for process in processes:
        found = process[family]
        for method, tokens in found["tokens"].items():
            assert tuple(tokens) == alone[family][0], method
        assert (found["auto"], found["rows"]) == ("tree", 98)
        assert found["trees"] == processes[0][family]["trees"]  # chosen by costs, which each has measured
        assert found["difference"] < 1e-3
        assert not found["tied"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_are_really_split(seen, family):
    processes, alone = seen
    held = [process[family]["numbers"] for process in processes]
    assert max(held) < 0.75 * alone[family][1] < sum(held)  # 5.8 leaves recurrent layers whole
