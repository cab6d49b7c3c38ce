"""How many of the processor's threads a model is worth."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Below this an operation is shorter than handing half of it to another thread, and threads that wait for a core which
# another program has keep spinning: with one of two cores busy the doctor took 12 s on one thread, 62 s on two.
SMALL_MODEL = 30_000_000  # parameters


@contextmanager
def fitting_threads(model: nn.Module) -> Iterator[None]:
    """One thread for a small model on the CPU; `OMP_NUM_THREADS`, where it is set, is kept to."""
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and _is_small(model):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_small(model: nn.Module) -> bool:
    parameters = list(model.parameters())
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    return on_cpu and sum(parameter.numel() for parameter in parameters) < SMALL_MODEL
