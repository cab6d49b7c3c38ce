"""The recurrences written down as they are defined, one node at a time.

Slow and obvious on purpose: `gated_delta` and `conv` are tested against these, and
`verify_tree(..., method="scan")` runs a whole pass on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree_lab.recurrent.gated_delta import DeltaFactors


def tree_scan(
    queries: Float[Tensor, "key_head node key_dim"],
    keys: Float[Tensor, "key_head node key_dim"],
    values: Float[Tensor, "head node value_dim"],
    log_decay: Float[Tensor, "head node"],
    beta: Float[Tensor, "head node"],
    state: Float[Tensor, "head key_dim value_dim"],
    parents: Sequence[int],
) -> tuple[Float[Tensor, "head node value_dim"], DeltaFactors]:
    """The gated delta rule node by node: take the parent's state, decay it, write, read.

    Keeps a state per node, which is what makes it simple and what makes it expensive.
    """
    groups = len(values) // len(keys)  # each key head serves that many value heads
    q, k = (x.repeat_interleave(groups, 0) for x in (queries, keys))
    states: list[Tensor] = []
    log_decays: list[Tensor] = []
    updates, outputs = [], []
    for i, parent in enumerate(parents):
        before = state.to(values.dtype) if parent < 0 else states[parent]  # (H, d_k, d_v)
        decayed = before * log_decay[:, i].exp()[:, None, None]
        recalled = torch.einsum("hkv,hk->hv", decayed, k[:, i])
        update = beta[:, i, None] * (values[:, i] - recalled)
        states.append(decayed + torch.einsum("hk,hv->hkv", k[:, i], update))
        outputs.append(torch.einsum("hkv,hk->hv", states[i], q[:, i]))
        updates.append(update)
        log_decays.append(log_decay[:, i] + (0 if parent < 0 else log_decays[parent]))
    factors = DeltaFactors(keys, torch.stack(updates, 1), torch.stack(log_decays, 1), state)
    return torch.stack(outputs, 1), factors


def tree_conv_scan(
    inputs: Float[Tensor, "node channel"],
    window: Float[Tensor, "channel kernel"],
    weight: Float[Tensor, "channel kernel"],
    bias: Float[Tensor, " channel"] | None,
    parents: Sequence[int],
) -> Float[Tensor, "node channel"]:
    """The causal depthwise convolution node by node, each with its own sliding window."""
    windows: list[Tensor] = []
    outputs = []
    for i, parent in enumerate(parents):
        before = window if parent < 0 else windows[parent]
        windows.append(torch.cat([before[:, 1:], inputs[i, :, None]], dim=1))
        out = (windows[i] * weight).sum(-1)
        outputs.append(out if bias is None else out + bias)
    return torch.stack(outputs)
