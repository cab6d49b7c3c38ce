"""What the drafter's layers are put together of: the same numbers in fewer calls."""

from __future__ import annotations

import pytest
import torch
from checks import Counted
from torch.nn import functional as F

from ddtree_lab.drafter_layers import JoinedLinear, RMSNorm, rms_norm


@pytest.mark.parametrize("shape", [(2, 3, 128), (5, 32), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e6])
def test_the_norm_is_the_librarys(shape, dtype, scale):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    ours, theirs = (kind(shape[-1], eps=1e-6, dtype=dtype) for kind in (RMSNorm, torch.nn.RMSNorm))
    for module in (ours, theirs):
        module.weight.data = torch.linspace(-1, 2, shape[-1]).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x))


def test_the_norm_has_the_librarys_gradient_and_can_be_trained_after_inference():
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    weight = torch.linspace(-1, 2, 16)
    with torch.inference_mode():
        rms_norm(x, weight, 3e-5)  # makes what is kept
    gradients = []
    for function in (rms_norm, lambda x, weight, eps: F.rms_norm(x, (16,), weight, eps)):
        given, factors = x.clone().requires_grad_(), weight.clone().requires_grad_()
        function(given, factors, 3e-5).square().sum().backward()
        gradients.append((given.grad, factors.grad))
    torch.testing.assert_close(*gradients)


def linears(*sizes, bias=False, seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Linear(8, size, bias=bias).requires_grad_(False) for size in sizes]


ROWS = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2))


def products(function):
    """What a call gives, and by how many matrix products."""
    with torch.no_grad(), Counted() as counted:
        out = function()
    return out, counted.products


def test_joined_layers_are_one_product_and_give_what_each_gives():
    layers, alone = linears(4, 2, 6), linears(4, 2, 6)
    joined = JoinedLinear(layers)
    for found, expected in zip(layers, alone, strict=True):
        assert torch.equal(found.weight, expected.weight)
    found, count = products(lambda: joined(ROWS))
    assert count == 1
    torch.testing.assert_close(found, torch.cat([layer(ROWS) for layer in alone], dim=-1))
    layers[1].weight.mul_(2)  # seen: it is a view
    found, count = products(lambda: joined(ROWS))
    assert count == 1
    torch.testing.assert_close(found, torch.cat([layer(ROWS) for layer in layers], dim=-1))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight * 2, requires_grad=False)),
        lambda layer: setattr(layer.weight, "data", layer.weight.data.clone() * 2),
        lambda layer: layer.register_forward_hook(lambda module, args, out: out * 2),
        lambda layer: layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        lambda layer: setattr(layer, "forward", lambda x: F.linear(x, layer.weight) * 2),
    ],
    ids=["another parameter", "other data", "hook", "hook before", "another forward"],
)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_joined_layer_that_is_changed_is_called_for_itself(change, which):
    layers = linears(4, 2, 6)
    joined = JoinedLinear(layers)
    before = joined(ROWS).split([4, 2, 6], dim=-1)
    change(layers[which])
    found = joined(ROWS).split([4, 2, 6], dim=-1)
    for i in range(3):
        torch.testing.assert_close(found[i], before[i] * (2 if i == which else 1))


def test_joined_layers_can_be_trained():
    layers, alone = linears(4, 2), linears(4, 2)
    joined = JoinedLinear(layers)
    gradients = []
    for parts, function in (
        (layers, joined),
        (alone, lambda x: torch.cat([layer(x) for layer in alone], dim=-1)),
    ):
        for layer in parts:
            layer.requires_grad_()
        function(ROWS).square().sum().backward()
        gradients.append([layer.weight.grad for layer in parts])
    torch.testing.assert_close(*gradients)
