"""The short causal convolution over a tree: a node's window is its own ancestors'.

With kernel size K a node sees itself and its last K − 1 ancestors, and where the path is shorter the
committed window. The readable twin is `naive.tree_conv_scan`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def tree_conv(
    inputs: Float[Tensor, "node channel"],
    window: Float[Tensor, "channel kernel"],
    weight: Float[Tensor, "channel kernel"],
    bias: Float[Tensor, " channel"] | None,
    columns: Int[Tensor, "node kernel"],
) -> Float[Tensor, "node channel"]:
    """Depthwise convolution of every node over its ancestor window.

    Args:
        inputs: pre-convolution activations of the nodes.
        window: the last K committed inputs, the newest last.
        columns: for each node the K columns of `[window, inputs]` it sees, oldest first
            (`TreeTopology.conv_columns`).
    """
    precise = torch.promote_types(inputs.dtype, torch.float32)  # converted once, not at every tap
    history = torch.cat([window.mT, inputs]).to(precise)  # (K + N, C)
    # A tap with gaps in memory would be multiplied five times as slowly.
    taps = weight.mT.to(precise).contiguous()  # (K, C)
    # One column of the windows after another: all at once they would be K times the inputs.
    out = history[window.shape[1] :] * taps[-1]  # a node's window ends with itself
    for column, tap in zip(columns.unbind(1)[:-1], taps, strict=False):
        out.addcmul_(history.index_select(0, column), tap)
    return (out if bias is None else out.add_(bias)).to(inputs.dtype)


def window_after(
    inputs: Float[Tensor, "node channels"],
    windows: Sequence[Float[Tensor, "_ kernel"]],
    path: Sequence[int] | Tensor,
) -> Float[Tensor, "channels kernel"]:
    """The committed window after a root path: its last K inputs, older ones from the window before.

    Args:
        inputs: of a layer's channels, or of several layers side by side.
        windows: of each of these layers, in that order.
    """
    kernel = windows[0].shape[1]
    nodes = torch.as_tensor(path, device=inputs.device)[-kernel:]
    # (C, P), no more of it than the window holds
    taken = inputs.index_select(0, nodes).mT.to(windows[0].dtype)
    if len(nodes) == kernel:
        return taken.contiguous()
    return torch.cat([torch.cat(list(windows)), taken], dim=1)[:, -kernel:]
