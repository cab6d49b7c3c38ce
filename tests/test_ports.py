"""Targets without a port: refused for a tree pass, exact by paths; and what registering a port takes."""

from dataclasses import dataclass

import pytest
import torch
from checks import alone, check_close, check_same_cache, check_untouched, filled_cache, path_ids, snapshot
from models import causal_lm, has_its_own_cache, hybrid, random_ids, random_tree
from torch import nn

from ddtree_lab.compat import get_state, set_state
from ddtree_lab.doctor.diagnose import diagnose
from ddtree_lab.doctor.port import TransformersPort
from ddtree_lab.ngram import NgramDrafter
from ddtree_lab.pair import Pair
from ddtree_lab.recurrent import ports
from ddtree_lab.recurrent.ports import find_port, find_recurrent_modules, register_port
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.support import tree_support
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.verify import verify_tree


@pytest.mark.parametrize("method", ["tree", "scan"])
@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "jamba", "lfm2", "mamba2", "olmo_hybrid"])
def test_a_tree_pass_without_a_port_is_refused_naming_what_paths_cost(family, method):
    target, tree = causal_lm(family), DraftTree.from_parents(range(6), [-1, 0, 0, 1, 1, 2])
    if has_its_own_cache(target):
        pytest.skip(f"{family} does not use the common cache in this version of transformers")
    cache = filled_cache(target, random_ids(9))
    before = snapshot(cache)
    with pytest.raises(ValueError, match=rf"method='{method}' would not be exact on .*layer 0") as refusal:
        verify_tree(target, cache, tree, method)
    assert "method='paths', which costs 3 batch rows and" in str(refusal.value)
    assert "register a port" in str(refusal.value)
    check_untouched(cache, before)


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
def test_positions_taken_from_the_cache_slot_are_found_by_the_trial_pass(family):
    target = causal_lm(family)
    assert tree_support(target).ok  # its layers alone look harmless
    cache = filled_cache(target, random_ids(9))
    with pytest.raises(ValueError, match=r"method='tree' would not be exact on .*trial"):
        verify_tree(target, cache, random_tree("bushy", 8), "tree")


def test_paths_pays_for_leaves_in_groups_and_stays_exact():
    target, ids, tree = causal_lm("jamba"), random_ids(6), random_tree("star", 41)
    found = verify_tree(target, filled_cache(target, ids), tree)
    assert len(tree.leaves()) > 2 * 16
    check_close(found.logits, alone(target, ids, tree), "paths in groups: jamba")


class LeakySum(nn.Module):
    """A toy recurrent mixer: s_t = λ s_{t-1} + W x_t, o_t = tanh(s_t)."""

    def __init__(self, hidden_size, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.project = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states, cache=None, cache_params=None, **kwargs):
        cache = cache if cache is not None else cache_params
        held = [] if cache is None else states_of(cache.layers[self.layer_idx])
        state = held[0][:, 0, 0] if held else torch.zeros_like(hidden_states[:, 0])
        outputs = []
        for x in self.project(hidden_states).unbind(1):
            state = 0.9 * state + x
            outputs.append(state.tanh())
        if cache is not None:
            # Some versions learn these two from the convolution, which a toy has not.
            vars(cache.layers[self.layer_idx]).update(dtype=state.dtype, device=state.device)
            cache.update_recurrent_state(state[:, None, None], self.layer_idx)
        return torch.stack(outputs, 1)


def states_of(layer):
    held = layer.recurrent_states
    held = list(held.values()) if isinstance(held, dict) else [held]
    return [tensor for tensor in held if tensor is not None]


@dataclass
class LeakyFactors:
    states: list

    def commit(self, layer, path):
        set_state(layer, "recurrent_states", self.states[path[-1]][None, None, None])


class LeakyPort:
    def forward(self, module, hidden_states, layer, topology, scan):
        states = []
        for x, parent in zip(module.project(hidden_states[0]), topology.parents, strict=True):
            before = get_state(layer, "recurrent_states")[0, 0, 0] if parent < 0 else states[parent]
            states.append(0.9 * before + x)
        return torch.stack(states).tanh()[None], LeakyFactors(states)


def toy_target():
    """A hybrid whose recurrent layers are toy mixers."""
    target = hybrid()
    for i, layer in enumerate(target.model.layers):
        if hasattr(layer, "linear_attn"):
            torch.manual_seed(i)
            layer.linear_attn = LeakySum(32, i).requires_grad_(False)
            layer.linear_attn.project.weight.mul_(3)
    return target


@pytest.fixture
def leaky_port(monkeypatch):
    monkeypatch.setattr(ports, "_PORTS", dict(ports._PORTS))
    register_port(LeakySum, LeakyPort())


def test_a_toy_mixer_without_a_port_runs_by_paths():
    target, ids, tree = toy_target(), random_ids(7), random_tree("bushy", 14)
    found = verify_tree(target, filled_cache(target, ids), tree)
    assert found.method == "paths"
    check_close(found.logits, alone(target, ids, tree), "toy mixer by paths")


