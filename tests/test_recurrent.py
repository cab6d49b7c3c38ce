import pytest
import torch
from checks import DoubleThroughout, check_same_cache, filled_cache, path_ids
from models import hybrid, random_ids, random_tree
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from ddtree_lab.recurrent import ports
from ddtree_lab.recurrent.conv import tree_conv, window_after
from ddtree_lab.recurrent.gated_delta import tree_delta_rule
from ddtree_lab.recurrent.levels import level_delta_rule
from ddtree_lab.recurrent.naive import tree_conv_scan, tree_scan
from ddtree_lab.recurrent.topology import TreeTopology
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.verify import verify_tree

SHAPES = ["chain", "star", "bushy", "deep"]
CPU = torch.device("cpu")
RULES = ["solve", "levels"]
H, K, V = 3, 8, 5  # heads, key and value width


def delta_problem(num_nodes, seed=0, log_decay=None, dtype=torch.float64):
    """Queries, keys, values, log decays, β and a state of the right sizes; keys of length 1."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    decay = -torch.rand(H, num_nodes, generator=g, dtype=torch.float64) * 2
    if log_decay is not None:
        decay = torch.full_like(decay, log_decay)
    tensors = (
        torch.nn.functional.normalize(normal(H, num_nodes, K), dim=-1) * K**-0.5,
        torch.nn.functional.normalize(normal(H, num_nodes, K), dim=-1),
        normal(H, num_nodes, V),
        decay,
        normal(H, num_nodes).sigmoid(),
        normal(H, K, V),
    )
    return tuple(tensor.to(dtype) for tensor in tensors)


def both(problem, tree, rule="solve"):
    """Outputs and factors of the solve, or of the levels, and of the scan."""
    topology = TreeTopology(tree)
    if rule == "levels":
        return level_delta_rule(*problem, topology.levels(CPU)), tree_scan(*problem, topology.parents)
    return tree_delta_rule(*problem, topology.ancestors(CPU)), tree_scan(*problem, topology.parents)


def state_by_hand(problem, path):
    """The state after a path: the recurrence on its nodes, one after another."""
    _, keys, values, log_decay, beta, state = problem
    for i in path:
        state = state * log_decay[:, i].exp()[:, None, None]
        update = beta[:, i, None] * (values[:, i] - (state * keys[:, i, :, None]).sum(1))
        state = state + keys[:, i, :, None] * update[:, None, :]
    return state


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_nodes", [1, 2, 33, 70])
def test_delta_rule_is_the_scan(shape, num_nodes, rule):
    problem = delta_problem(num_nodes, seed=num_nodes)
    (solved, _), (scanned, _) = both(problem, random_tree(shape, num_nodes, seed=1), rule)
    torch.testing.assert_close(solved, scanned, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_state_after_every_node_is_the_recurrence_on_its_path(shape, rule):
    tree = random_tree(shape, 24, seed=2)
    problem = delta_problem(24, seed=3)
    for _, factors in both(problem, tree, rule):
        for node in range(tree.num_nodes):
            path = tree.path(node)
            expected = state_by_hand(problem, path)
            torch.testing.assert_close(factors.state_after(path), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_nodes", [1, 40, 64, 100])
def test_a_chain_is_the_librarys_own_chunked_kernel(num_nodes):
    problem = delta_problem(num_nodes, seed=4)
    queries, keys, values, log_decay, beta, state = problem
    # The kernel scales the queries itself.
    rows = [x.transpose(0, 1)[None] for x in (queries * K**0.5, keys, values, log_decay, beta)]
    with DoubleThroughout() as mode:
        expected, state_after = torch_chunk_gated_delta_rule(
            *rows, initial_state=state[None], output_final_state=True
        )
    assert mode.casts
    outputs, factors = both(problem, random_tree("chain", num_nodes))[0]
    torch.testing.assert_close(outputs, expected[0].transpose(0, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(factors.state_after(range(num_nodes)), state_after[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("log_decay", [-50.0, -1e4, -1e-12, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_strong_and_tiny_decays_stay_finite_and_exact(rule, shape, dtype, log_decay):
    tree = random_tree(shape, 48, seed=5)
    problem = delta_problem(48, seed=6, log_decay=log_decay, dtype=dtype)
    (solved, factors), (scanned, scan_factors) = both(problem, tree, rule)
    atol = 1e-10 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(solved, scanned, rtol=0, atol=atol)
    for leaf in tree.leaves():
        state = factors.state_after(tree.path(leaf))
        assert state.isfinite().all()
        torch.testing.assert_close(state, scan_factors.state_after(tree.path(leaf)), rtol=0, atol=atol)
        torch.testing.assert_close(state, state_by_hand(problem, tree.path(leaf)), rtol=0, atol=atol)


@pytest.mark.parametrize("rule", RULES)
def test_one_strong_decay_forgets_the_past_and_nothing_else(rule):
    tree = random_tree("bushy", 30, seed=7)
    problem = delta_problem(30, seed=8)
    problem[3][:, 4] = -300.0  # e^-300: what lies above node 4 is gone for its subtree
    (solved, _), (scanned, _) = both(problem, tree, rule)
    torch.testing.assert_close(solved, scanned, rtol=0, atol=1e-12)
    other = (*problem[:5], problem[5] + 1.0)
    changed = ((both(other, tree, rule)[0][0] - solved).abs().amax((0, 2)) > 1e-9).numpy()
    assert (changed == ~tree.visibility[:, 4]).all()


@pytest.mark.parametrize("rule", RULES)
def test_inputs_and_the_committed_state_are_not_written(rule):
    problem = delta_problem(20)
    before = [tensor.clone() for tensor in problem]
    for _, factors in both(problem, random_tree("bushy", 20), rule):
        factors.state_after([0])
    for tensor, was in zip(problem, before, strict=True):
        assert torch.equal(tensor, was)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("has_bias", [True, False])
def test_conv_is_the_scan(shape, kernel, has_bias):
    tree = random_tree(shape, 30, seed=kernel)
    inputs, window, weight, bias, topology = conv_problem(tree, kernel)
    bias = bias if has_bias else None
    columns = topology.conv_columns(kernel, CPU)
    found = tree_conv(inputs, window, weight, bias, columns)
    expected = tree_conv_scan(inputs, window, weight, bias, topology.parents)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [2, 3, 4, 5])
def test_conv_of_a_node_is_the_convolution_of_its_path(kernel):
    tree = random_tree("bushy", 25, seed=9)
    inputs, window, weight, bias, topology = conv_problem(tree, kernel)
    found = tree_conv(inputs, window, weight, bias, topology.conv_columns(kernel, CPU))
    for node in range(tree.num_nodes):
        text = torch.cat([window, inputs[tree.path(node)].mT], dim=1)[None]
        expected = torch.nn.functional.conv1d(text, weight[:, None], bias, groups=len(weight))[0, :, -1]
        torch.testing.assert_close(found[node], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [1, 2, 4, 5])
def test_window_after_a_path_is_the_end_of_the_text(kernel):
    tree = random_tree("deep", 12, seed=3)
    inputs, window, *_ = conv_problem(tree, kernel)
    for node in range(tree.num_nodes):
        text = torch.cat([window, inputs[tree.path(node)].mT], dim=1)
        assert torch.equal(window_after(inputs, [window], tree.path(node)), text[:, -kernel:])


def conv_problem(tree, kernel, channels=6):
    g = torch.Generator().manual_seed(kernel)
    shapes = [(tree.num_nodes, channels), (channels, kernel), (channels, kernel), (channels,)]
    tensors = [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes]
    return (*tensors, TreeTopology(tree))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_a_key_head_serves_several_value_heads(groups, rule):
    tree = random_tree("bushy", 40, seed=3)
    queries, keys, *others = delta_problem(40, seed=9)
    queries, keys = queries[: H // groups], keys[: H // groups]
    others = [x[: groups * len(keys)] for x in others]
    (found, factors), (scanned, scan_factors) = both((queries, keys, *others), tree, rule)
    torch.testing.assert_close(found, scanned, rtol=0, atol=1e-12)
    path = tree.path(39)
    torch.testing.assert_close(factors.state_after(path), scan_factors.state_after(path), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_levels_hold_each_nodes_path_once(shape):
    tree = random_tree(shape, 60, seed=4)
    levels = TreeTopology(tree).levels(CPU)
    assert len(levels) == tree.depth + 1
    paths = [path for level in levels for path in level.tolist()]
    assert sorted(path[-1] for path in paths) == list(range(60))
    assert all(path == tree.path(path[-1]) for path in paths)


def test_large_shallow_trees_are_run_by_levels_and_deep_ones_are_not():
    star = DraftTree.from_parents(range(300), [-1] + [0] * 299)
    assert TreeTopology(star).is_sparse
    assert not TreeTopology(random_tree("chain", 300)).is_sparse
    assert not TreeTopology(random_tree("bushy", 65)).is_sparse


def test_a_pass_over_a_large_tree_is_the_paths(monkeypatch):
    target, ids, tree = hybrid(), random_ids(9), random_tree("bushy", 400, seed=1)
    calls = []
    monkeypatch.setattr(ports, "level_delta_rule", lambda *args: calls.append(1) or level_delta_rule(*args))
    cache = filled_cache(target, ids)
    verification = verify_tree(target, cache, tree, "tree")
    assert TreeTopology(tree).is_sparse and len(calls) == 3  # recurrent layers
    torch.testing.assert_close(
        verification.logits, verify_tree(target, cache, tree, "paths").logits, rtol=0, atol=1e-3
    )
    path = max((tree.path(leaf) for leaf in tree.leaves()), key=len)
    commit_path(target, cache, verification, path)
    check_same_cache(cache, filled_cache(target, torch.cat([ids, path_ids(tree, path)], 1)), "by levels")
