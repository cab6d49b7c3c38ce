"""Weights that accelerate keeps elsewhere: on the CPU or on disk, `meta` until a hook brings them.

The hooks run around each module's `forward`. Whoever reads a weight himself, or asks a weight where
the computation happens, has to know of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


def _hooks(module: nn.Module) -> list[Any]:
    """What accelerate has hooked to a module: nothing, one hook, or those of a sequential hook."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def execution_device(module: nn.Module) -> torch.device:
    """Where a module that has weights of its own runs, which is not where an offloaded weight is."""
    if "_hf_hook" in vars(module):
        for hook in _hooks(module):
            if (device := getattr(hook, "execution_device", None)) is not None:
                return torch.device(device)
    weight = getattr(module, "weight", None)  # to look for any parameter takes ten times as long
    return next(module.parameters()).device if weight is None else weight.device


@contextmanager
def onloaded(module: nn.Module) -> Iterator[None]:
    """A module's own weights are readable inside, as in its forward, and back where they were afterwards."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, ())


@contextmanager
def pass_through(model: nn.Module) -> Iterator[None]:
    """What an offloaded model needs around a forward; nothing for any other.

    Short convolutions (`conv1d` of a recurrent layer) are read by the layer itself, not called, so their hooks do
    not run: the tree-structured ports would find no weights, and transformers before 5.13 computes nonsense
    without a word. They are small and stay for the whole pass. An exception leaves no weight behind, where
    accelerate's wrapper offloads after a forward that returns only.
    """
    if not _hooks(model):
        yield
        return
    try:
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if name.endswith(".conv1d"):
                    stack.enter_context(onloaded(module))
            yield
    except BaseException:
        for module in model.modules():
            own = [tensor for tensor in module.parameters(recurse=False) if not tensor.is_meta]
            for hook in _hooks(module) if own else ():
                if getattr(hook, "offload", False):
                    hook.post_forward(module, ())
        raise
