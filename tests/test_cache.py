import inspect

import pytest
import torch
from checks import check_untouched, filled_cache, snapshot
from models import causal_lm, dense, has_its_own_cache, hybrid, random_ids, random_tree, wrapped_hybrid
from transformers import DynamicCache, StaticCache

from ddtree_lab.stages.cache import cache_length, check_cache, describe_cache, fork_cache, make_cache
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.forward import prefill, run_target
from ddtree_lab.stages.mask import build_mask
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.verify import verify_tree

METHODS = ["auto", "tree", "scan", "paths", "flattened"]


@pytest.mark.parametrize("make", [hybrid, wrapped_hybrid], ids=["text", "wrapped"])
def test_a_hybrids_cache_has_a_layer_of_the_right_kind_for_every_layer(make):
    report = describe_cache(make())
    assert [layer.kind for layer in report.layers] == ["linear_attention"] * 3 + ["full_attention"]
    assert [layer.rollback for layer in report.layers] == ["snapshot"] * 3 + ["crop"]
    assert (report.seq_length, report.num_bytes, report.is_croppable) == (0, 0, False)


def test_sliding_layers_cannot_be_cropped_and_full_ones_can():
    report = describe_cache(dense(window=5))
    assert [layer.kind for layer in report.layers] == ["full_attention", "sliding_attention"] * 2
    assert [layer.rollback for layer in report.layers] == ["crop", "snapshot"] * 2
    assert describe_cache(dense()).is_croppable
    assert not report.is_croppable


def test_a_filled_cache_is_described_with_what_it_holds():
    target = hybrid()
    cache = filled_cache(target, random_ids(7))
    report = describe_cache(cache)
    state, conv, keys = 4 * 8 * 12 * 4, (2 * 2 * 8 + 4 * 12) * 4 * 4, 2 * 7 * 16 * 4
    assert [layer.num_bytes for layer in report.layers] == [state + conv] * 3 + [2 * keys]
    assert report.seq_length == 7
    assert report.num_bytes == sum(layer.num_bytes for layer in report.layers)
    assert "7 tokens" in repr(report)


def test_only_models_and_caches_can_be_described():
    with pytest.raises(TypeError, match="target_or_cache is a int"):
        inspect.unwrap(describe_cache)(3)  # past the type checker that runs with the tests


@pytest.mark.parametrize("past", [1, 4, 5, 6, 40])
def test_length_counts_committed_tokens_beyond_the_window_too(past):
    for target in (dense(window=5), hybrid(), causal_lm("mistral")):
        assert cache_length(filled_cache(target, random_ids(past))) == past


def test_length_of_a_target_without_attention_is_unknown():
    target = causal_lm("mamba2")
    if has_its_own_cache(target):
        with pytest.raises(ValueError, match="left the cache empty"):
            filled_cache(target, random_ids(5))
    else:
        assert cache_length(filled_cache(target, random_ids(5))) == 0


TARGETS = {
    "hybrid": hybrid,
    "dense": dense,
    "window": lambda: dense(window=5),
    "jamba": lambda: causal_lm("jamba"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["hybrid", "dense", "window"])
def test_verifying_leaves_the_cache_as_it_was(name, method):
    target = TARGETS[name]()
    cache = filled_cache(target, random_ids(9))
    before = snapshot(cache)
    first = verify_tree(target, cache, random_tree("bushy", 12), method)
    check_untouched(cache, before)
    second = verify_tree(target, cache, random_tree("bushy", 12), method)
    check_untouched(cache, before)
    assert torch.equal(first.logits, second.logits)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["hybrid", "dense", "window", "jamba"])
def test_verifying_leaves_the_cache_as_it_was_when_a_layer_raises(name, method, monkeypatch):
    if name == "jamba" and method in ("tree", "scan"):
        method = "auto"
    target = TARGETS[name]()
    cache = filled_cache(target, random_ids(9))
    verify_tree(target, cache, random_tree("bushy", 12), method)  # its trial pass is behind us
    before = snapshot(cache)

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(target.get_output_embeddings(), "forward", fail)
    with pytest.raises(KeyboardInterrupt):
        verify_tree(target, cache, random_tree("bushy", 12), method)
    check_untouched(cache, before)


def check_refused(target, cache, message, tree=None, **arguments):
    """Verifying raises with a sentence that names the argument, and changes nothing."""
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        verify_tree(target, cache, tree or random_tree("bushy", 8), **arguments)
    check_untouched(cache, before)


@pytest.mark.parametrize("method", METHODS)
def test_an_unsuitable_cache_is_refused(method):
    target = hybrid()
    no_config = r"cache is empty\. It was made without the target's config"
    check_refused(target, make_cache(target), "cache is empty", method=method)
    check_refused(target, DynamicCache(), no_config, method=method)
    for other, message in [
        (dense(), "cache layer 0 is a DynamicLayer"),
        (hybrid(8), "cache has 8 layers, the target has 4"),
    ]:
        check_refused(target, filled_cache(other, random_ids(4)), message, method=method)
    check_refused(dense(), filled_cache(dense(window=5), random_ids(4)), "cache layer 1 is a", method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: hybrid(value_heads=2), r"cache layer 0 holds conv_states.* of \[56, 4\] .*are \[80, 4\]"),
        (lambda: hybrid(kernel=5), r"cache layer 0 holds conv_states.* of \[80, 5\] .*are \[80, 4\]"),
        (lambda: hybrid(head_dim=8), r"cache layer 3 holds keys of \[2, 8\] .*are \[2, 16\]"),
    ],
    ids=["value heads", "kernel", "width of a head"],
)
def test_a_cache_filled_by_a_model_of_other_sizes_is_refused(other, message, method):
    target = hybrid()
    filled_cache(target, random_ids(4))
    check_refused(target, filled_cache(other(), random_ids(4)), f"{message}.*another model", method=method)


