"""The heart: one tree pass gives the logits of every path run alone, without any cache."""

import functools
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from checks import DoubleThroughout, alone, check_close, error_by_node, filled_cache
from models import (
    FAMILIES,
    causal_lm,
    dense,
    has_its_own_cache,
    hybrid,
    random_ids,
    random_tree,
    wrapped_hybrid,
)

from ddtree_lab.stages.verify import verify_tree

F32, F64 = torch.float32, torch.float64


@dataclass(frozen=True)
class Case:
    """A target, a prompt length and a tree."""

    target: tuple  # family and its arguments, see `build`
    dtype: torch.dtype
    prompt: int
    shape: str
    nodes: int

    def __str__(self):
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{'-'.join(map(str, self.target))}-{dtype}-prompt{self.prompt}-{self.shape}{self.nodes}"

    @property
    def label(self):
        return f"{self.target[0]}, {str(self.dtype).removeprefix('torch.')}"


@functools.cache
def build(target, dtype):
    family, *sizes = target
    if family in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        layers, heads, kernel = sizes
        key_heads, value_heads = map(int, heads.split(":"))
        return hybrid(int(layers[:-1]), key_heads, value_heads, int(kernel[4:]), dtype, 0, family)
    if family == "qwen3":
        return dense(dtype, int(sizes[0].removeprefix("window")) if sizes else None)
    if family == "wrapped":
        return wrapped_hybrid(dtype)
    return causal_lm(family, dtype)


def precision(dtype):
    return DoubleThroughout() if dtype is F64 else nullcontext()


@functools.cache
def problem(case):
    """Target, prompt, tree, and the logits of each path alone."""
    target = build(case.target, case.dtype)
    ids, tree = random_ids(case.prompt, case.prompt), random_tree(case.shape, case.nodes, case.nodes)
    with precision(case.dtype) as mode:
        expected = alone(target, ids, tree)
    if case.dtype is F64:
        assert mode.casts  # the library did ask for float32 and got float64
    return target, ids, tree, expected


# Prompts: one token, below and at the conv kernel, at and around the windows and the 64-token chunk.
HYBRIDS = [
    Case(("qwen3_5", "4L", "2:4", "conv4"), F32, 1, "bushy", 24),
    Case(("qwen3_5", "4L", "2:4", "conv4"), F32, 17, "chain", 1),
    Case(("qwen3_5", "4L", "2:4", "conv4"), F32, 65, "bushy", 66),
    Case(("qwen3_5", "4L", "2:2", "conv4"), F32, 3, "chain", 16),
    Case(("qwen3_5", "4L", "1:4", "conv2"), F32, 5, "bushy", 24),
    Case(("qwen3_5", "8L", "2:4", "conv3"), F32, 17, "deep", 32),
    Case(("qwen3_5", "4L", "2:6", "conv5"), F32, 4, "bushy", 20),
    Case(("qwen3_5", "12L", "2:4", "conv4"), F32, 63, "bushy", 24),
    Case(("qwen3_5", "8L", "4:4", "conv4"), F32, 64, "deep", 48),
    Case(("qwen3_5", "4L", "1:1", "conv4"), F32, 70, "star", 16),
    Case(("qwen3_5", "5L", "2:4", "conv4"), F32, 9, "deep", 24),
    Case(("qwen3_5_moe", "4L", "2:4", "conv4"), F32, 2, "star", 12),
    Case(("qwen3_5_moe", "8L", "2:2", "conv3"), F32, 20, "bushy", 32),
    Case(("qwen3_next", "4L", "2:4", "conv4"), F32, 1, "deep", 16),
    Case(("qwen3_next", "8L", "1:4", "conv5"), F32, 66, "bushy", 24),
    Case(("qwen3_next", "4L", "2:2", "conv2"), F32, 3, "star", 12),
    Case(("wrapped",), F32, 11, "bushy", 24),
    Case(("qwen3_5", "4L", "2:4", "conv4"), F64, 1, "bushy", 24),
    Case(("qwen3_5", "4L", "2:4", "conv4"), F64, 2, "star", 12),
    Case(("qwen3_5", "4L", "1:4", "conv2"), F64, 64, "deep", 32),
    Case(("qwen3_5", "8L", "2:6", "conv3"), F64, 17, "bushy", 32),
    Case(("qwen3_5", "12L", "2:4", "conv5"), F64, 70, "bushy", 24),
    Case(("qwen3_5", "4L", "2:2", "conv4"), F64, 5, "chain", 20),
    Case(("qwen3_5_moe", "4L", "2:4", "conv4"), F64, 12, "bushy", 24),
    Case(("qwen3_next", "4L", "2:4", "conv4"), F64, 3, "bushy", 24),
    Case(("qwen3_next", "8L", "1:2", "conv5"), F64, 65, "deep", 24),
]
ATTENTION_ONLY = [
    Case(("qwen3",), F32, 1, "bushy", 24),
    Case(("qwen3",), F64, 30, "deep", 32),
    Case(("qwen3", "window5"), F32, 1, "deep", 24),
    Case(("qwen3", "window5"), F32, 4, "bushy", 24),
    Case(("qwen3", "window5"), F64, 3, "chain", 16),
    Case(("qwen3", "window5"), F64, 70, "deep", 32),
    Case(("qwen3", "window9"), F64, 8, "bushy", 24),
    Case(("qwen3", "window9"), F32, 40, "star", 16),
    Case(("qwen3", "window2"), F64, 12, "bushy", 24),
    Case(("qwen3", "window200"), F32, 50, "bushy", 24),
    Case(("mistral",), F32, 5, "bushy", 24),
    Case(("mistral",), F64, 30, "deep", 32),
    Case(("gemma3_text",), F32, 25, "deep", 24),
    Case(("gemma3_text",), F64, 7, "bushy", 24),
    Case(("gpt_oss",), F32, 8, "bushy", 24),
    Case(("gpt_oss",), F64, 33, "deep", 24),
]


