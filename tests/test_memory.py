"""What a pass allocates, counted and not timed: it grows with the nodes, not with nodes × state."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from checks import filled_cache
from models import causal_lm, dense, hybrid, random_ids, random_tree
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from ddtree_lab.compat import iter_states
from ddtree_lab.stages.cache import fork_cache, make_cache
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.forward import prefill
from ddtree_lab.stages.verify import verify_tree

HEADS = dict(
    linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128, linear_value_head_dim=128
)


def wide_states(num_linear=3, dtype=torch.float32, **changes):
    """Gated DeltaNet layers with the heads of Qwen3.6-27B, and next to nothing around them."""
    config = Qwen3_5TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=num_linear + 1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, layer_types=["linear_attention"] * num_linear + ["full_attention"],
        **{**HEADS, **changes},
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(config).to(dtype).eval().requires_grad_(False)


def peak_bytes(run):
    """The most that a call held at once, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def verification_peak(target, num_nodes, method="tree"):
    cache, tree = filled_cache(target, random_ids(5)), random_tree("bushy", num_nodes)
    verify_tree(target, cache, random_tree("bushy", 4), method)  # the trial pass is behind us
    return peak_bytes(lambda: verify_tree(target, cache, tree, method))


def snapshots(target, num_nodes):
    """Bytes of a float32 recurrent state for every drafted node."""
    cache = filled_cache(target, random_ids(5))
    states = [t for layer in cache.layers for name, _, t in iter_states(layer) if name == "recurrent_states"]
    return (num_nodes - 1) * sum(4 * state.numel() for state in states)


def test_the_peak_of_a_call_is_found():
    megabyte = 250_000
    assert peak_bytes(lambda: torch.ones(megabyte) + torch.ones(megabyte)) == pytest.approx(3e6, rel=1e-3)
    assert peak_bytes(lambda: torch.ones(megabyte).add_(torch.ones(1))) == pytest.approx(1e6, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_64_nodes_take_less_than_a_twentieth_of_a_state_for_each(dtype):
    target = wide_states(dtype=dtype)
    assert verification_peak(target, 65) < 0.05 * snapshots(target, 65)


def test_the_scan_is_what_a_state_for_each_node_costs():
    target = wide_states(num_linear=1)
    assert snapshots(target, 65) < verification_peak(target, 65, "scan") < 1.3 * snapshots(target, 65)


def test_the_peak_grows_with_the_nodes_and_not_with_the_state():
    target = wide_states()
    by_nodes = [verification_peak(target, num_nodes) for num_nodes in (17, 33, 65)]
    assert by_nodes[1] < 2.2 * by_nodes[0] and by_nodes[2] < 2.2 * by_nodes[1]
    small = wide_states(linear_key_head_dim=16, linear_value_head_dim=16)
    assert snapshots(target, 65) == 64 * snapshots(small, 65)
    assert verification_peak(target, 65) < 8 * verification_peak(small, 65)


def test_what_is_kept_for_the_commit_is_the_factors_of_the_states():
    target, num_nodes = wide_states(), 65
    verification = verify_tree(target, filled_cache(target, random_ids(5)), random_tree("bushy", num_nodes))
    conv_width = (16 + 16 + 48) * 128
    for factors in verification.factors.values():
        delta = factors.delta
        made = (delta.keys, delta.updates, delta.log_decays, factors.conv_inputs)
        numbers = (
            16 * 128 + 48 * (128 + 1) + conv_width
        )  # keys; updates and log decays; inputs of the convolution
        assert sum(tensor.untyped_storage().nbytes() for tensor in made) == 4 * num_nodes * numbers
    assert len(verification.factors) == 3


@pytest.mark.parametrize("method", ["tree", "paths"])
@pytest.mark.parametrize("taps", [(), (1,), (0, 2)], ids=str)
def test_of_the_hidden_states_only_tapped_ones_outlive_their_layer(taps, method, monkeypatch):
    target, alive = hybrid(), []
    outputs = {}
    handles = [
        layer.register_forward_hook(lambda module, args, out, i=i: outputs.update({i: weakref.ref(out)}))
        for i, layer in enumerate(target.model.layers)
    ]

    def look(module, args):
        alive.append({i for i, output in outputs.items() if output() is not None})

    handles.append(target.lm_head.register_forward_pre_hook(look))
    cache = make_cache(target)
    prefilled = prefill(target, random_ids(9), cache, taps)
    verification = verify_tree(target, cache, random_tree("bushy", 8), method, tap_layer_ids=taps)
    for handle in handles:
        handle.remove()
    assert all(layers - {3} == set(taps) for layers in (alive[0], alive[-1]))
    assert not any(
        output() is not None for output in outputs.values()
    )  # what is handed out is the taps, joined
    if taps:
        assert prefilled.taps.shape == (1, 9, 32 * len(taps))
        assert verification.taps.untyped_storage().nbytes() == 4 * 8 * 32 * len(taps)


@pytest.mark.parametrize(
    "make", [hybrid, dense, lambda: causal_lm("jamba")], ids=["hybrid", "dense", "no port"]
)
def test_the_head_reads_only_rows_that_are_asked_for(make):
    target, rows = make(), []
    cache, tree = make_cache(target), random_tree("bushy", 8)
    verify_tree(target, filled_cache(target, random_ids(3)), tree)  # the trial pass is behind us
    handle = target.lm_head.register_forward_pre_hook(
        lambda module, args: rows.append(math.prod(args[0].shape[:-1]))
    )
    is_ported = verify_tree(target, filled_cache(target, random_ids(3)), tree).method == "tree"
    rows.clear()
    prefill(target, random_ids(9), cache, (0, 2))
    assert rows == [1]
    rows.clear()
    prefill(target, random_ids(9), cache)  # the rest of a prompt
    assert rows == [1] if is_ported else sum(rows) == 9  # one token a forward where layers have no port
    rows.clear()
    verification = verify_tree(target, cache, tree, "paths")
    rows.clear()
    commit_path(target, cache, verification, tree.path(7))
    assert rows == [1] if is_ported else sum(rows) == len(tree.path(7))
    if is_ported:
        rows.clear()
        commit_path(target, cache, verify_tree(target, cache, tree, "tree"), tree.path(7))
        assert rows == [8]
    handle.remove()


@pytest.mark.parametrize("method", ["tree", "scan"])
def test_the_grown_copy_of_the_cache_is_gone_when_the_pass_is(method, monkeypatch):
    """By counting references alone: at a long context the copy is too large to wait for the garbage collector."""
    target, copies = hybrid(), []

    def fork(*args, **kwargs):
        copies.append(fork_cache(*args, **kwargs))
        return copies[-1]

    cache, tree = filled_cache(target, random_ids(5)), random_tree("bushy", 8)
    verify_tree(target, cache, tree, method)  # the trial pass is behind us
    monkeypatch.setattr("ddtree_lab.stages.verify.fork_cache", fork)
    gc.disable()
    try:
        verification = verify_tree(target, cache, tree, method)
        watched = [weakref.ref(layer) for layer in copies[0].layers]
        copies.clear()
        assert not any(layer() is not None for layer in watched)
    finally:
        gc.enable()
    commit_path(target, cache, verification, tree.path(7))
