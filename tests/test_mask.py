import numpy as np
import pytest
import torch
from models import random_tree

from ddtree_lab.stages.mask import build_mask, build_mask_naive
from ddtree_lab.stages.tree import DraftTree

SHAPES = ["chain", "star", "bushy", "deep"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("past", [0, 1, 7, 40])
def test_mask_is_the_definition(shape, past):
    tree = random_tree(shape, 23, seed=past)
    mask = build_mask(tree, past)
    np.testing.assert_array_equal(mask.visible.numpy(), build_mask_naive(tree, past))
    assert mask.additive.shape == (1, 1, 23, past + 23)
    assert mask.position_ids.tolist() == [[past + int(depth) for depth in tree.depths]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("past", [0, 1, 4, 5, 6, 30])
@pytest.mark.parametrize("window", [1, 2, 5, 6, 100])
def test_windowed_mask_covers_the_rows_the_cache_still_has(shape, past, window):
    tree = random_tree(shape, 23, seed=past + window)
    columns = min(past, window - 1) + tree.num_nodes
    windowed = build_mask(tree, past, windows=[window]).windowed[window]
    assert windowed.shape == (1, 1, 23, columns)
    expected = build_mask_naive(tree, past, window)
    np.testing.assert_array_equal((windowed[0, 0] == 0).numpy(), expected[:, -columns:])
    assert not expected[:, :-columns].any()  # what has left the cache is out of every node's window


@pytest.mark.parametrize("seed", range(12))
def test_another_parent_changes_the_rows_of_its_subtree_and_no_other(seed):
    tree = random_tree("bushy", 25, seed)
    rng = np.random.default_rng(seed)
    node = int(rng.integers(2, tree.num_nodes))
    parents = tree.parents.copy()
    parents[node] = rng.choice([p for p in range(node) if p != tree.parents[node]])
    changed = DraftTree.from_parents(tree.token_ids, parents)
    before, after = build_mask(tree, 6).visible, build_mask(changed, 6).visible
    rows = (before != after).any(-1).numpy()
    np.testing.assert_array_equal(rows, tree.visibility[:, node])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_mask_is_added_in_the_dtype_asked_for(dtype):
    mask = build_mask(random_tree("bushy", 9), 4, dtype, windows=[3])
    for additive in (mask.additive, mask.windowed[3]):
        assert additive.dtype == dtype
        assert set(additive.unique().tolist()) == {0.0, torch.finfo(dtype).min}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(past_length=-1), "past_length is -1"),
        (dict(past_length=3, dtype=torch.int64), "dtype is torch.int64"),
        (dict(past_length=3, dtype=torch.bool), "dtype is torch.bool"),
        (dict(past_length=3, windows=[4, 0]), "windows has 0"),
    ],
    ids=["negative-past", "int-dtype", "bool-dtype", "no-window"],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_mask(random_tree("bushy", 9), **arguments)