@pytest.mark.usefixtures("leaky_port")
def test_a_toy_mixer_with_a_registered_port_runs_as_a_tree():
    target, ids, tree = toy_target(), random_ids(7), random_tree("bushy", 14)
    cache = filled_cache(target, ids)
    found = verify_tree(target, cache, tree)
    assert found.method == "tree"
    check_close(found.logits, alone(target, ids, tree), "toy mixer with a port")
    path = tree.path(13)
    commit_path(target, cache, found, path)
    check_same_cache(
        cache, filled_cache(target, torch.cat([ids, path_ids(tree, path)], 1)), "toy mixer's cache"
    )


@pytest.mark.usefixtures("leaky_port")
def test_a_wrong_port_is_found_by_the_trial_pass(monkeypatch):
    def chain(self, module, hidden_states, layer, topology, scan):
        nothing = LeakyFactors([])  # starts from nothing, ignores parents
        return LeakySum.forward(module, hidden_states), nothing

    target = toy_target()
    cache = filled_cache(target, random_ids(7))
    with monkeypatch.context() as patch:
        patch.setattr(LeakyPort, "forward", chain)
        assert verify_tree(target, cache, random_tree("bushy", 14)).method == "paths"
        with pytest.raises(ValueError, match=r"a trial tree pass .* differs from the paths alone"):
            verify_tree(target, cache, random_tree("bushy", 14), "tree")
        seen = verify_tree(target, cache, random_tree("bushy", 14), "tree", unchecked=True)
        assert seen.method == "tree"  # as the doctor looks at it
        with pytest.raises(AssertionError):
            check_close(seen.logits, alone(target, random_ids(7), random_tree("bushy", 14)), "a wrong port")
    register_port(LeakySum, LeakyPort())  # mended: the verdict is not kept
    assert verify_tree(target, cache, random_tree("bushy", 14)).method == "tree"


@pytest.mark.usefixtures("leaky_port")
def test_a_subclass_inherits_the_port_and_other_modules_have_none():
    class Sharper(LeakySum):
        pass

    assert isinstance(find_port(Sharper(4, 0)), LeakyPort)
    assert find_port(nn.Linear(2, 2)) is None
    assert sorted(find_recurrent_modules(hybrid(8))) == [0, 1, 2, 4, 5, 6]


def test_unchecked_does_not_make_up_for_a_missing_port():
    target = toy_target()
    with pytest.raises(ValueError, match="no tree-structured port"):
        verify_tree(
            target, filled_cache(target, random_ids(7)), random_tree("bushy", 6), "tree", unchecked=True
        )


class ForgetfulPort(LeakyPort):
    """Starts each tree from nothing instead of the committed state."""

    def forward(self, module, hidden_states, layer, topology, scan):
        states = [torch.zeros(32)]
        for x, parent in zip(module.project(hidden_states[0]), topology.parents, strict=True):
            states.append(0.9 * states[parent + 1] + x)
        return torch.stack(states[1:]).tanh()[None], LeakyFactors(states[1:])


@pytest.mark.usefixtures("leaky_port")
def test_the_doctor_is_silent_on_a_right_port_and_names_the_layers_of_a_wrong_one():
    pair = Pair(toy_target(), NgramDrafter(), name="toy")
    checks = ["layer_by_layer", "recurrent_states", "conv_windows", "first_draft"]
    report = diagnose(pair, TransformersPort(pair, "tree"), checks)
    assert report.ok
    assert {f.check for f in report.findings if f.status == "skipped"} == {"conv_windows"}  # a toy has none
    register_port(LeakySum, ForgetfulPort())
    report = diagnose(pair, TransformersPort(pair, "tree", unchecked=True), checks)
    found = {finding.check: finding for finding in report.findings}
    assert not report.ok
    assert found["layer_by_layer"].layers == found["recurrent_states"].layers == (0, 1, 2)


class GreedyFactors(LeakyFactors):
    """Commits the last node of the tree, whatever was accepted."""

    def commit(self, layer, path):
        super().commit(layer, [len(self.states) - 1])


@pytest.mark.usefixtures("leaky_port")
def test_a_wrong_commit_of_a_registered_port_is_not_blamed_on_another_layer():
    class CommitsEverything(LeakyPort):
        def forward(self, *args):
            outputs, factors = super().forward(*args)
            return outputs, GreedyFactors(factors.states)

    register_port(LeakySum, CommitsEverything())
    pair = Pair(toy_target(), NgramDrafter(), name="toy")
    report = diagnose(pair, TransformersPort(pair, "tree"), ["layer_by_layer", "recurrent_states"])
    one_pass, committed = report.findings
    assert one_pass.status == "ok"  # which is why the trial pass does not see it
    assert (committed.status, committed.layers, committed.bugs) == ("problem", (0, 1, 2), ())
