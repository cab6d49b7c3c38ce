"""Rehearse a pass on the meta device: what it would allocate, at real size, with nothing allocated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that come to life inside the block, and how many were alive at once.

    Args:
        existing: tensors from before; views of them cost nothing.
    """

    def __init__(self, existing: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in existing}

    @no_type_check  # called for every operation
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return out

    @no_type_check
    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)  # the address may be used again
        self.live -= num_bytes


class _FusedKernels(TorchFunctionMode):
    """Two operations as a real device's kernel allocates them: the output and nothing else.

    The meta device would decompose attention, with a score matrix that no fused kernel keeps, and it knows
    the grouped product of experts in bfloat16 only.
    """

    @no_type_check
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            query, _, value = args[:3]
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        if name in ("grouped_mm", "_grouped_mm"):
            rows, weight = args[:2]
            return rows.new_empty(rows.shape[0], weight.shape[-1])
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Rehearsal:
    """What a pass allocated.

    Args:
        result: what it returned.
        peak: most bytes alive at once.
        held: bytes still alive when it had returned, the result's own among them.
    """

    result: Any
    peak: int
    held: int

    @property
    def working(self) -> int:
        """Bytes that were only needed on the way."""
        return self.peak - self.held


@contextmanager
def without_weights() -> Iterator[None]:
    """Inside, a model on the meta device may be run, if its forward never looks at a value.

    Raises:
        ValueError: it does.
    """
    with torch.no_grad(), _FusedKernels():
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(f"this model cannot be run without weights ({error}).") from error


def rehearse(function: Callable[[], Any], existing: tuple[Tensor, ...] = ()) -> Rehearsal:
    """Run a pass whose tensors are on the meta device and count what it allocates.

    Args:
        existing: weights and caches that are there already.

    Raises:
        ValueError: the pass depends on the values of tensors, which the meta device does not have.
    """
    with without_weights(), LiveBytes(existing) as counted:
        result = function()
    return Rehearsal(result, counted.peak, counted.live)
