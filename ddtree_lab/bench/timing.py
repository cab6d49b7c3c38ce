"""Times that can be compared: side by side in one process, interleaved, the median with its spread.

On a shared machine a second is not a second. What two calls have in common, they have in common at the
same moment, so the ratio of neighbours is what is reported and absolute times are context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ddtree_lab.costs import clock

Timed = Callable[[], Any]
Prepare = Callable[[], Timed]


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Any) -> Spread:
        low, median, high = np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high))

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


@dataclass(frozen=True)
class Timings:
    """Seconds of each call, `seconds[name][i]` and `seconds[other][i]` taken one after the other."""

    seconds: Mapping[str, tuple[float, ...]]

    def of(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def ratio(self, name: str, to: str) -> Spread:
        """How many times the seconds of `to`, neighbour by neighbour."""
        return Spread.of(np.divide(self.seconds[name], self.seconds[to]))


def interleaved(cases: Mapping[str, Prepare], repeats: int, warmups: int = 1) -> Timings:
    """Time calls in turns, each turn beginning with another one.

    Args:
        cases: name → what makes the call ready, untimed, and returns it.
    """
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmups, repeats):
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            call = cases[name]()
            began = clock()
            call()
            taken = clock() - began
            if turn >= 0:
                seconds[name].append(taken)
    return Timings({name: tuple(values) for name, values in seconds.items()})


def peak_bytes(call: Timed, there: tuple[torch.Tensor, ...] = ()) -> int:
    """The most that a call holds at once, beside the tensors that were there before."""
    from ddtree_lab.weightless.rehearsal import LiveBytes

    with LiveBytes(there) as counted:
        call()
    return counted.peak
