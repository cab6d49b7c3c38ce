from itertools import pairwise

import numpy as np
import pytest
import torch
from models import random_tree
from test_tree import GOLDEN, golden_logits

from ddtree_lab.stages.tree import DraftTree, build_tree
from ddtree_lab.stages.walk import walk_tree


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"seed{case['seed']}-budget{case['budget']}")
def test_golden_walks_of_the_published_code(case):
    tree = build_tree(golden_logits(case), case["budget"])
    walk = walk_tree(tree, case["target_token_ids"])
    assert list(walk.path) == case["path"]
    assert walk.bonus_token_id == case["bonus_token_id"]


@pytest.mark.parametrize("shape", ["chain", "star", "bushy", "deep"])
@pytest.mark.parametrize("seed", range(10))
def test_a_target_that_follows_a_path_is_followed_to_its_end(shape, seed):
    tree = random_tree(shape, 20, seed)
    goal = tree.path(int(np.random.default_rng(seed).integers(tree.num_nodes)))
    unused = max(set(range(200)) - set(tree.token_ids.tolist()))  # no node has it
    wants = np.full(tree.num_nodes, unused)
    for node, child in pairwise(goal):
        wants[node] = tree.token_ids[child]
    walk = walk_tree(tree, wants)
    assert list(walk.path) == goal
    assert walk.bonus_token_id == unused
    assert list(walk.token_ids) == [*tree.token_ids[goal[1:]], unused]
    assert walk.num_accepted_drafts == len(goal) - 1
    assert walk.num_emitted_tokens == len(walk.token_ids) == len(goal)


@pytest.mark.parametrize("seed", range(10))
def test_emitted_tokens_are_the_targets_own(seed):
    tree = random_tree("bushy", 30, seed)
    wants = np.random.default_rng(seed).integers(0, 97, tree.num_nodes)
    wants[: tree.num_nodes // 2] = [next(iter(tree.children(i)), 5) for i in range(tree.num_nodes // 2)]
    walk = walk_tree(tree, torch.from_numpy(wants))
    assert list(walk.token_ids) == wants[list(walk.path)].tolist()
    assert walk.bonus_token_id not in tree.children(walk.path[-1])


def test_the_root_alone_emits_the_bonus_token():
    walk = walk_tree(DraftTree.from_parents([3], [-1]), [8])
    assert (walk.path, walk.token_ids, walk.bonus_token_id) == ((0,), (8,), 8)
    assert (walk.num_accepted_drafts, walk.num_emitted_tokens) == (0, 1)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_another_number_of_tokens_is_refused_by_name(count):
    with pytest.raises(ValueError, match=f"target_token_ids has {count} tokens"):
        walk_tree(DraftTree.from_parents([1, 2, 3, 4], [-1, 0, 0, 1]), [0] * count)