def test_the_kinds_of_a_cache_are_found_once_a_model(monkeypatch):
    target, made = hybrid(), []
    cache = filled_cache(target, random_ids(4))
    verify_tree(target, cache, random_tree("bushy", 8))
    monkeypatch.setattr("ddtree_lab.stages.cache.make_cache", lambda target: made.append(target))
    verification = verify_tree(target, cache, random_tree("bushy", 8))
    commit_path(target, cache, verification, [0])
    assert not made


def test_a_static_cache_is_refused():
    target = dense()
    cache = StaticCache(config=target.config, max_cache_len=32)
    run_target(target, random_ids(4), cache)
    check_refused(target, cache, "cache layer 0 is a StaticLayer")
    with pytest.raises(ValueError, match="cache layer 0 is a StaticLayer"):
        prefill(target, random_ids(4), StaticCache(config=target.config, max_cache_len=32))


def test_a_bare_cache_is_refused_by_the_prefill_of_a_hybrid():
    target = hybrid()
    with pytest.raises(ValueError, match="cache has no layers"):
        prefill(target, random_ids(4), DynamicCache())
    filled_for_dense = filled_cache(dense(), random_ids(4))
    with pytest.raises(ValueError, match="cache layer 0"):
        prefill(target, random_ids(4), filled_for_dense)


def test_what_is_no_cache_is_refused():
    with pytest.raises(TypeError, match="cache is a tuple"):
        check_cache(hybrid(), ((), ()))


@pytest.mark.parametrize("method", ["best", "", "TREE"])
def test_an_unknown_method_is_refused(method):
    target = hybrid()
    check_refused(target, filled_cache(target, random_ids(4)), "method is ", method=method)


@pytest.mark.parametrize("token", [-1, 97, 10**6])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_outside_the_vocabulary_are_refused(token, method):
    target = hybrid()
    tree = DraftTree.from_parents([1, 2, token, 3], [-1, 0, 0, 1])
    check_refused(
        target, filled_cache(target, random_ids(4)), f"tree has token id {token}", tree, method=method
    )


def test_a_mask_that_does_not_fit_is_refused():
    target, tree = dense(window=5), random_tree("bushy", 8)
    cache = filled_cache(target, random_ids(6))
    right = build_mask(tree, 6, windows=[5])
    for mask, message in [
        (build_mask(tree, 5, windows=[5]), "mask is for 8 nodes after 5 tokens"),
        (build_mask(random_tree("bushy", 9), 6, windows=[5]), "mask is for 9 nodes"),
        (build_mask(tree, 6, torch.float64, windows=[5]), "mask is torch.float64"),
        (build_mask(tree, 6), "mask has no windows"),
        (build_mask(tree, 6, windows=[4]), "mask has no windows"),
    ]:
        for method in ("auto", "tree", "scan", "flattened"):
            check_refused(target, cache, message, tree, mask=mask, method=method)
    found = verify_tree(target, cache, tree, mask=right)
    assert torch.equal(found.logits, verify_tree(target, cache, tree).logits)


def test_a_mask_given_is_the_mask_used():
    target, tree = dense(), random_tree("bushy", 8)
    cache = filled_cache(target, random_ids(6))
    chain = DraftTree.from_parents(tree.token_ids, range(-1, 7))
    wrong = verify_tree(target, cache, tree, mask=build_mask(chain, 6)).logits
    assert torch.equal(wrong, verify_tree(target, cache, chain).logits)
    assert not torch.equal(wrong, verify_tree(target, cache, tree).logits)


@pytest.mark.parametrize("shape", [(0,), (1, 0), (2, 3), (3,)])
def test_a_prompt_of_another_shape_is_refused(shape):
    target = hybrid()
    ids = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(Exception, match="input_ids"):
        prefill(target, ids, make_cache(target))


def test_a_prompt_in_two_parts_is_the_prompt():
    for target in (hybrid(), dense(window=5), causal_lm("jamba"), causal_lm("bamba")):
        ids = random_ids(30)
        cache = filled_cache(target, ids[:, :11])
        out = prefill(target, ids[:, 11:], cache)
        expected = prefill(target, ids, make_cache(target))
        torch.testing.assert_close(out.logits, expected.logits, rtol=0, atol=1e-3)


def test_a_fork_shares_keys_and_clones_states():
    cache = filled_cache(hybrid(), random_ids(5))
    fork, sharing = fork_cache(cache), fork_cache(cache, clone_states=False)
    assert fork.layers[3].keys is sharing.layers[3].keys is cache.layers[3].keys
    for layer, cloned, shared in zip(cache.layers[:3], fork.layers, sharing.layers, strict=False):
        assert type(cloned) is type(layer) and cloned is not layer
        for name in ("conv_states", "recurrent_states"):
            held, copied, same = (getattr(x, name) for x in (layer, cloned, shared))
            if isinstance(held, dict):
                held, copied, same = held[0], copied[0], same[0]
            assert copied is not held and torch.equal(copied, held)
            assert same is held


def test_a_verification_of_the_root_alone_is_a_decode_step():
    target, ids = hybrid(), random_ids(9)
    cache = filled_cache(target, ids)
    found = verify_tree(target, cache, DraftTree.from_parents([5], [-1]))
    commit_path(target, cache, found, [0])
    step = prefill(target, torch.cat([ids, torch.tensor([[5]])], dim=1), make_cache(target))
    torch.testing.assert_close(found.logits, step.logits[0], rtol=0, atol=1e-3)
    assert cache_length(cache) == 10
