"""The user's model leaves as it came: no patch, hook or config change, and nothing keeps it alive."""

import gc
import weakref

import pytest
import torch
from checks import check_same_model, filled_cache, state_of
from models import causal_lm, dense, hybrid, random_ids, random_tree, small_drafter_config, wrapped_hybrid

from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.recurrent.ports import replaced_forwards
from ddtree_lab.stages import support
from ddtree_lab.stages.cache import make_cache
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.draft import draft_block, extend_context
from ddtree_lab.stages.embedding import resolve_embeddings
from ddtree_lab.stages.forward import prefill
from ddtree_lab.stages.verify import verify_tree

METHODS = ["auto", "tree", "scan", "paths", "flattened"]
TARGETS = {
    "hybrid": hybrid,
    "wrapped": wrapped_hybrid,
    "window": lambda: dense(window=5),
    "jamba": lambda: causal_lm("jamba"),
    "bloom": lambda: causal_lm("bloom"),
}


class Fault(BaseException):
    """Neither the code under test nor the library catches it, like an interrupt."""


def one_round(target, method, drafter=None):
    """Every stage that touches a target, once."""
    embeddings = resolve_embeddings(target)
    taps = () if drafter is None else drafter.config.target_layer_ids
    cache = make_cache(target)
    out = prefill(target, random_ids(9), cache, taps)
    if drafter is not None:
        draft_block(drafter, embeddings, extend_context(drafter, out.taps[0]), 5)
    tree = random_tree("bushy", 12)
    commit_path(target, cache, verify_tree(target, cache, tree, method, tap_layer_ids=taps), tree.path(11))


def runnable(name, method):
    """The method, or `"paths"` where the target refuses it."""
    refused = {"jamba": ("tree", "scan"), "bloom": ("tree", "scan", "flattened")}
    return "paths" if method in refused.get(name, ()) else method


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_round_leaves_the_target_as_it_was(name, method):
    target = TARGETS[name]()
    before = state_of(target)
    one_round(target, runnable(name, method))
    check_same_model(target, before)


@pytest.mark.parametrize("method", METHODS)
def test_taps_leave_no_hook_also_after_an_exception(method):
    target, tree = hybrid(), random_tree("bushy", 12)
    cache = filled_cache(target, random_ids(9))
    verify_tree(target, cache, tree, method)
    before = state_of(target)
    verify_tree(target, cache, tree, method, tap_layer_ids=[0, 2])
    check_same_model(target, before)
    before = state_of(target)
    with pytest.MonkeyPatch.context() as patch:
        fail_in(patch, target.model.layers[3].mlp, Fault())
        with pytest.raises(Fault):
            verify_tree(target, cache, tree, method, tap_layer_ids=[0, 2])
    check_same_model(target, before)


def test_a_round_leaves_the_drafter_as_it_was():
    drafter = DFlashDrafter(small_drafter_config()).eval()
    drafter.config_before = drafter.config.to_dict()
    names = [(name, set(vars(module))) for name, module in drafter.named_modules()]
    versions = [(name, tensor._version) for name, tensor in drafter.named_parameters()]
    one_round(hybrid(), "tree", drafter)
    assert [(name, set(vars(module))) for name, module in drafter.named_modules()] == names
    assert [(name, tensor._version) for name, tensor in drafter.named_parameters()] == versions
    assert drafter.config.to_dict() == drafter.config_before


def fail_in(monkeypatch, module, error):
    """Make a module of the target raise when it is called."""

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(module, "forward", fail)


