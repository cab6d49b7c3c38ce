import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree_lab.stages import tree as tree_stage
from ddtree_lab.stages.tree import (
    DraftTree,
    best_first_heap,
    build_chain,
    build_tree,
    build_tree_heap,
    top_log_probs,
    top_logits,
)

GOLDEN = json.loads((Path(__file__).parent / "data/trees.json").read_text())["cases"]


def golden_logits(case):
    shape = (case["depths_L"], case["vocab_V"])
    values = np.random.RandomState(case["seed"]).standard_normal(shape).astype(np.float32)
    return values * np.float32(case["scale"])


def all_nodes_in_order(logits, budget):
    """The definition: every node there is, sorted by score and then by ranks; (ranks, score) of the first."""
    log_probs, _ = top_log_probs(logits, np.shape(logits)[1])
    lp = log_probs.astype(np.float64)
    nodes = []
    for depth in range(1, len(lp) + 1):
        for ranks in itertools.product(range(lp.shape[1]), repeat=depth):
            score = 0.0
            for d, rank in enumerate(ranks):
                score += lp[d, rank]
            nodes.append((-score, ranks))
    return [(ranks, -negative) for negative, ranks in sorted(nodes)[: max(budget, 0)]]


def ranks_of(tree, node):
    return tuple(int(tree.ranks[i]) for i in tree.path(node)[1:])


