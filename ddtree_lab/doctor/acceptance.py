"""How many drafts are kept: counts of rounds, their mean with an interval, and shares by depth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Acceptance:
    """Accepted drafts of many rounds.

    Args:
        accepted: drafts kept, a number a round.
        depths: drafts that could have been kept.
    """

    accepted: tuple[int, ...]
    depths: tuple[int, ...]

    @property
    def emitted_tokens(self) -> float:
        """Accepted drafts and the bonus token, mean over rounds."""
        return float(np.mean(self.accepted)) + 1

    def interval(self) -> tuple[float, float]:
        """95 % of the mean emitted tokens over resampled rounds."""
        rng = np.random.default_rng(0)
        draws = rng.choice(np.asarray(self.accepted), size=(2000, len(self.accepted))).mean(1) + 1
        return float(np.percentile(draws, 2.5)), float(np.percentile(draws, 97.5))

    def by_depth(self) -> list[float]:
        """Share of rounds that keep the draft at depth d, of those that got there and had one."""
        shares = []
        for depth in range(1, max(self.depths, default=0) + 1):
            there = [
                a for a, d in zip(self.accepted, self.depths, strict=True) if a >= depth - 1 and d >= depth
            ]
            if not there:
                break
            shares.append(sum(a >= depth for a in there) / len(there))
        return shares
