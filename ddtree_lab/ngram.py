"""A drafter that looks the end of the text up in the text itself: no training, no taps, any target.

Where the last tokens have occurred before, what followed them then is likely to follow now: the idea of
prompt-lookup decoding. Here every earlier occurrence counts, at every depth, so that a tree has something
to choose from. Depth d is the distribution of the token d positions after an occurrence, a marginal like a
DFlash drafter's.

Suffixes of several lengths are tried, and *stupid back-off* joins them (Brants et al. 2007, "Large Language
Models in Machine Translation", section 4): a token's score is its share among the followers of the longest
suffix that it has followed, times 0.4 for each length given up on the way there; scores are brought to a sum
of one at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ddtree_lab.stages.embedding import EmbeddingPath

BACKOFF = 0.4  # the value of the paper
Shares = list[dict[int, float]]  # depth − 1 → token → probability; as many depths as there is evidence for


@dataclass(frozen=True, eq=False)
class NgramContext:
    """The committed text but its anchor. A longer context is a new one; this one stays as it is."""

    token_ids: Int[np.ndarray, " rows"]

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"NgramContext(num_rows={self.num_rows})"


@dataclass(frozen=True)
class NgramDrafter:
    """Drafts what followed earlier occurrences of the text's last tokens.

    It drafts nothing where the last token is new: such a round is one step of plain decoding.

    Args:
        num_draft_positions: positions drafted at most; fewer where the occurrences are too close to the end.
        max_suffix: tokens of the longest suffix that is looked up.

    Raises:
        ValueError: either is below 1.

    Example:
        >>> NgramDrafter(num_draft_positions=2).shares([1, 2, 3, 1])
        [{2: 1.0}, {3: 1.0}]
    """

    num_draft_positions: int = 10
    max_suffix: int = 4

    def __post_init__(self) -> None:
        for name in ("num_draft_positions", "max_suffix"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1.")

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        """None: it reads the text, not the target."""
        return ()

    def remember(
        self,
        token_ids: Sequence[int],
        taps: Float[Tensor, "rows taps_width"] | None = None,
        context: NgramContext | None = None,
    ) -> NgramContext:
        """The context with newly committed tokens appended; `context` stays as it was."""
        known = [] if context is None else [context.token_ids]
        return NgramContext(np.concatenate([*known, np.asarray(token_ids, dtype=np.int64)]))

    def propose(
        self, context: NgramContext, anchor_token_id: int, embeddings: EmbeddingPath
    ) -> Float[Tensor, "depth vocab"]:
        """Log-probabilities of the positions after the anchor; -inf for a token that never stood there."""
        shares = self.shares(np.append(context.token_ids, anchor_token_id))
        logits = torch.full((len(shares), embeddings.vocab_size), -torch.inf)
        for row, share in zip(logits, shares, strict=True):
            row[list(share)] = torch.tensor(list(share.values())).log()
        return logits

    def shares(self, token_ids: Sequence[int] | Int[np.ndarray, " token"]) -> Shares:
        """Probabilities of the tokens that may follow a text, by depth.

        A scan by whole arrays and no index: below a millisecond for thousands of tokens, less than any
        target's pass over them, and the context stays a plain immutable value.
        """
        text = np.asarray(token_ids, dtype=np.int64)
        lengths = _matching_suffix(text, self.max_suffix)
        ends = np.flatnonzero(lengths)
        shares: Shares = []
        for depth in range(1, self.num_draft_positions + 1):
            ends = ends[ends + depth < len(text)]
            if not len(ends):
                break
            shares.append(_backed_off(text[ends + depth], lengths[ends], self.max_suffix))
        return shares


def _matching_suffix(text: Int[np.ndarray, " token"], most: int) -> Int[np.ndarray, " earlier"]:
    """For each position but the last, how many tokens up to it equal the text's last ones, `most` at most."""
    lengths = np.zeros(max(0, len(text) - 1), dtype=np.int64)
    matches = np.ones(len(lengths), dtype=bool)
    for back in range(min(most, len(lengths))):
        matches[:back] = False
        matches[back:] &= text[: len(lengths) - back] == text[-1 - back]
        lengths += matches
    return lengths


def _backed_off(
    followers: Int[np.ndarray, " occurrence"], lengths: Int[np.ndarray, " occurrence"], most: int
) -> dict[int, float]:
    """Each follower's probability, given how long a suffix matched where it stood."""
    tokens, which = np.unique(followers, return_inverse=True)
    longest = np.zeros(len(tokens), dtype=np.int64)
    np.maximum.at(longest, which, lengths)
    counts = np.bincount(which, weights=lengths == longest[which])
    totals = np.bincount(lengths, minlength=most + 1)[::-1].cumsum()[::-1]  # [n]: matches of n tokens or more
    scores = BACKOFF ** (most - longest) * counts / totals[longest]
    return dict(zip(tokens.tolist(), (scores / scores.sum()).tolist(), strict=True))


def shares_naive(text: list[int], num_draft_positions: int, max_suffix: int) -> Shares:
    """`NgramDrafter.shares`, spelled out: every suffix, longest first, against every place in the text."""
    shares: Shares = []
    for depth in range(1, num_draft_positions + 1):
        scores: dict[int, float] = {}
        for n in range(min(max_suffix, len(text)), 0, -1):
            followers = Counter(
                text[end + depth - 1]
                for end in range(n, len(text) - depth + 1)
                if text[end - n : end] == text[-n:]
            )
            for token, count in followers.items():
                scores.setdefault(token, BACKOFF ** (max_suffix - n) * count / followers.total())
        if not scores:
            break
        total = sum(scores.values())
        shares.append({token: score / total for token, score in scores.items()})
    return shares
