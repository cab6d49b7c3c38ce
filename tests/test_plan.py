"""`plan`: what a pass is said to need is what it takes, and what is said to fit does."""

from __future__ import annotations

import json
from functools import lru_cache

import models
import pytest
import torch
from checks import filled_cache

import ddtree_lab as dl
from ddtree_lab.cli import main
from ddtree_lab.compat import layer_tensors
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.verify import verify_tree
from ddtree_lab.weightless.footprint import (
    PATHS_PER_PASS,
    cache_footprint,
    parameter_bytes,
    round_needs,
    verify_formulas,
)
from ddtree_lab.weightless.models import build_weightless_drafter
from ddtree_lab.weightless.plan import device_of, parse_size, plan_memory
from ddtree_lab.weightless.rehearsal import LiveBytes, rehearse, without_weights

GIBI = 2**30
CONTEXT, BUDGET = 40, 12


@pytest.fixture(scope="module", autouse=True)
def remembered_needs():
    """A preset is rehearsed once in this file, not once a test."""
    rehearsed = lru_cache(_needs_of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "ddtree_lab.weightless.plan.round_needs",
            lambda target, drafter, **settings: rehearsed(_Key(target, drafter), **settings),
        )
        yield


class _Key:
    """A pair that equals another of the same configs."""

    def __init__(self, target, drafter):
        self.pair = (target, drafter)
        self.text = f"{target.config.to_json_string()}{target.dtype}{drafter and drafter.config}"

    def __eq__(self, other):
        return self.text == other.text

    def __hash__(self):
        return hash(self.text)


def _needs_of(key, **settings):
    return round_needs(*key.pair, **settings)


# ---- what a pass needs ----------------------------------------------------------------------------

TARGETS = {
    "hybrid": models.hybrid,
    "grouped heads": lambda: models.hybrid(key_heads=1, value_heads=4),
    "next": lambda: models.hybrid(family="qwen3_next"),
    "dense": models.dense,
}


@pytest.mark.parametrize("name", TARGETS)
def test_each_formula_is_what_a_real_pass_holds(name):
    target = TARGETS[name]()
    taps = (0, 2)
    cache = filled_cache(target, models.random_ids(CONTEXT))
    tree = models.random_tree("bushy", BUDGET + 1)
    found = verify_tree(target, cache, tree, "tree", tap_layer_ids=taps)
    target.to("meta")
    told = verify_formulas(
        target, cache_footprint(target), tree_budget=BUDGET, context=CONTEXT, num_taps=len(taps)
    )
    assert told.num_nodes == tree.num_nodes
    assert told.logits == found.logits.nbytes
    assert told.taps == found.taps.nbytes
    assert told.mask == dl.build_mask(tree, CONTEXT).additive.nbytes
    rows = sum(keys.nbytes + values.nbytes for keys, values in found.rows.values())
    committed = sum(
        layer.num_bytes for layer in dl.describe_cache(cache).layers if layer.kind == "full_attention"
    )
    assert told.cache_copy == committed + 2 * rows
    assert told.factors == sum(
        tensor.untyped_storage().nbytes()
        for factors in found.factors.values()
        for tensor in (
            factors.delta.keys,
            factors.delta.updates,
            factors.delta.log_decays,
            factors.conv_inputs,
        )
    )


@pytest.mark.parametrize("name", TARGETS)
def test_a_rehearsal_counts_what_a_real_pass_takes(name):
    target = TARGETS[name]()
    cache = filled_cache(target, models.random_ids(CONTEXT))
    tree = models.random_tree("bushy", BUDGET + 1)
    verify_tree(target, cache, tree)  # the trial pass is behind us
    committed = [tensor for layer in cache.layers for tensor in layer_tensors(layer).values()]
    with torch.no_grad(), LiveBytes((*target.parameters(), *target.buffers(), *committed)) as real:
        verify_tree(target, cache, tree)
    needs = round_needs(target.to("meta"), None, tree_budget=BUDGET, context=CONTEXT).verify
    assert needs.method == "tree"
    assert needs.total == pytest.approx(real.peak, rel=0.1)


def test_paths_need_a_cache_for_each_row_of_a_pass():
    target = models.causal_lm("lfm2").to("meta")
    layers = cache_footprint(target)
    needs = round_needs(target, None, tree_budget=40, context=CONTEXT).verify
    assert needs.method == "paths"
    assert needs.cache_copy == PATHS_PER_PASS * sum(layer.bytes_at(CONTEXT) for layer in layers)
    assert needs.mask == needs.factors == 0


