"""Verifiers by exact enumeration on tiny vocabularies: the lossless ones are, the others are shown not to be."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree_lab.stages.tree import DraftTree, build_chain, build_tree
from ddtree_lab.stages.walk import linear_chain, walk_tree
from ddtree_lab.verifiers import (
    DraftedRound,
    chain_of,
    chain_rejection,
    continued,
    draw_chain,
    emissions,
    enumerated,
    linear_chain_rejection,
    mean_accepted_drafts,
    point_masses,
    sample_and_match,
    sampled,
    total_variation,
    tree_walk,
)

VOCAB, DEPTH = 3, 2
SEEDS = range(8)
LENGTH = DEPTH + 2  # a round emits one token more than it can accept; one more shows what comes after


def world(seed):
    """A target whose distribution depends on the whole text, and a drafter's marginals."""
    memory: dict[tuple[int, ...], np.ndarray] = {}

    def target(text):
        if text not in memory:
            rng = np.random.default_rng([seed, *text, 99])
            memory[text] = rng.dirichlet(np.ones(VOCAB))
        return memory[text]

    return target, np.random.default_rng(seed).dirichlet(np.ones(VOCAB), DEPTH)


def own(target):
    return continued({(): 1.0}, target, LENGTH)


def error(law, target):
    return total_variation(continued(law, target, LENGTH), own(target))


def drawn_chain_law(target, q, verifier, seen_q=None):
    """Over all chains that the drafter can draw."""

    def process(draw):
        drafted = DraftedRound.of(draw_chain(q, draw), target, q if seen_q is None else seen_q)
        return verifier(drafted, draw)

    return enumerated(process)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("budget", [0, 1, 3, 6])
def test_the_tree_walk_is_lossless_on_any_tree(seed, budget):
    target, q = world(seed)
    law = emissions(tree_walk, DraftedRound.of(build_tree(np.log(q), budget), target, q))
    assert error(law, target) < 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_matching_a_chain_of_favourites_is_lossless(seed):
    target, q = world(seed)
    law = emissions(sample_and_match, DraftedRound.of(build_chain(np.log(q)), target, q))
    assert error(law, target) < 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_rejection_is_lossless_on_a_drawn_chain(seed):
    target, q = world(seed)
    assert error(drawn_chain_law(target, q, chain_rejection), target) < 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_rejection_with_point_masses_is_matching(seed):
    target, q = world(seed)
    chain = build_chain(np.log(q))
    rejecting = emissions(chain_rejection, DraftedRound.of(chain, target, point_masses(chain, VOCAB)))
    matching = emissions(sample_and_match, DraftedRound.of(chain, target, q))
    assert total_variation(rejecting, matching) < 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_rejection_of_favourites_that_were_not_drawn_is_not_lossless(seed):
    target, q = world(seed)
    assert (
        error(emissions(chain_rejection, DraftedRound.of(build_chain(np.log(q)), target, q)), target) > 0.01
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_rejection_with_another_q_than_the_one_drawn_from_is_not_lossless(seed):
    target, q = world(seed)
    flatter = np.sqrt(q) / np.sqrt(q).sum(-1, keepdims=True)  # as when a drafter's temperature is forgotten
    assert error(drawn_chain_law(target, q, chain_rejection, flatter), target) > 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_a_linear_chain_over_a_tree_is_not_lossless(seed):
    target, q = world(seed)
    law = emissions(linear_chain_rejection, DraftedRound.of(build_tree(np.log(q), 6), target, q))
    assert error(law, target) > 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_accepted_has_the_known_expectations(seed):
    target, q = world(seed)
    tree, chain = build_tree(np.log(q), 5), build_chain(np.log(q))
    on_tree = DraftedRound.of(tree, target, q)
    reached = np.ones(tree.num_nodes)  # the target's probability of each path
    for node in range(1, tree.num_nodes):
        parent = tree.parents[node]
        reached[node] = reached[parent] * on_tree.target[parent, tree.token_ids[node]]
    assert mean_accepted_drafts(emissions(tree_walk, on_tree)) == pytest.approx(reached[1:].sum())
    # At the first depth rejection keeps Σ min(p, q), matching keeps p of the favourite.
    rejecting = drawn_chain_law(target, q[:1], chain_rejection)
    assert mean_accepted_drafts(rejecting) == pytest.approx(np.minimum(target(()), q[0]).sum())
    matching = emissions(sample_and_match, DraftedRound.of(chain.up_to_depth(1), target, q))
    assert mean_accepted_drafts(matching) == pytest.approx(target(())[q[0].argmax()])


def test_sampled_draws_follow_what_is_enumerated():
    target, q = world(1)
    drafted = DraftedRound.of(build_tree(np.log(q), 4), target, q)
    draw, num_draws = sampled(np.random.default_rng(0)), 4000
    counts: dict = {}
    for _ in range(num_draws):
        tokens = tree_walk(drafted, draw)
        counts[tokens] = counts.get(tokens, 0) + 1 / num_draws
    assert total_variation(counts, emissions(tree_walk, drafted)) < 0.05


@pytest.mark.parametrize("verifier", [sample_and_match, chain_rejection])
def test_chain_verifiers_refuse_a_tree(verifier):
    target, q = world(0)
    drafted = DraftedRound.of(build_tree(np.log(q), 4), target, q)
    with pytest.raises(ValueError, match="branches"):
        verifier(drafted, sampled(np.random.default_rng(0)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_linear_walk_of_a_chain_is_the_tree_walk(seed):
    chain = chain_of(np.random.default_rng(seed).integers(0, 4, 9).tolist())
    wants = np.random.default_rng(seed + 1).integers(0, 4, 9)
    assert linear_chain(chain, wants).path == walk_tree(chain, wants).path


def test_a_linear_walk_goes_wrong_after_the_first_node_that_is_no_child():
    #  5 ─┬ 7 ─ 9
    #     └ 8        in storage order 5, 7, 8, 9: row 2 continues "5 8", not "5 7 8"
    tree = DraftTree.from_parents([5, 7, 8, 9], [-1, 0, 0, 1])
    wants = [7, 8, 9, 1]
    assert walk_tree(tree, wants).token_ids == (7, 8)
    assert linear_chain(tree, wants).token_ids == (7, 8, 9, 1)


def test_a_linear_walk_refuses_another_number_of_tokens_by_name():
    with pytest.raises(ValueError, match="target_token_ids has 2 tokens"):
        linear_chain(chain_of([1, 2, 3]), [0, 0])
