"""After a commit the cache is what a prefill of the same tokens makes, tensor by tensor."""

import functools
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from checks import (
    DoubleThroughout,
    alone,
    check_close,
    check_same_cache,
    check_untouched,
    filled_cache,
    path_ids,
    snapshot,
)
from models import causal_lm, dense, has_its_own_cache, hybrid, random_ids, random_tree, wrapped_hybrid

from ddtree_lab.compat import layer_tensors
from ddtree_lab.recurrent import factors as factors_module
from ddtree_lab.stages.cache import cache_length, fork_cache, make_cache
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.forward import continue_target
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.verify import verify_tree

F32, F64 = torch.float32, torch.float64
TARGETS = {
    "qwen3_5": lambda dtype: hybrid(8, 2, 4, 4, dtype),
    "qwen3_5-conv2": lambda dtype: hybrid(4, 1, 4, 2, dtype),
    "qwen3_5-conv5": lambda dtype: hybrid(4, 2, 2, 5, dtype),
    "qwen3_5_moe": lambda dtype: hybrid(4, 2, 4, 4, dtype, family="qwen3_5_moe"),
    "qwen3_next": lambda dtype: hybrid(4, 2, 4, 4, dtype, family="qwen3_next"),
    "wrapped": wrapped_hybrid,
    "dense": dense,
    "window5": lambda dtype: dense(dtype, 5),
    "window2": lambda dtype: dense(dtype, 2),
}
LIBRARY = [
    "mistral",
    "gemma3_text",
    "gpt_oss",
    "gpt2",
    "bloom",
]  # by tree pass, or by paths for their positions
NO_PORT = ["bamba", "falcon_h1", "jamba", "lfm2", "mamba2", "olmo_hybrid"]


@functools.cache
def build(name, dtype=F32):
    return TARGETS[name](dtype) if name in TARGETS else causal_lm(name, dtype)


def text_after(ids, tree, path):
    return torch.cat([ids, path_ids(tree, path)], dim=1)


@pytest.mark.parametrize("prompt", [1, 3, 12])
@pytest.mark.parametrize("name", [*TARGETS, *LIBRARY, *NO_PORT])
def test_cache_after_any_path_is_a_fresh_prefills(name, prompt):
    target, ids, tree = build(name), random_ids(prompt, seed=prompt), random_tree("bushy", 10, seed=prompt)
    if has_its_own_cache(target):
        pytest.skip(f"{name} does not use the common cache in this version of transformers")
    committed = filled_cache(target, ids)
    verification = verify_tree(target, committed, tree)
    for node in range(tree.num_nodes):
        path = tree.path(node)
        cache = fork_cache(committed, clone_states=False)  # the very tensors that were verified
        commit_path(target, cache, verification, path)
        expected = filled_cache(target, text_after(ids, tree, path))
        check_same_cache(cache, expected, f"cache: {name}, float32")


@pytest.mark.parametrize("method", ["tree", "scan", "paths"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "window5"])
def test_cache_after_a_path_in_float64(name, method):
    target, ids, tree = build(name, F64), random_ids(9), random_tree("deep", 14, seed=4)
    with DoubleThroughout():
        for node in (0, tree.leaves()[0], tree.num_nodes - 1):
            cache = filled_cache(target, ids)
            commit_path(target, cache, verify_tree(target, cache, tree, method), tree.path(node))
            expected = filled_cache(target, text_after(ids, tree, tree.path(node)))
            check_same_cache(cache, expected, f"cache: {name}, float64")


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "wrapped", "window5", "jamba"])
def test_ten_rounds_of_random_trees_and_paths(name, dtype):
    target, ids, rng = build(name, dtype), random_ids(5), np.random.default_rng(7)
    with DoubleThroughout() if dtype is F64 else nullcontext():
        cache = filled_cache(target, ids)
        for turn in range(10):
            tree = random_tree(["bushy", "deep", "star", "chain"][turn % 4], 12, seed=turn)
            path = tree.path(int(rng.integers(tree.num_nodes)))
            commit_path(target, cache, verify_tree(target, cache, tree), path)
            ids = text_after(ids, tree, path)
        tree = random_tree("bushy", 12, seed=99)
        found = verify_tree(target, cache, tree).logits
        label = f"after ten rounds: {name}, {str(dtype)[6:]}"
        check_close(found, alone(target, ids, tree), label)
        check_same_cache(cache, filled_cache(target, ids), f"cache {label}")


