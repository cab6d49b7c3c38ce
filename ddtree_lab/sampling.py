"""Choosing tokens: the same noise for the same seed and position, whatever the method.

A draw is the argmax of scores plus Gumbel noise (the Gumbel-max trick), and the noise of a
position depends on (seed, absolute position) alone. So a token drawn at a tree node equals the one plain
decoding would draw there, and every method gives identical text for a seed, sampled text included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

Prefix = Callable[[int], Sequence[int]]


@lru_cache(maxsize=64)
def gumbel_noise(seed: int, position: int, vocab_size: int) -> Float[Tensor, " vocab"]:
    """Standard Gumbel noise of one position. Drawn on the CPU, so that it is the same on every device."""
    mixed = int(np.random.SeedSequence([seed, position]).generate_state(1, np.uint64)[0])
    generator = torch.Generator().manual_seed(mixed)
    return -torch.empty(vocab_size).exponential_(generator=generator).log()


@dataclass(frozen=True)
class Sampler:
    """How a token is chosen from logits.

    Args:
        do_sample: draw, instead of taking the argmax.
        seed: of the noise.
        warpers: look at the scores only (temperature, top-k, top-p), all rows at once.
        processors: look at the text so far as well, so each row is given its own prefix.
    """

    do_sample: bool = False
    seed: int = 0
    warpers: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)

    @classmethod
    def from_settings(
        cls, temperature: float = 0.0, top_k: int | None = None, top_p: float | None = None, seed: int = 0
    ) -> Sampler:
        """Temperature 0 is greedy; the warpers and their order are the library's own.

        Raises:
            ValueError: a setting outside its range.
        """
        if not temperature >= 0:
            raise ValueError(
                f"temperature is {temperature}; give 0 for greedy decoding or a positive number."
            )
        if seed < 0:
            raise ValueError(f"seed is {seed}; give a number of 0 or more.")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k is {top_k}; give the number of tokens to keep, at least 1.")
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}; give a probability above 0 and up to 1.")
        if temperature == 0:
            return cls(seed=seed)
        warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
        if top_k is not None:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p is not None and top_p < 1:
            warpers.append(TopPLogitsWarper(float(top_p)))
        return cls(True, seed, warpers)

    def scores(
        self, logits: Float[Tensor, "row vocab"], prefix: Prefix | None = None
    ) -> Float[Tensor, "row vocab"]:
        """Logits after processors and warpers, in float32.

        Args:
            prefix: row → the text before the token to be chosen; needed by processors only.
        """
        scores = logits.float()
        if self.processors:
            assert prefix is not None
            rows = [torch.tensor([list(prefix(i))], device=logits.device) for i in range(len(logits))]
            scores = torch.cat(
                [self.processors(ids, scores[i : i + 1].clone()) for i, ids in enumerate(rows)]
            )
        if self.warpers:
            scores = self.warpers(torch.empty(len(logits), 0, dtype=torch.long, device=logits.device), scores)
        return scores

    def choose(
        self, logits: Float[Tensor, "row vocab"], positions: Sequence[int], prefix: Prefix | None = None
    ) -> list[int]:
        """A token for each row.

        Args:
            positions: absolute position of the token to be chosen; rows that compete for one position
                share its noise.
        """
        scores = self.scores(logits, prefix)
        if self.do_sample:
            noise = torch.stack([gumbel_noise(self.seed, int(p), logits.shape[-1]) for p in positions])
            scores = scores + noise.to(scores.device)
        # numpy's argmax is some ten times as fast as torch's on a CPU; both take the first of equals.
        return (scores.detach().numpy() if scores.device.type == "cpu" else scores).argmax(-1).tolist()
