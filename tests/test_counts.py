"""What a pass and a round cost in counts, which no machine's mood changes: products, copied bytes, forwards."""

from __future__ import annotations

import math

import pytest
import torch
from checks import Counted
from models import dense, hybrid, random_ids
from pairs import random_pair
from torch.utils.flop_counter import FlopCounterMode

import ddtree_lab as dl
from ddtree_lab.bench.subjects import make_subject
from ddtree_lab.compat import is_recurrent, layer_tensors
from ddtree_lab.stages.cache import fork_cache
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.verify import PATHS_PER_PASS, verify_tree


def counts_of_a_pass(num_nodes, num_layers=4):
    subject = make_subject("random", hybrid(num_layers=num_layers), 16)
    tree = subject.tree(num_nodes)
    verify_tree(subject.target, subject.cache, tree)
    with Counted() as counted:
        verify_tree(subject.target, subject.cache, tree)
    return counted


def test_a_passs_products_depend_on_the_layers_and_not_on_the_nodes():
    four, eight = counts_of_a_pass(9), counts_of_a_pass(9, num_layers=8)
    assert counts_of_a_pass(65).products == four.products
    # Per recurrent layer: five projections, log decays, what keys and queries are multiplied with (the keys, the
    # state), the sum over updates, three of the MLP; per attention layer four projections and three of the MLP; and
    # the head.
    assert four.products == 3 * (5 + 1 + 2 + 1 + 3) + (4 + 3) + 1
    assert eight.products == 2 * (four.products - 1) + 1


def test_a_passs_copied_bytes_grow_with_its_nodes():
    small, large = counts_of_a_pass(33), counts_of_a_pass(65)
    assert large.copied < 2.3 * small.copied


@pytest.mark.parametrize("method", ["tree", "flattened"])
def test_a_round_is_one_forward(method):
    subject, calls = make_subject("random", hybrid(), 16), []
    tree = subject.tree(17)
    verify_tree(subject.target, subject.cache, tree, method)
    handle = subject.target.register_forward_hook(lambda *args: calls.append(1))
    verify_tree(subject.target, subject.cache, tree, method)
    handle.remove()
    assert len(calls) == 1


def flops_of_a_pass(subject, num_nodes):
    tree = subject.tree(num_nodes)
    verify_tree(subject.target, subject.cache, tree)
    with FlopCounterMode(display=False) as counted:
        verify_tree(subject.target, subject.cache, tree)
    return {str(op): flops for op, flops in counted.get_flop_counts()["Global"].items() if "mm" in str(op)}


def test_a_passs_arithmetic_is_linear_in_its_nodes_but_for_the_pairs_of_a_recurrence():
    """Exactly a·n + b·n²: a is the weights and the reads of the state, b pairs of nodes in recurrent layers."""
    target, sizes = hybrid(), (17, 33, 65, 129)
    subject = make_subject("random", target, 16)
    totals = [sum(flops_of_a_pass(subject, n).values()) for n in sizes]
    n, m = sizes[:2]
    b = (totals[1] / m - totals[0] / n) / (m - n)
    a = totals[0] / n - b * n
    assert [a * n + b * n * n for n in sizes] == totals
    config = target.config
    weights = sum(m.weight.numel() for m in target.modules() if isinstance(m, torch.nn.Linear))
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    num_recurrent = config.layer_types.count("linear_attention")
    assert a == 2 * weights + num_recurrent * 2 * 2 * state
    deeper = make_subject("random", hybrid(num_layers=8), 16)
    pairs = [sum(flops_of_a_pass(deeper, n).values()) / n for n in (17, 33)]
    assert (pairs[1] - pairs[0]) / (33 - 17) == 2 * b


def test_a_passs_arithmetic_outside_of_attention_does_not_depend_on_the_prompt():
    short, long = (flops_of_a_pass(make_subject("random", hybrid(), length), 33) for length in (16, 300))
    assert short == long


def copied_by_a_commit(make, num_prompt_tokens, path_length):
    """Bytes copied, and bytes that the attention layers' caches hold afterwards: their library concatenates."""
    subject = make_subject("random", make(), num_prompt_tokens)
    tree = subject.tree(17)
    path = tree.path(int(tree.depths.argmax()))[:path_length]
    verification = verify_tree(subject.target, subject.cache, tree)
    fork = fork_cache(subject.cache, clone_states=False)
    commit_path(subject.target, fork, verification, path)  # what happens once has happened
    fork = fork_cache(subject.cache, clone_states=False)
    with Counted() as counted:
        commit_path(subject.target, fork, verification, path)
    attention = [layer for layer in fork.layers if not is_recurrent(layer)]
    held = [t for layer in attention for t in layer_tensors(layer).values()]
    return counted.copied, sum(t.numel() * t.element_size() for t in held)


@pytest.mark.parametrize("make", [hybrid, dense])
def test_a_commit_copies_what_the_librarys_caches_concatenate_and_no_more_of_the_prompt(make):
    besides = set()
    for num_prompt_tokens in (16, 64, 300):
        copied, held = copied_by_a_commit(make, num_prompt_tokens, 3)
        besides.add(copied - held)
    assert len(besides) == 1  # rows of the path and recurrent states, whatever the prompt
    assert min(besides) > 0


def test_what_a_commit_copies_besides_grows_with_the_path_by_its_rows():
    besides = [copied - held for copied, held in (copied_by_a_commit(dense, 16, n) for n in (1, 2, 3))]
    config = dense().config
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert besides == [row, 2 * row, 3 * row]


class Forwards:
    """How often modules are called, beneath any hook."""

    def __init__(self, **modules):
        self.counts = dict.fromkeys(modules, 0)
        self.handles = [
            module.register_forward_pre_hook(self._counting(name)) for name, module in modules.items()
        ]

    def _counting(self, name):
        def count(*args):
            self.counts[name] += 1

        return count

    def __enter__(self):
        return self.counts

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()


@pytest.mark.parametrize("method", ["autoregressive", "dflash", "ddtree"])
def test_a_decode_is_a_prefill_and_a_forward_a_round(method):
    pair = random_pair()
    said = dict(tree_budget=9, max_new_tokens=20)
    dl.generate(pair, random_ids(7), method, **said)
    with Forwards(target=pair.target, head=pair.target.lm_head, first=pair.target.model.layers[0]) as counts:
        made = dl.generate(pair, random_ids(7), method, **said)
    drafts = sum(r.num_drafted > 0 for r in made.rounds)  # their logits come from the target's head
    forwards = 1 + made.num_rounds
    assert counts == {"target": forwards, "head": forwards + drafts, "first": forwards}


def test_paths_are_a_forward_for_sixteen_leaves_and_one_to_commit():
    subject = make_subject("random", hybrid(), 16)
    tree = subject.tree(65)
    verify_tree(subject.target, subject.cache, tree, "paths")
    with Forwards(target=subject.target) as counts:
        verification = verify_tree(subject.target, subject.cache, tree, "paths")
        assert counts["target"] == math.ceil(len(tree.leaves()) / PATHS_PER_PASS) > 1
        commit_path(subject.target, fork_cache(subject.cache, clone_states=False), verification, [0])
    assert counts["target"] == math.ceil(len(tree.leaves()) / PATHS_PER_PASS) + 1
