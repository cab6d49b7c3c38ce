"""What a port's pass leaves behind, and how it becomes the states after a path.

A layer alone is committed by its factors' own `commit`. Gated DeltaNet layers are committed several at a time: heads
and channels do not look at each other, so those of layers of one shape are put side by side, as if they were one wide
layer. On a small model a layer costs the calls that it makes, and not what they compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree_lab.compat import get_state, set_state
from ddtree_lab.recurrent.conv import window_after
from ddtree_lab.recurrent.gated_delta import DeltaFactors

JOINED_BYTES = 2**24  # of states committed at once: beyond it the copies would be felt, and the calls are not


@runtime_checkable
class Factors(Protocol):
    """What a port's pass leaves for the commit."""

    def commit(self, layer: Any, path: Sequence[int] | Tensor) -> None:
        """Put the states after a root path into a cache layer, as new tensors."""


@dataclass(frozen=True, eq=False)
class GatedDeltaFactors:
    """Factors of a Gated DeltaNet layer: of its state, and the inputs of its convolution."""

    delta: DeltaFactors
    conv_inputs: Float[Tensor, "node channel"]

    def commit(self, layer: Any, path: Sequence[int] | Tensor) -> None:
        _commit_joined([self], [layer], torch.as_tensor(path))


def commit_factors(
    layers: Sequence[Any], factors: Mapping[int, Factors], path: Sequence[int] | Tensor
) -> None:
    """Put the states after a root path into the cache layers, as new tensors.

    Args:
        layers: of a cache; those that `factors` names are given new states.
        factors: layer index → what the pass left of that layer.
    """
    nodes = torch.as_tensor(path)
    alike: dict[tuple, list[tuple[GatedDeltaFactors, Any]]] = {}
    for i, left in factors.items():
        if isinstance(left, GatedDeltaFactors):
            alike.setdefault(_kind(left), []).append((left, layers[i]))
        else:
            left.commit(layers[i], nodes)
    for group in alike.values():
        at_once = max(1, JOINED_BYTES // group[0][0].delta.initial_state.nbytes)
        for start in range(0, len(group), at_once):
            together, their_layers = zip(*group[start : start + at_once], strict=True)
            _commit_joined(together, their_layers, nodes)


def _kind(left: GatedDeltaFactors) -> tuple:
    """What has to agree for layers to be put side by side."""
    state, inputs = left.delta.initial_state, left.conv_inputs
    return left.delta.keys.shape, state.shape, inputs.shape, state.dtype, inputs.dtype, state.device


def _commit_joined(factors: Sequence[GatedDeltaFactors], layers: Sequence[Any], nodes: Tensor) -> None:
    nodes = nodes.to(factors[0].conv_inputs.device)
    inputs = torch.cat([left.conv_inputs for left in factors], dim=1)  # (N, L · C)
    window = window_after(inputs, [get_state(layer, "conv_states")[0] for layer in layers], nodes)
    delta = DeltaFactors.joined([left.delta for left in factors])
    state = delta.state_after(nodes).to(delta.initial_state.dtype)  # (L · H, d_k, d_v)
    windows, states = (both[None].chunk(len(layers), dim=1) for both in (window, state))
    for layer, conv, recurrent in zip(layers, windows, states, strict=True):
        set_state(layer, "conv_states", conv)
        set_state(layer, "recurrent_states", recurrent)