@pytest.mark.parametrize("error", [Fault(), RuntimeError("boom")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["hybrid", "window"])
def test_an_exception_while_verifying_leaves_the_target_as_it_was(name, method, error):
    target = TARGETS[name]()
    cache, method = filled_cache(target, random_ids(9)), runnable(name, method)
    verify_tree(target, cache, random_tree("bushy", 12), method)  # the trial pass is behind us
    before = state_of(target)
    with pytest.MonkeyPatch.context() as patch:
        fail_in(patch, target.model.layers[2], error)
        with pytest.raises(type(error)):
            verify_tree(target, cache, random_tree("bushy", 12), method)
    check_same_model(target, before)


@pytest.mark.parametrize("stage", ["prefill", "trial pass", "commit", "draft"])
def test_an_exception_in_another_stage_leaves_the_target_as_it_was(stage):
    target, tree = hybrid(), random_tree("bushy", 12)
    cache = filled_cache(target, random_ids(9))
    verification = verify_tree(target, cache, tree, "paths")
    drafter, embeddings = DFlashDrafter(small_drafter_config()), resolve_embeddings(target)
    context = extend_context(drafter, torch.zeros(3, 64))
    before = state_of(target)
    run = {
        "prefill": lambda: prefill(target, random_ids(4), make_cache(target)),
        "trial pass": lambda: verify_tree(target, cache, tree, "tree"),
        "commit": lambda: commit_path(target, cache, verification, tree.path(11)),
        "draft": lambda: draft_block(drafter, embeddings, context, 5),
    }[stage]
    with pytest.MonkeyPatch.context() as patch:
        fail_in(patch, target.model.layers[3] if stage != "draft" else target.lm_head, Fault())
        with pytest.raises(Fault):
            run()
    check_same_model(target, before)


def test_an_exception_in_a_port_leaves_the_target_as_it_was(monkeypatch):
    target, tree = hybrid(), random_tree("bushy", 12)
    cache = filled_cache(target, random_ids(9))
    verify_tree(target, cache, tree)
    before = state_of(target)

    def fail(*args, **kwargs):
        raise Fault

    monkeypatch.setattr("ddtree_lab.recurrent.ports.tree_delta_rule", fail)
    with pytest.raises(Fault):
        verify_tree(target, cache, tree)
    check_same_model(target, before)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_what_says_nothing_about_the_target_is_not_remembered_as_a_verdict(fault):
    target, tree = hybrid(), random_tree("bushy", 12)
    cache = filled_cache(target, random_ids(9))
    with pytest.MonkeyPatch.context() as patch:
        fail_in(patch, target.model.layers[3], fault())
        with pytest.raises(fault):
            verify_tree(target, cache, tree)
    assert verify_tree(target, cache, tree).method == "tree"


def use_and_drop(name, method):
    """A target that has been used, and a verification of it that is kept."""
    target = TARGETS[name]()
    one_round(target, method)
    verification = verify_tree(target, filled_cache(target, random_ids(9)), random_tree("bushy", 12), method)
    return weakref.ref(target), verification


def use_until_it_fails(name, method):
    target = TARGETS[name]()
    cache = filled_cache(target, random_ids(9))
    with pytest.MonkeyPatch.context() as patch:
        fail_in(patch, target.model.layers[2], Fault())
        with pytest.raises(Fault):
            verify_tree(target, cache, random_tree("bushy", 12), method)
    return weakref.ref(target), None


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("name", ["hybrid", "jamba"])
@pytest.mark.parametrize("use", [use_and_drop, use_until_it_fails])
def test_a_target_is_collected_when_its_user_drops_it(use, name, method):
    known = len(support._probed)
    gc.freeze()  # what the other tests left: not to be searched through again
    alive, verification = use(name, runnable(name, method))
    gc.collect()
    gc.unfreeze()
    assert alive() is None
    assert len(support._probed) == known
    assert verification is None or verification.logits.isfinite().all()


def test_forwards_are_put_back_also_where_a_module_had_its_own():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return x

    plain, patched = Layer(), Layer()
    patched.forward = own = lambda x: -x

    def inside():
        with replaced_forwards({plain: lambda x: x + 1, patched: lambda x: x + 2}):
            assert (plain(1), patched(1)) == (2, 3)
            raise Fault

    with pytest.raises(Fault):
        inside()
    assert "forward" not in vars(plain)
    assert vars(patched)["forward"] is own
    assert (plain(1), patched(1)) == (1, -1)


def test_where_accelerate_has_wrapped_a_module_its_hooks_still_run():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Counting(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    target, tree, hook = hybrid(), random_tree("bushy", 12), Counting()
    cache = filled_cache(target, random_ids(9))
    expected = verify_tree(target, cache, tree).logits
    mixer = target.model.layers[0].linear_attn
    add_hook_to_module(mixer, hook)
    before = state_of(target)
    assert torch.equal(verify_tree(target, cache, tree).logits, expected)
    assert hook.calls == 1
    check_same_model(target, before)
    remove_hook_from_module(mixer)
