"""Weights that accelerate keeps elsewhere: on the CPU or on disk, `meta` until a hook brings them.

The hooks run around each module's `forward`. Whoever reads a weight himself, or asks a weight where
the computation happens, has to know of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def _hooks(module: nn.Module) -> list[Any]:
    """What accelerate has hooked to a module: nothing, one hook, or those of a sequential hook."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def execution_device(module: nn.Module) -> torch.device:
    """Where a module that has weights of its own runs, which is not where an offloaded weight is."""
    devices = (getattr(hook, "execution_device", None) for hook in _hooks(module))
    found = next((device for device in devices if device is not None), None)
    return next(module.parameters()).device if found is None else torch.device(found)


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
def offloaded_again(model: nn.Module) -> Iterator[None]:
    """An exception inside leaves no weight behind: accelerate's wrapper offloads after a forward that returns."""
    try:
        yield
    except BaseException:
        for module in model.modules():
            own = [tensor for tensor in module.parameters(recurse=False) if not tensor.is_meta]
            for hook in _hooks(module) if own else ():
                if getattr(hook, "offload", False):
                    hook.post_forward(module, ())
        raise