@pytest.mark.slow
def test_a_thousand_tokens_in_small_commits_do_not_drift():
    target, ids, rng = build("qwen3_5-conv5"), random_ids(20), np.random.default_rng(0)
    cache = filled_cache(target, ids)
    while ids.shape[1] < 1020:
        tree = random_tree("deep", 12, seed=ids.shape[1])
        end = rng.choice([node for node in range(tree.num_nodes) if tree.depths[node] < 8])
        path = tree.path(int(end))
        commit_path(target, cache, verify_tree(target, cache, tree), path)
        ids = text_after(ids, tree, path)
    check_same_cache(cache, filled_cache(target, ids), "cache after a thousand tokens: qwen3_5, float32")
    tree = random_tree("bushy", 12, seed=5)
    found = verify_tree(target, cache, tree).logits
    check_close(found, alone(target, ids, tree), "after a thousand tokens: qwen3_5, float32")


def test_flattened_commits_the_wrong_state_on_a_hybrid():
    target, ids, tree = build("qwen3_5"), random_ids(9), random_tree("bushy", 10, seed=2)
    cache = filled_cache(target, ids)
    commit_path(target, cache, verify_tree(target, cache, tree, "flattened"), tree.path(9))
    with pytest.raises(AssertionError, match=r"states.*off by"):
        check_same_cache(cache, filled_cache(target, text_after(ids, tree, tree.path(9))))


@pytest.mark.parametrize("name", ["dense", "window5", "gpt_oss"])
def test_flattened_commits_the_right_rows_without_recurrent_layers(name):
    target, ids, tree = build(name), random_ids(9), random_tree("bushy", 10, seed=2)
    cache = filled_cache(target, ids)
    commit_path(target, cache, verify_tree(target, cache, tree, "flattened"), tree.path(9))
    expected = filled_cache(target, text_after(ids, tree, tree.path(9)))
    check_same_cache(cache, expected, f"cache: {name}, float32")


@pytest.mark.parametrize("name", ["qwen3_5", "dense", "window5", "jamba"])
def test_whoever_holds_the_old_tensors_can_go_back(name):
    target, ids, tree = build(name), random_ids(9), random_tree("bushy", 10, seed=2)
    cache = filled_cache(target, ids)
    earlier = fork_cache(cache, clone_states=False)
    before = snapshot(earlier)
    commit_path(target, cache, verify_tree(target, cache, tree), tree.path(9))
    commit_path(target, cache, verify_tree(target, cache, tree), tree.path(5))
    check_untouched(earlier, before)
    check_close(verify_tree(target, earlier, tree).logits, alone(target, ids, tree), f"gone back: {name}")


@pytest.mark.parametrize("name", ["qwen3_5", "window5", "jamba"])
def test_a_fork_that_runs_on_leaves_the_original_alone(name):
    target, ids = build(name), random_ids(9)
    cache = filled_cache(target, ids)
    before = snapshot(cache)
    fork = fork_cache(cache)
    for _ in range(3):
        continue_target(target, random_ids(1), fork)
    check_untouched(cache, before)
    assert cache_length(fork) == cache_length(cache) + 3


@pytest.mark.parametrize("path", [[], [1], [0, 9], [0, 0], [0, 3, 1], [0, 12], [0, -1], [0, 1, 1]], ids=str)
def test_what_is_no_root_path_is_refused(path):
    target, ids = build("qwen3_5"), random_ids(9)
    tree = DraftTree.from_parents(range(10), [-1, 0, 0, 1, 2, 3, 4, 5, 6, 7])
    cache = filled_cache(target, ids)
    verification = verify_tree(target, cache, tree)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="path"):
        commit_path(target, cache, verification, path)
    check_untouched(cache, before)


@pytest.mark.parametrize("method", ["tree", "paths", "flattened"])
@pytest.mark.parametrize("name", ["qwen3_5", "dense", "window5"])
def test_a_stale_verification_is_refused(name, method):
    target, tree = build(name), random_tree("bushy", 10)
    cache = filled_cache(target, random_ids(9))
    stale = verify_tree(target, cache, tree, method)
    commit_path(target, cache, stale, [0])
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"verification was made when the cache held 9 tokens; it holds 10"):
        commit_path(target, cache, stale, [0])
    check_untouched(cache, before)


def test_a_verification_of_another_cache_is_refused():
    target, tree = build("qwen3_5"), random_tree("bushy", 10)
    cache, other = filled_cache(target, random_ids(9)), filled_cache(target, random_ids(9))
    verification = verify_tree(target, other, tree)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="verification"):
        commit_path(target, cache, verification, [0])
    check_untouched(cache, before)


