"""Oracles and comparisons: what a tree pass has to agree with, and how closely."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, PreTrainedModel

from ddtree_lab.compat import layer_tensors
from ddtree_lab.stages.cache import cache_length, make_cache
from ddtree_lab.stages.forward import prefill
from ddtree_lab.stages.tree import DraftTree

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # of logits brought to a standard deviation of 10
LARGEST_ERRORS: dict[str, float] = {}  # printed at the end of a run


class DoubleThroughout(TorchFunctionMode):
    """Inside, the library's own casts to float32 go to float64.

    Kernels, norms, rotary embeddings and routers of the library compute in float32 whatever the
    model's dtype, so a float64 model is exact to 1e-6 only. Only calls made by the library are changed:
    a cast to float32 in `ddtree_lab` still shows. `casts` counts the calls, to assert that it worked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _caller() == "transformers":
            if func is Tensor.float:
                self.casts += 1
                return args[0].double()
            if any(value is torch.float32 for value in (*args, *kwargs.values())):
                self.casts += 1
                args = tuple(_doubled(value) for value in args)
                kwargs = {name: _doubled(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _doubled(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _caller() -> str:
    """The package that made a torch call, torch's own frames left out."""
    frame = sys._getframe(2)
    while (package := frame.f_globals.get("__name__", "").partition(".")[0]) == "torch":
        frame = frame.f_back
    return package


class Counted(TorchDispatchMode):
    """Products and copied bytes."""

    def __init__(self):
        super().__init__()
        self.products = self.copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name()
        self.products += name in ("aten::mm", "aten::bmm", "aten::baddbmm", "aten::addmm")
        if name in (
            "aten::clone",
            "aten::_to_copy",
            "aten::cat",
            "aten::copy_",
            "aten::index_select",
            "aten::gather",
        ):
            self.copied += out.numel() * out.element_size()
        return out


def filled_cache(target: PreTrainedModel, ids: Tensor) -> Cache:
    cache = make_cache(target)
    prefill(target, ids, cache)
    return cache


def path_ids(tree: DraftTree, path: list[int]) -> Tensor:
    return torch.from_numpy(tree.token_ids[path])[None]


def alone(target: PreTrainedModel, ids: Tensor, tree: DraftTree) -> Tensor:
    """Logits at every node from the slowest obvious method: each path a text of its own, no cache."""
    logits: dict[int, Tensor] = {}
    for leaf in tree.leaves():
        path = tree.path(leaf)
        with torch.no_grad():
            out = target(input_ids=torch.cat([ids, path_ids(tree, path)], dim=1), use_cache=False).logits[0]
        for node, row in zip(path, out[ids.shape[1] :], strict=True):
            logits.setdefault(node, row)
    return torch.stack([logits[node] for node in range(tree.num_nodes)])


def error_by_node(found: Tensor, expected: Tensor) -> Tensor:
    """The largest difference in each row, in units that make the expected logits' deviation 10."""
    return (found - expected).abs().amax(-1) * 10 / expected.std()


def check_close(found: Tensor, expected: Tensor, label: str) -> None:
    assert found.dtype == expected.dtype
    error = float(error_by_node(found, expected).max())
    LARGEST_ERRORS[label] = max(error, LARGEST_ERRORS.get(label, 0.0))
    assert error <= TOLERANCE[expected.dtype], f"{label}: off by {error:.2g}"


def check_same_cache(found: Cache, expected: Cache, label: str = "") -> None:
    """Every tensor of every layer has the shape and the values of the other cache's.

    Without a label the error is not listed among the largest.
    """
    assert len(found.layers) == len(expected.layers)
    assert cache_length(found) == cache_length(expected)
    for i, (have, want) in enumerate(zip(found.layers, expected.layers, strict=True)):
        have_tensors, want_tensors = layer_tensors(have), layer_tensors(want)
        assert have_tensors.keys() == want_tensors.keys()
        for name, tensor in want_tensors.items():
            where = f"layer {i} {name}"
            assert have_tensors[name].shape == tensor.shape, where
            assert have_tensors[name].dtype == tensor.dtype, where
            error = float((have_tensors[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-6)) * 10
            if label:
                LARGEST_ERRORS[label] = max(error, LARGEST_ERRORS.get(label, 0.0))
            assert error <= TOLERANCE[tensor.dtype], f"{label}, {where}: off by {error:.2g}"


def snapshot(cache: Cache) -> list[dict[str, Any]]:
    """What `check_untouched` compares: the tensors, copies of their values, plain attributes."""
    return [
        {
            "layer": layer,
            "tensors": {name: (tensor, tensor.clone()) for name, tensor in layer_tensors(layer).items()},
            "attributes": {k: value for k, value in vars(layer).items() if isinstance(value, (int, str))},
            "names": set(vars(layer)),
        }
        for layer in cache.layers
    ]


def check_untouched(cache: Cache, before: list[dict[str, Any]]) -> None:
    """The very same layers with the very same tensors, and the values they had."""
    assert len(cache.layers) == len(before)
    for layer, was in zip(cache.layers, before, strict=True):
        assert layer is was["layer"]
        assert set(vars(layer)) == was["names"]
        now = layer_tensors(layer)
        assert now.keys() == was["tensors"].keys()
        for name, (tensor, values) in was["tensors"].items():
            assert now[name] is tensor, name
            assert torch.equal(tensor, values), name
        for name, value in was["attributes"].items():
            assert getattr(layer, name) == value, name


def state_of(model):
    """Everything of a model that a stage could leave changed."""
    return {
        "attributes": [
            (name, {key: id(value) for key, value in vars(module).items()})
            for name, module in model.named_modules()
        ],
        "hooks": [
            (name, hooks, len(getattr(module, hooks)))
            for name, module in model.named_modules()
            for hooks in vars(module)
            if hooks.endswith("_hooks")
        ],
        "tensors": [
            (name, id(t), t._version, t.clone()) for name, t in model.state_dict(keep_vars=True).items()
        ],
        "config": copy.deepcopy(model.config.to_dict()),
        "training": model.training,
        "class": [type(module) for module in model.modules()],
    }


def check_same_model(model, before):
    after = state_of(model)
    tensors = zip(before.pop("tensors"), after.pop("tensors"), strict=True)
    assert after == before
    for (name, *identity, values), (_, *identity_now, values_now) in tensors:
        assert identity_now == identity, name
        assert torch.equal(values_now, values), name
