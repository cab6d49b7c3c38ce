"""Weights on the CPU or on disk: the same numbers, and everything back where it was."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from checks import filled_cache
from models import dense, hybrid, random_ids, random_tree, wrapped_hybrid
from pairs import random_drafter

from ddtree_lab.compat import layer_tensors
from ddtree_lab.decode import generate
from ddtree_lab.offload import execution_device, onloaded
from ddtree_lab.pair import Pair
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.embedding import resolve_embeddings
from ddtree_lab.stages.verify import verify_tree

TARGETS = {
    "hybrid": hybrid,
    "qwen3_next": lambda: hybrid(family="qwen3_next"),
    "wrapped": wrapped_hybrid,
    "window": lambda: dense(window=5),
}
METHODS = ["tree", "scan", "paths", "flattened"]


def offload(target, how, folder):
    """Put all weights elsewhere, or the head and every other layer on disk as a `device_map` would."""
    if how == "cpu":
        return cpu_offload(target, execution_device="cpu")
    if how == "disk":
        return disk_offload(target, str(folder), execution_device="cpu")
    places = {}
    for name, module in target.named_modules():
        if "_layers" not in name and list(module.parameters(recurse=False)):
            is_far = ".layers.0." in name or ".layers.2." in name or name == "lm_head"
            places[name] = "disk" if is_far else "cpu"
    return dispatch_model(target, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


def offloaded(name, how, folder):
    target = offload(TARGETS[name](), how, folder)
    assert any(parameter.is_meta for parameter in target.parameters())
    return target


def state_of(target):
    """What a pass could leave changed: wrappers, hooks, and where each weight is."""
    return [
        (
            name,
            {key: id(value) for key, value in vars(module).items() if callable(value)},
            {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks")},
            id(getattr(module, "_hf_hook", None)),
            {key: str(tensor.device) for key, tensor in module.named_parameters(recurse=False)},
        )
        for name, module in target.named_modules()
    ]


@pytest.mark.parametrize("how", ["cpu", "disk", "mixed"])
@pytest.mark.parametrize("name", TARGETS)
def test_every_stage_gives_the_numbers_of_the_target_in_memory(name, how, tmp_path):
    ids, tree, plain, target = (
        random_ids(9),
        random_tree("bushy", 12),
        TARGETS[name](),
        offloaded(name, how, tmp_path),
    )
    before = state_of(target)
    for method in METHODS:
        results = []
        for model in (plain, target):
            cache = filled_cache(model, ids)
            verification = verify_tree(model, cache, tree, method, tap_layer_ids=(0, 2))
            commit_path(model, cache, verification, tree.path(11))
            committed = [tensor for layer in cache.layers for tensor in layer_tensors(layer).values()]
            results.append([verification.logits, verification.taps, *committed])
        for expected, found in zip(*results, strict=True):
            assert torch.equal(found, expected), method
    assert verify_tree(target, filled_cache(target, ids), tree).method == "tree"
    assert state_of(target) == before


@pytest.mark.parametrize("how", ["cpu", "disk", "mixed"])
def test_a_decode_gives_the_text_of_the_target_in_memory(how, tmp_path):
    plain = hybrid()
    expected = generate(
        Pair(plain, random_drafter(plain)), random_ids(7), "autoregressive", max_new_tokens=12
    )
    target = offloaded("hybrid", how, tmp_path)
    before, pair = state_of(target), Pair(target, random_drafter(plain))
    for method in ("autoregressive", "dflash", "ddtree"):
        found = generate(pair, random_ids(7), method, tree_budget=12, max_new_tokens=12)
        assert found.token_ids == expected.token_ids
    assert state_of(target) == before


class Fault(BaseException):
    """Nobody catches it, like an interrupt."""


# In the mixer the weights of its own and those of its convolution are there when its norm is called.
PLACES = ["model.layers.1.linear_attn.norm", "model.layers.2.mlp.down_proj", "lm_head"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_leaves_every_weight_and_wrapper_where_it_was(place, method, tmp_path, monkeypatch):
    target, tree = offloaded("hybrid", "disk", tmp_path), random_tree("bushy", 12)
    cache = filled_cache(target, random_ids(9))
    verify_tree(target, cache, tree, "flattened")
    before = state_of(target)

    def fail(*args, **kwargs):
        assert not target.get_submodule(place).weight.is_meta
        raise Fault

    with monkeypatch.context() as patch:
        patch.setattr(target.get_submodule(place), "_old_forward", fail)
        with pytest.raises(Fault):
            verify_tree(target, cache, tree, method, tap_layer_ids=(0,))
    assert state_of(target) == before


def test_a_weight_is_readable_inside_and_away_again_also_after_an_exception(tmp_path):
    conv = offloaded("hybrid", "disk", tmp_path).model.layers[0].linear_attn.conv1d
    expected = hybrid().model.layers[0].linear_attn.conv1d.weight

    def read():
        with onloaded(conv):
            assert torch.equal(conv.weight, expected)
            raise Fault

    with pytest.raises(Fault):
        read()
    assert conv.weight.is_meta
    assert execution_device(conv) == torch.device("cpu")


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_recognised_where_the_weights_are_away(tied, tmp_path):
    target = dense()
    target.config.tie_word_embeddings = tied
    target = type(target)(target.config)
    assert resolve_embeddings(target).tied is tied
    found = resolve_embeddings(offload(target, "disk", tmp_path))
    assert (found.tied, found.device) == (tied, torch.device("cpu"))
