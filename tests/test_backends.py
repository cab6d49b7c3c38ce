"""Attention back ends: which may be given a tree mask, and what is said and done where one may not."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from checks import filled_cache
from models import dense, hybrid, random_ids, random_tree, wrapped_hybrid

from ddtree_lab.compat import text_config
from ddtree_lab.stages.support import attention_backend, mask_refusal, resolve_method
from ddtree_lab.stages.verify import verify_tree

TARGETS = {"hybrid": hybrid, "wrapped": wrapped_hybrid, "dense": dense}
WITHOUT_MASK = [
    "flash_attention_2",
    "flash_attention_3",
    "kernels-community/flash-attn",
    "flex_attention",
    "paged|sdpa",
]


def no_trial(target):
    raise AssertionError("a pass was run")


def told(name, backend):
    """A target that says it uses a back end, and a cache filled before."""
    target = TARGETS[name]()
    cache = filled_cache(target, random_ids(9))
    text_config(target)._attn_implementation_internal = backend  # its setter asks for the package
    assert attention_backend(target) == backend
    return target, cache


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("backend", WITHOUT_MASK)
def test_a_back_end_without_tree_masks_is_refused_before_the_pass(name, backend):
    target, cache = told(name, backend)
    for method in ("tree", "scan", "flattened"):
        with pytest.raises(
            ValueError, match=r"attention takes no 4-D mask.*attn_implementation='sdpa'"
        ) as refusal:
            resolve_method(target, cache, random_tree("bushy", 8), method, no_trial)
        assert backend in str(refusal.value) and "register a port" not in str(refusal.value)
        target.lm_head.register_forward_pre_hook(no_trial)
        with pytest.raises(ValueError, match="takes no 4-D mask"):
            verify_tree(target, cache, random_tree("bushy", 8), method)
    assert resolve_method(target, cache, random_tree("bushy", 8), "auto", no_trial) == "paths"


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TARGETS)
def test_sdpa_and_eager_take_a_tree_and_agree(name, backend):
    target, ids, tree = TARGETS[name](), random_ids(9), random_tree("bushy", 12)
    expected = verify_tree(target, filled_cache(target, ids), tree, "paths").logits
    target.set_attn_implementation(backend)
    assert mask_refusal(target) == ""
    found = verify_tree(target, filled_cache(target, ids), tree)
    assert found.method == "tree"
    torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
def test_flash_attention_runs_by_paths():
    target = dense(torch.bfloat16).to("cuda")
    target.set_attn_implementation("flash_attention_2")
    found = verify_tree(target, filled_cache(target, random_ids(9)), random_tree("bushy", 12))
    assert found.method == "paths"