def test_states_written_in_place_since_make_a_verification_stale():
    target, tree = build("qwen3_5"), random_tree("bushy", 10)
    cache = filled_cache(target, random_ids(9))
    verification = verify_tree(target, cache, tree)
    continue_target(target, random_ids(1), cache)  # the library's own decode step
    with pytest.raises(ValueError, match="verification"):
        commit_path(target, cache, verification, [0])


@pytest.mark.parametrize("name", ["qwen3_5", "jamba"])
def test_an_exception_in_a_commit_leaves_the_cache_as_it_was(name, monkeypatch):
    target, tree = build(name), random_tree("bushy", 10)
    cache = filled_cache(target, random_ids(9))
    verification = verify_tree(target, cache, tree, "paths")
    before = snapshot(cache)

    def fail(*args, **kwargs):
        raise MemoryError("full")

    last_mlp = [module for module in target.modules() if type(module).__name__.endswith("MLP")][-1]
    monkeypatch.setattr(last_mlp, "forward", fail)
    with pytest.raises(MemoryError, match="full"):
        commit_path(target, cache, verification, tree.path(9))
    check_untouched(cache, before)


def test_a_commit_needs_the_cache_of_its_target():
    target, other, tree = build("qwen3_5"), build("dense"), random_tree("bushy", 10)
    verification = verify_tree(target, filled_cache(target, random_ids(9)), tree)
    cache = filled_cache(other, random_ids(9))
    with pytest.raises(ValueError, match="cache"):
        commit_path(target, cache, verification, [0])
    with pytest.raises(ValueError, match="cache is empty"):
        commit_path(target, make_cache(target), verification, [0])


@pytest.mark.parametrize("make", [hybrid, dense])
def test_one_path_by_paths_is_committed_without_another_forward(make):
    target, tree = make(), random_tree("chain", 4)
    caches = [filled_cache(target, random_ids(9)) for _ in range(2)]
    verification = verify_tree(target, caches[0], tree, "paths")
    forwards = []
    handle = target.register_forward_hook(lambda *args: forwards.append(1))
    commit_path(target, caches[0], verification, [0, 1, 2, 3])
    assert not forwards
    before = snapshot(verification.grown)
    handle.remove()
    commit_path(target, caches[1], verify_tree(target, caches[1], tree, "tree"), [0, 1, 2, 3])
    check_same_cache(caches[0], caches[1])
    continue_target(target, random_ids(3), caches[0])  # what comes later leaves what was verified as it was
    check_untouched(verification.grown, before)


def test_a_part_of_one_path_by_paths_is_run_again():
    target, tree = hybrid(), random_tree("chain", 4)
    cache = filled_cache(target, random_ids(9))
    commit_path(target, cache, verify_tree(target, cache, tree, "paths"), [0, 1])
    expected = filled_cache(target, torch.cat([random_ids(9), path_ids(tree, [0, 1])], 1))
    check_same_cache(cache, expected)


@pytest.mark.parametrize("layers_at_once", [1, 2, 100])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5-conv5", "qwen3_5_moe", "qwen3_next"])
def test_layers_committed_at_once_are_as_committed_alone(name, layers_at_once, monkeypatch):
    target, tree = build(name), random_tree("bushy", 12)
    cache = filled_cache(target, random_ids(9))
    verification = verify_tree(target, cache, tree)
    state_bytes = next(iter(verification.factors.values())).delta.initial_state.nbytes
    monkeypatch.setattr(factors_module, "JOINED_BYTES", layers_at_once * state_bytes)
    for node in (0, 1, 5, 11):
        together, alone_ = fork_cache(cache, clone_states=False), fork_cache(cache, clone_states=False)
        commit_path(target, together, verification, tree.path(node))
        for i, left in verification.factors.items():
            left.commit(alone_.layers[i], tree.path(node))
            for state, expected in zip(
                layer_tensors(together.layers[i]).values(),
                layer_tensors(alone_.layers[i]).values(),
                strict=True,
            ):
                torch.testing.assert_close(state, expected, rtol=0, atol=1e-6)


def test_a_layer_of_another_shape_is_committed_apart():
    target, other = hybrid(4, 2, 2), hybrid(4, 1, 4)
    target.model.layers[1] = other.model.layers[1]  # half the key heads
    tree = random_tree("bushy", 10)
    cache, ids = filled_cache(target, random_ids(9)), random_ids(9)
    commit_path(target, cache, verify_tree(target, cache, tree), tree.path(9))
    check_same_cache(cache, filled_cache(target, text_after(ids, tree, tree.path(9))), "another shape")