@pytest.mark.parametrize("case", HYBRIDS + ATTENTION_ONLY, ids=str)
def test_tree_scan_and_paths_give_the_logits_of_each_path_alone(case):
    target, ids, tree, expected = problem(case)
    with precision(case.dtype):
        cache = filled_cache(target, ids)
        for method in ("auto", "tree", "scan", "paths"):
            found = verify_tree(target, cache, tree, method)
            assert found.method == ("tree" if method == "auto" else method)
            check_close(found.logits, expected, f"{method}: {case.label}")


@pytest.mark.parametrize("case", [case for case in HYBRIDS if case.shape != "chain"], ids=str)
def test_flattened_is_wrong_on_hybrids_from_the_first_sibling_on(case):
    target, ids, tree, expected = problem(case)
    sibling = next(i for i in range(1, tree.num_nodes) if tree.parents[i] != i - 1)
    with precision(case.dtype):
        found = verify_tree(target, filled_cache(target, ids), tree, "flattened")
        check_close(found.logits[:sibling], expected[:sibling], f"flattened before a sibling: {case.label}")
    error = error_by_node(found.logits, expected)
    assert error[sibling] > 0.05
    assert error[sibling:].median() > 0.5
    assert "WRONG" in repr(found)


@pytest.mark.parametrize("case", [*ATTENTION_ONLY, *[c for c in HYBRIDS if c.shape == "chain"]], ids=str)
def test_flattened_is_exact_on_attention_only_targets_and_on_chains(case):
    target, ids, tree, expected = problem(case)
    with precision(case.dtype):
        found = verify_tree(target, filled_cache(target, ids), tree, "flattened")
    check_close(found.logits, expected, f"flattened where it may be: {case.label}")


@pytest.mark.parametrize("method", ["tree", "scan", "paths"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3", "wrapped", "gpt2"])
def test_taps_of_a_node_are_those_of_its_path_alone(family, method):
    target = build((family, "4L", "2:4", "conv4") if family in ("qwen3_5", "qwen3_next") else (family,), F32)
    ids, tree, layers = random_ids(10), random_tree("bushy", 16, seed=3), [2, 0, 3]
    taps = verify_tree(target, filled_cache(target, ids), tree, method, tap_layer_ids=layers).taps
    for leaf in tree.leaves():
        path = tree.path(leaf)
        text = torch.cat([ids, torch.from_numpy(tree.token_ids[path])[None]], dim=1)
        with torch.no_grad():
            hidden = target(input_ids=text, use_cache=False, output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[i + 1][0, ids.shape[1] :] for i in layers], dim=-1)
        check_close(taps[path], expected, f"taps: {family}")


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("target", [("qwen3_5", "4L", "2:4", "conv4"), ("qwen3", "window5"), ("mistral",)])
def test_every_attention_back_end_is_exact(target, backend):
    model, before = build(target, F32), build(target, F32).config._attn_implementation
    ids, tree = random_ids(13), random_tree("bushy", 24, seed=1)
    model.set_attn_implementation(backend)
    try:
        found = verify_tree(model, filled_cache(model, ids), tree)
        expected = alone(model, ids, tree)
    finally:
        model.set_attn_implementation(before)
    assert found.method == "tree"
    check_close(found.logits, expected, f"{backend} attention: {target[0]}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_half_precision_differs_by_rounding_only(family, dtype):
    target = build((family, "4L", "2:4", "conv4"), dtype)
    ids, tree = random_ids(30), random_tree("bushy", 24, seed=1)
    cache = filled_cache(target, ids)
    expected = alone(target, ids, tree).float()
    tree_error, rounding, naive_error = (
        error_by_node(verify_tree(target, cache, tree, method).logits.float(), expected).median()
        for method in ("tree", "paths", "flattened")
    )
    assert tree_error < 3 * rounding + 1e-3
    assert tree_error < naive_error / 4


RECURRENT_WITHOUT_PORT = ["bamba", "falcon_h1", "jamba", "lfm2", "mamba2", "olmo_hybrid"]
POSITIONS_FROM_THE_SLOT = ["bloom", "mpt", "falcon"]


@pytest.mark.parametrize("prompt", [1, 2, 20])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_auto_is_exact_on_any_causal_model(family, prompt):
    target = build((family,), F32)
    if has_its_own_cache(target):
        pytest.skip(f"{family} does not use the common cache in this version of transformers")
    ids, tree = random_ids(prompt, seed=3), random_tree("bushy", 12, seed=prompt)
    found = verify_tree(target, filled_cache(target, ids), tree)
    slow = family in RECURRENT_WITHOUT_PORT + POSITIONS_FROM_THE_SLOT
    assert found.method == ("paths" if slow else "tree")
    check_close(found.logits, alone(target, ids, tree), f"auto: {family}")
