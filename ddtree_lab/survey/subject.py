"""A tiny target under examination: a text, the truth about it, and how closely it has to be met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ddtree_lab.stages.cache import make_cache
from ddtree_lab.stages.forward import prefill, run_target
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.verify import logits_scale

NOISE_FACTOR = 30.0  # a difference this many times the rounding noise is no rounding
NOISE_FLOOR = 1e-5  # of the logits' scale, for targets whose noise happens to be nil
MOST_NOISE = 1e-3  # of the scale; two cache-free forwards that differ more do not differ by rounding
SIGNAL = 10.0  # tolerances by which a wrong context has to show
SHORT, LONG = 5, 13  # committed tokens: below and above the tiny models' windows
TEXT = 24


@dataclass(frozen=True)
class Answer:
    """What was found.

    Args:
        verdict: `"yes"`, `"no"`, `"raises"` (with the exception in `detail`) or `"none"`: does not apply.
        error: the largest difference of logits from the truth, if some were compared.
    """

    verdict: str
    detail: str = ""
    error: float | None = None


class Subject:
    """A target, a text, and the truth about it."""

    def __init__(self, target: PreTrainedModel) -> None:
        self.target = target
        if not hasattr(target.get_input_embeddings(), "weight"):
            kind = type(target.get_input_embeddings()).__name__
            raise ValueError(f"its input embedding is a {kind}: no model of one stream of tokens")
        rows = target.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        low = 10 if rows >= 60 else 0  # special tokens come first and last
        tokens = (low + torch.randperm(2 * TEXT, generator=generator) % (rows - 2 * low)).tolist()
        # All different: equal tokens tie exactly in whatever an architecture selects by rank.
        self.text, self.others = tokens[:TEXT], tokens[TEXT:]
        self._truth: dict[tuple[int, ...], Tensor] = {}

    def truth(self, tokens: Sequence[int]) -> Float[Tensor, "token vocab"]:
        """Logits at each token of a text, from one forward without a cache."""
        key = tuple(tokens)
        if key not in self._truth:
            self._truth[key] = run_target(self.target, torch.tensor([key]), None).logits[0].float()
        return self._truth[key]

    def decoded(self, tokens: Sequence[int], start: int) -> Float[Tensor, " vocab"]:
        """Logits after a text by plain decoding: a prefill of its first tokens, then one token a forward."""
        cache = self.filled(start)
        return [self.run([token], cache) for token in tokens[start:]][-1][0]

    def judge(self, found: Tensor, texts: Sequence[Sequence[int]], start: int) -> Answer:
        """Compare logits after texts with the truth or, where the library's own decoding is off it, with that.

        Args:
            start: tokens that the cache held before the first round.
        """
        answer = self.compare(found, torch.stack([self.truth(text)[-1] for text in texts]))
        if answer.verdict == "yes":
            return answer
        as_decoded = self.compare(found, torch.stack([self.decoded(text, start) for text in texts]))
        if as_decoded.verdict == "yes":
            return replace(
                as_decoded, detail="as plain decoding, which differs from forwards without a cache"
            )
        return answer

    @cached_property
    def scale(self) -> float:
        return logits_scale(self.truth(self.text))

    @cached_property
    def noise(self) -> float:
        """How far the logits of a token differ when the text after it is left out: the control without a cache."""
        whole = self.truth(self.text)
        return max(
            float((self.truth(self.text[:n])[-1] - whole[n - 1]).abs().max()) for n in (1, SHORT, LONG, 18)
        )

    @cached_property
    def tolerance(self) -> float:
        return max(NOISE_FACTOR * self.noise, NOISE_FLOOR * self.scale)

    @cached_property
    def signal(self) -> float:
        """How far the logits move when one token of the recent context is another: the least of three places."""
        last = self.truth(self.text)[-1]
        moved = []
        for back in (2, 3, 5):
            changed = [*self.text]
            changed[-back] = self.others[-back]
            moved.append(float((self.truth(changed)[-1] - last).abs().max()))
        return min(moved)

    def filled(self, length: int) -> Cache:
        """A cache that holds the first tokens of the text."""
        cache = make_cache(self.target)
        prefill(self.target, torch.tensor([self.text[:length]]), cache)
        return cache

    def run(self, tokens: Sequence[int], cache: Cache) -> Float[Tensor, "token vocab"]:
        """The library's own cached forward."""
        return run_target(self.target, torch.tensor([list(tokens)]), cache).logits[0].float()

    def compare(self, found: Tensor, expected: Tensor) -> Answer:
        if found.shape != expected.shape:
            return Answer(
                "no", f"logits of shape {list(found.shape)} where {list(expected.shape)} were expected"
            )
        error = float((found.float() - expected).abs().nan_to_num(nan=float("inf")).max())
        return Answer("yes" if error <= self.tolerance else "no", error=error)

    def tree(self, start: int) -> DraftTree:
        """Nine nodes whose longest branch is the text; wrong branches come before right ones."""
        right, wrong = self.text[start:], self.others[start:]
        tokens = [right[0], wrong[1], right[1], wrong[2], right[2], wrong[3], right[3], right[4], wrong[4]]
        return DraftTree.from_parents(tokens, [-1, 0, 0, 2, 2, 4, 4, 6, 6])


RIGHT_PATH = [0, 2, 4, 6, 7]


def worst(answers: Sequence[Answer]) -> Answer:
    """The first that is not yes, or the one with the largest error."""
    bad = [answer for answer in answers if answer.verdict != "yes"]
    return bad[0] if bad else max(answers, key=lambda answer: answer.error or 0.0)