def check_same_tree(found, expected):
    for name in ("parents", "depths", "ranks", "token_ids", "log_probs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


def check_same_tree_by_rank(found, expected, logits):
    """As `check_same_tree`, but of equal logits either token may be the first."""
    for name in ("parents", "depths", "ranks", "log_probs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    rows = torch.as_tensor(expected.depths[1:] - 1)
    has, wants = (logits[rows, torch.as_tensor(tree.token_ids[1:])] for tree in (found, expected))
    assert torch.equal(has, wants)


@st.composite
def draft_logits(draw, max_depth=5, max_vocab=7):
    """Logits of any kind: distinct, full of ties, with -inf (never a whole row), or bfloat16."""
    shape = draw(st.integers(1, max_depth)), draw(st.integers(1, max_vocab))
    kind = draw(st.sampled_from(["normal", "ties", "holes", "bfloat16", "flat"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.standard_normal(shape).astype(np.float32) * draw(st.sampled_from([0.1, 1.0, 5.0]))
    if kind == "ties":
        values = rng.integers(0, 3, shape).astype(np.float32)
    elif kind == "flat":
        values = np.zeros(shape, dtype=np.float32)
    elif kind == "holes":
        values[:, 1:][rng.random((shape[0], shape[1] - 1)) < 0.5] = -np.inf
    elif kind == "bfloat16":
        return torch.from_numpy(values).bfloat16()
    return torch.from_numpy(values)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"seed{case['seed']}-budget{case['budget']}")
@pytest.mark.parametrize("build", [build_tree, build_tree_heap])
def test_golden_trees_of_the_published_builder(case, build):
    tree = build(golden_logits(case), case["budget"])
    assert tree.parents.tolist() == case["parents"]
    assert tree.token_ids[1:].tolist() == case["token_ids"]
    assert tree.depths[1:].tolist() == case["node_depths"]
    assert tree.ranks[1:].tolist() == case["ranks"]


def test_the_golden_file_is_not_empty():
    assert len(GOLDEN) >= 10
    assert any(case["budget"] >= 256 for case in GOLDEN)


@given(draft_logits(), st.integers(-2, 60))
def test_the_default_agrees_with_the_heap_on_any_logits(logits, budget):
    check_same_tree(build_tree(logits, budget), build_tree_heap(logits, budget))


@given(draft_logits(max_depth=3, max_vocab=12), st.integers(2, 60), st.integers(1, 6))
def test_few_ranks_give_the_same_tree_or_none(logits, budget, width):
    """From as few as one rank: where a sibling is missing that might have been next, all are asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddtree_lab.stages.tree.NARROW", width)
        check_same_tree_by_rank(build_tree(logits, budget), build_tree_heap(logits, budget), logits)


@given(draft_logits(), st.integers(-2, 60), st.integers(1, 7), st.booleans())
def test_the_compiled_heap_agrees_with_the_interpreted_one(logits, budget, width, more_ranks):
    compiled = pytest.importorskip("ddtree_lab.stages.tree_compiled").best_first_compiled
    log_probs, _ = top_log_probs(logits, width)
    found, expected = (grow(log_probs, max(budget, 0), more_ranks) for grow in (compiled, best_first_heap))
    assert (found is None) == (expected is None)
    for have, want in zip(found or (), expected or (), strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("kind", ["normal", "bfloat16", "flat"])
def test_large_compiled_trees_agree_too(kind):
    compiled = pytest.importorskip("ddtree_lab.stages.tree_compiled").best_first_compiled
    logits = torch.randn(15, 300, generator=torch.Generator().manual_seed(0)) * (0 if kind == "flat" else 4)
    log_probs, _ = top_log_probs(logits.bfloat16() if kind == "bfloat16" else logits, 300)
    for have, want in zip(compiled(log_probs, 1024), best_first_heap(log_probs, 1024), strict=True):
        np.testing.assert_array_equal(have, want)


def test_the_compiled_heap_is_asked_for_once_it_pays(monkeypatch):
    calls, logits = [], torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(tree_stage, "_nodes_grown", 0)
    monkeypatch.setattr(tree_stage, "COMPILED_FROM", 100)
    monkeypatch.setattr(
        tree_stage, "compiled_heap", lambda: lambda *args: calls.append(args[1]) or best_first_heap(*args)
    )
    trees = [build_tree(logits, 30) for _ in range(5)]
    assert calls == [30, 30]  # after three trees of thirty
    monkeypatch.setattr(tree_stage, "compiled_heap", lambda: None)  # numba is not there
    check_same_tree(build_tree(logits, 30), trees[0])


def test_without_numba_there_is_no_compiled_heap(monkeypatch):
    monkeypatch.setitem(sys.modules, "ddtree_lab.stages.tree_compiled", None)
    assert tree_stage.compiled_heap.__wrapped__() is None


@pytest.mark.parametrize("scale", [0.0, 1.0, 9.0])
def test_the_narrow_attempt_is_taken_where_it_is_enough(scale, monkeypatch):
    logits = torch.randn(15, 2000, generator=torch.Generator().manual_seed(0)) * scale
    widths = []
    monkeypatch.setattr(
        "ddtree_lab.stages.tree.top_logits", lambda x, k: widths.append(k) or torch.topk(x, k)
    )
    tree = build_tree(logits, 300)
    assert widths == ([64] if scale == 9.0 else [64, 300])
    assert (tree.ranks.max() < 63) == (scale == 9.0)


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from(["normal", "ties", "holes", "bfloat16"])
)
def test_the_largest_logits_by_blocks_are_those_of_topk(seed, k, kind):
    logits = torch.randn(2, 64 * 400, generator=torch.Generator().manual_seed(seed))
    if kind == "ties":
        logits = logits.round()
    elif kind == "holes":
        logits[logits < 2.5] = -torch.inf
    elif kind == "bfloat16":
        logits = logits.bfloat16()
    values, token_ids = top_logits(logits, k)
    assert torch.equal(values, torch.topk(logits, k).values)
    assert torch.equal(logits.gather(1, token_ids), values)
    assert all(len(set(row)) == k for row in token_ids.tolist())


@pytest.mark.parametrize("budget", [255, 256, 257, 700, 2000])
@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
def test_large_trees_agree_with_the_heap(budget, scale):
    logits = np.random.default_rng(budget).standard_normal((15, 400)).astype(np.float32) * scale
    check_same_tree(build_tree(logits, budget), build_tree_heap(logits, budget))


@pytest.mark.parametrize("budget", [20, 45, 46, 50, 59, 60, 300])
def test_impossible_tokens_tie_across_branches_in_heap_order(budget):
    logits = torch.full((3, 20), -torch.inf)  # below (0, 0) and (1, 0) every node but the first scores -inf
    logits[0, :2], logits[1:, 0] = torch.tensor([1.0, 0.0]), 0.0
    check_same_tree(build_tree(logits, budget), build_tree_heap(logits, budget))


def test_large_bfloat16_trees_with_ties_agree_with_the_heap():
    logits = torch.randn(15, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    log_probs, _ = top_log_probs(logits, 300)
    assert (np.diff(log_probs, axis=1) == 0).any()  # there are ties
    for budget in (300, 1000):
        check_same_tree_by_rank(build_tree(logits, budget), build_tree_heap(logits, budget), logits)


@given(draft_logits(max_depth=4, max_vocab=4), st.integers(-1, 400))
def test_tree_is_the_best_of_all_possible_nodes(logits, budget):
    expected = all_nodes_in_order(logits, budget)
    tree = build_tree(logits, budget)
    assert [ranks_of(tree, i) for i in range(1, tree.num_nodes)] == [ranks for ranks, _ in expected]
    np.testing.assert_array_equal(tree.log_probs[1:], [score for _, score in expected])


@given(draft_logits(), st.integers(0, 80))
def test_a_smaller_budget_is_a_prefix_of_a_larger_one(logits, budget):
    large = build_tree(logits, 80)
    check_same_tree(large.prefix(budget), build_tree(logits, budget))


@given(draft_logits(), st.integers(0, 60))
def test_order_scores_and_mass(logits, budget):
    tree = build_tree(logits, budget)
    assert (tree.parents[1:] < np.arange(1, tree.num_nodes)).all()
    assert (tree.log_probs[2:] <= tree.log_probs[1:-1]).all()
    assert tree.num_drafted <= budget
    assert tree.mass == pytest.approx(sum(np.exp(score) for score in tree.log_probs[1:]))
    assert tree.mass <= tree.depth + 1e-6  # an expected number of accepted drafts


@given(draft_logits(), st.integers(0, 60))
def test_scores_are_sums_of_log_probabilities_and_tokens_have_the_ranks(logits, budget):
    tree = build_tree(logits, budget)
    log_softmax = logits.float().log_softmax(-1).double().numpy()
    for node in range(1, tree.num_nodes):
        path = tree.path(node)[1:]
        terms = [log_softmax[d, tree.token_ids[i]] for d, i in enumerate(path)]
        np.testing.assert_allclose(tree.log_probs[node], sum(terms), rtol=1e-5, atol=1e-5)
        row = log_softmax[len(path) - 1]
        token_log_prob = row[tree.token_ids[node]]
        assert (row > token_log_prob).sum() <= tree.ranks[node] < (row >= token_log_prob).sum()


@given(draft_logits(), st.integers(0, 60))
def test_visibility_is_the_path(logits, budget):
    tree = build_tree(logits, budget)
    for node in range(tree.num_nodes):
        assert np.flatnonzero(tree.visibility[node]).tolist() == tree.path(node)


@given(draft_logits(), st.integers(0, 60), st.integers(0, 5))
def test_up_to_depth_keeps_the_shallow_nodes_and_their_paths(logits, budget, depth):
    tree = build_tree(logits, budget)
    cut = tree.up_to_depth(depth)
    kept = [i for i in range(tree.num_nodes) if tree.depths[i] <= depth]
    assert cut.token_ids.tolist() == tree.token_ids[kept].tolist()
    for new, old in enumerate(kept):
        assert cut.token_ids[cut.path(new)].tolist() == tree.token_ids[tree.path(old)].tolist()


@given(draft_logits(), st.integers(1, 60))
def test_children_and_leaves_follow_from_parents(logits, budget):
    tree = build_tree(logits, budget)
    for node in range(tree.num_nodes):
        expected = {int(tree.token_ids[i]): i for i in range(1, tree.num_nodes) if tree.parents[i] == node}
        assert tree.children(node) == expected
        assert (node in tree.leaves()) == (not expected)


@pytest.mark.parametrize("budget", [0, -1, -100])
def test_no_budget_gives_the_root_alone(budget):
    tree = build_tree(torch.zeros(3, 5), budget, root_token_id=4)
    assert (tree.num_nodes, tree.token_ids.tolist(), tree.parents.tolist(), tree.mass) == (1, [4], [-1], 0.0)


@pytest.mark.parametrize("build", [build_tree, build_tree_heap])
def test_no_depths_gives_the_root_alone(build):
    assert build(torch.zeros(0, 5), 300).num_nodes == 1


@pytest.mark.parametrize("build", [build_tree, build_tree_heap])
@pytest.mark.parametrize(("depth", "vocab"), [(3, 2), (5, 1), (2, 4)])
def test_the_tree_runs_dry_where_there_are_fewer_nodes_than_budget(build, depth, vocab):
    logits = torch.randn(depth, vocab, generator=torch.Generator().manual_seed(1))
    assert build(logits, 1000).num_drafted == sum(vocab**d for d in range(1, depth + 1))


def test_ties_go_to_the_smaller_tuple_of_ranks():
    tree = build_tree(torch.zeros(2, 3), 12)
    assert [ranks_of(tree, i) for i in range(1, 13)] == [
        (0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("build", [build_tree, build_tree_heap, build_chain])
@pytest.mark.parametrize("column", [0, 7])
def test_broken_logits_are_refused_by_name(bad, build, column):
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    logits[2, column] = bad
    arguments = (logits,) if build is build_chain else (logits, 2)
    with pytest.raises(ValueError, match="draft_logits holds NaN"):
        build(*arguments)


def test_a_row_without_a_finite_value_is_refused():
    logits = torch.zeros(3, 4)
    logits[1] = -torch.inf
    with pytest.raises(ValueError, match="draft_logits"):
        build_tree(logits, 3)


@pytest.mark.parametrize("shape", [(5,), (1, 2, 3), (3, 0)])
def test_logits_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="draft_logits has shape"):
        build_tree(torch.zeros(shape), 3)


def test_arrays_lists_and_integers_are_logits_too():
    logits = [[3, 1, 2], [0, 5, 1]]
    expected = build_tree(torch.tensor(logits, dtype=torch.float32), 4)
    for given_logits in (logits, np.array(logits), np.array(logits, dtype=np.float64), torch.tensor(logits)):
        check_same_tree(build_tree(given_logits, 4), expected)


def test_the_chain_is_the_favourite_at_every_depth():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    chain = build_chain(logits, root_token_id=9)
    assert chain.is_chain
    assert chain.token_ids.tolist() == [9, *logits.argmax(-1).tolist()]
    np.testing.assert_allclose(chain.log_probs[1:], logits.log_softmax(-1).amax(-1).cumsum(0), rtol=1e-5)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "parents"),
        ([0, 0], "parents"),
        ([-1, 1], r"parents\[1\] is 1"),
        ([-1, 0, -1], r"parents\[2\] is -1"),
    ],
)
def test_parents_that_are_no_tree_are_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        DraftTree.from_parents(list(range(len(parents))), parents)


def test_depths_that_do_not_follow_from_parents_are_refused():
    index = np.arange(3)
    with pytest.raises(ValueError, match="depths do not follow"):
        DraftTree(index, np.array([-1, 0, 1]), np.array([0, 1, 1]), index, np.zeros(3))


def test_of_two_children_with_one_token_the_first_counts():
    tree = DraftTree.from_parents([1, 7, 7, 8], [-1, 0, 0, 0])
    assert tree.children(0) == {7: 1, 8: 3}