def test_needs_grow_with_the_nodes_and_not_with_nodes_times_state():
    target = models.hybrid().to("meta")
    layers = cache_footprint(target)
    small, large = (
        verify_formulas(target, layers, tree_budget=budget, context=CONTEXT) for budget in (15, 63)
    )
    assert large.factors == 4 * small.factors
    assert large.factors < large.snapshots / 2
    states = sum(layer.recurrent_bytes + layer.conv_bytes for layer in layers)
    assert large.snapshots == 64 * states


def test_live_bytes_counts_storages_and_not_views():
    before = torch.zeros(1000)
    with LiveBytes((before,)) as counted:
        view = before[:10]
        kept = torch.zeros(250)
        torch.zeros(500)
        again = kept.view(25, 10)
    assert (counted.live, counted.peak) == (1000, 3000)
    assert view.numel() == 10 and again.numel() == 250


def test_a_pass_that_looks_at_values_is_refused_in_words():
    with pytest.raises(ValueError, match="without weights"), without_weights():
        bool(torch.zeros(1, device="meta"))
    with pytest.raises(ValueError, match="without weights"):
        rehearse(lambda: torch.zeros(2, device="meta").tolist())


# ---- what fits ------------------------------------------------------------------------------------


def fitting(plan) -> dict[str, bool]:
    return {placement.name: placement.fits for placement in plan.placements}


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (["48GB", "48GB"], {"none": True, "8bit": True, "4bit": True}),
        (["80GB"], {"none": True, "8bit": True, "4bit": True}),
        (["24GB", "24GB"], {"none": False, "8bit": True, "4bit": True}),
        (["24GB"], {"none": False, "8bit": False, "4bit": True}),
        (["8GB"], {"none": False, "8bit": False, "4bit": False}),
        (["8GB", "8GB"], {"none": False, "8bit": False, "4bit": False}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_where_the_27b_fits(memory, expected):
    plan = plan_memory("qwen3.6-27b", memory)
    assert fitting(plan) == expected
    assert plan.fits is any(expected.values())
    best = next((name for name, fits in expected.items() if fits), None)
    assert (plan.best and plan.best.name) == best


def test_everything_is_counted_once():
    plan = plan_memory("qwen3.6-27b", ["48GB", "48GB"])
    placement = plan.best
    first, second = placement.devices
    assert [*first.layers, *second.layers] == list(range(64))
    assert first.weights + second.weights == placement.weights == 2 * 26_895_998_464
    states = sum(layer.recurrent_bytes for layer in plan.needs.cache_layers)
    caches = states + 48 * 10240 * 4 * 2 + 4096 * 65536
    assert first.caches + second.caches == caches
    assert first.drafter and not second.drafter  # beside the embedding
    drafter = build_weightless_drafter(dl.find_preset("qwen3.6-27b").drafter_config())
    assert first.drafter == sum(p.nbytes for p in drafter.parameters()) + 4096 * 5 * 2 * 8 * 128 * 2
    assert placement.needed == first.total + second.total
    assert all(device.free >= 0 for device in placement.devices)
    assert plan.needs.verify.snapshots >= 65 * states > 20 * plan.needs.verify.factors


def test_unequal_devices_are_filled_one_after_the_other_where_a_balance_does_not_fit():
    plan = plan_memory("qwen3-4b", ["8GB", "3GB"], "ngram", context=16)
    assert plan.placements[0].fits and plan.placements[0].strategy == "sequential"
    first, second = plan.placements[0].devices
    assert 0 < len(second.layers) < len(first.layers)
    assert 'device_map="sequential"' in str(plan)
    assert plan_memory("qwen3-4b", ["9GB", "9GB"], "ngram", context=16).placements[0].strategy == "auto"


def test_an_ngram_drafter_takes_no_memory():
    plan = plan_memory("qwen3-4b", ["8GB"], "ngram", context=16)
    assert plan.placements[0].devices[0].drafter == plan.needs.draft == plan.needs.verify.taps == 0
    assert 'dl.load_pair("Qwen/Qwen3-4B", "ngram"' in str(plan)


def test_in_4_bit_a_weight_is_dequantised_while_it_is_used():
    plan = plan_memory("qwen3.6-27b", ["24GB"])
    eight, four = plan.placements[1].devices[0], plan.placements[2].devices[0]
    assert four.working - eight.working == 5120 * 17408 * 2


def test_experts_kept_as_one_tensor_are_not_quantised():
    plan = plan_memory("qwen3.6-35b-a3b", ["24GB"], context=64)
    assert not plan.fits
    four = plan.placements[2]
    assert four.converted < 0.1
    assert four.weights > 0.9 * plan.placements[0].weights
    assert "kept as one tensor" in str(plan)


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return dl.synthesise("qwen3.6-27b", folder).target.parent


def test_a_folder_is_planned_and_the_split_follows_the_memory(pair_folder):
    target, drafter = str(pair_folder / "target"), str(pair_folder / "drafter")
    whole = plan_memory(target, ["1GB"], drafter, context=8, tree_budget=4, reserve=0).placements[0]
    total = whole.needed
    plan = plan_memory(
        target, [int(0.75 * total), int(0.9 * total)], drafter, context=8, tree_budget=4, reserve=0
    )
    first, second = plan.placements[0].devices
    assert plan.placements[0].fits
    assert 0 < len(first.layers) < 8 and len(first.layers) + len(second.layers) == 8
    sizes = parameter_bytes(dl.load_pair(target, drafter, dtype=torch.bfloat16).target)
    placed = [device_of(name, plan.placements[0].device_map) for name in sizes]
    assert set(placed) == {0, 1}
    assert first.weights == sum(size for size, home in zip(sizes.values(), placed, strict=True) if home == 0)


def test_less_memory_than_needed_does_not_fit_and_just_enough_does(pair_folder):
    target, drafter = str(pair_folder / "target"), str(pair_folder / "drafter")
    settings = dict(context=8, tree_budget=4, reserve="0")
    needed = plan_memory(target, ["1GB"], drafter, **settings).placements[0].needed
    assert plan_memory(target, [needed], drafter, **settings).placements[0].fits
    assert not plan_memory(target, [needed - 1], drafter, **settings).placements[0].fits


def test_the_exit_status_says_whether_anything_fits(capsys, pair_folder):
    target, drafter = str(pair_folder / "target"), str(pair_folder / "drafter")
    arguments = ["plan", target, "--drafter", drafter, "--context", "8", "--tree-budget", "4"]
    assert main([*arguments, "--memory", "2GB,2GB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] and report["quantization"] == "none"
    assert [d["device"] for d in report["placements"][0]["devices"]] == [0, 1]
    assert report["needs"]["verify"]["total"] > 0
    assert main([*arguments, "--memory", "1MB"]) == 1
    assert "Nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_the_page(width):
    plan = plan_memory("qwen3.6-27b", ["48GB", "48GB"])
    lines = plan.to_text(width=width).splitlines()
    assert max(map(len, lines)) <= width
    header = next(line for line in lines if line.startswith("device"))
    assert all(name in header for name in ("layers", "weights", "drafter", "working", "free"))
    assert "max_memory" in plan.to_text(width=width)
    assert plan.to_text(width=width, ascii=True).isascii()
    assert "…" not in plan.to_text(width=width)


def test_sizes_are_read_as_cards_are_labelled():
    assert parse_size("48GB") == parse_size(" 48gib ") == 48 * GIBI
    assert parse_size("512MB") == parse_size(str(512 * 2**20)) == parse_size(512 * 2**20)
    assert parse_size("22.5GiB") == int(22.5 * GIBI)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory", "48GB"], "MODEL"),
        (["qwen3-4b", "--memory", "much"], "'much' is no size"),
        (["qwen3-4b", "--memory", "48GB,"], "no size"),
        (["qwen3-4b", "--memory", "8GB", "--tree-budget", "0"], "tree_budget"),
        (["qwen3-4b", "--memory", "8GB", "--reserve", "x"], "'x' is no size"),
        (["qwen3-4b", "--memory", "8GB", "--drafter", "missing/"], "drafter"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line_and_exit_2(capsys, arguments, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="has devices to plan for")
def test_without_devices_the_memory_has_to_be_said(capsys):
    assert main(["plan", "qwen3-4b"]) == 2
    assert "--memory" in capsys.readouterr().err


def test_the_rehearsed_tree_has_the_budget(monkeypatch):
    seen = []
    real = DraftTree.from_parents
    monkeypatch.setattr(
        "ddtree_lab.weightless.footprint.DraftTree.from_parents",
        lambda tokens, parents: seen.append(len(parents)) or real(tokens, parents),
    )
    round_needs(models.hybrid().to("meta"), None, tree_budget=BUDGET, context=4)
    assert seen == [BUDGET + 1]
