"""The loop around a port's four methods, as the doctor runs it: a round is a draft, a tree, a walk, a commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddtree_lab.sampling import Sampler
from ddtree_lab.stages.tree import DraftTree, build_tree
from ddtree_lab.stages.walk import walk_tree


@dataclass
class Decoded:
    """What a port's loop wrote.

    Args:
        token_ids: new tokens.
        num_accepted_drafts: of each round.
        num_drafted_depths: of each round: how many drafts it could have accepted.
    """

    token_ids: list[int] = field(default_factory=list)
    num_accepted_drafts: list[int] = field(default_factory=list)
    num_drafted_depths: list[int] = field(default_factory=list)

    @property
    def mean_emitted_tokens(self) -> float:
        """Accepted drafts and the bonus token, per round."""
        rounds = self.num_accepted_drafts
        return sum(rounds) / len(rounds) + 1 if rounds else 0.0


def decode_with(
    port: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    eos_token_ids: Iterable[int] = (),
    tree_budget: int = 32,
) -> Decoded:
    """Decode with a port's own draft, verify and commit.

    The last prompt token is the first anchor, so a port needs no logits from its prefill.

    Args:
        prompt: at least two tokens.
        tree_budget: drafted nodes a round; a port without `draft` verifies the anchor alone.
    """
    sampler = Sampler.from_settings(temperature, seed=seed)
    ends = frozenset(eos_token_ids)
    decoded = Decoded()
    text = list(prompt)
    state = port.prefill(torch.tensor([text[:-1]]))
    while len(decoded.token_ids) < max_new_tokens:
        tree = _drafted_tree(port, state, text[-1], tree_budget)
        logits = port.verify(state, tree)
        positions = (len(text) + tree.depths).tolist()
        walk = walk_tree(tree, sampler.choose(logits, positions))
        emitted = cut(walk.token_ids, max_new_tokens - len(decoded.token_ids), ends)
        decoded.num_accepted_drafts.append(len(walk.path) - 1)
        decoded.num_drafted_depths.append(tree.depth)
        decoded.token_ids += emitted
        text += emitted
        if emitted[-1] in ends or len(decoded.token_ids) >= max_new_tokens:
            break
        state = port.commit(state, walk.path)
    return decoded


def _drafted_tree(port: Any, state: Any, anchor: int, tree_budget: int) -> DraftTree:
    if not hasattr(port, "draft"):
        return DraftTree.from_parents([anchor], [-1])
    return build_tree(port.draft(state, anchor), tree_budget, anchor)


def cut(token_ids: Sequence[int], room: int, ends: frozenset[int]) -> list[int]:
    """A round's tokens up to the first end of sequence and to the room that is left."""
    kept: list[int] = []
    for token in token_ids[:room]:
        kept.append(token)
        if token in ends:
            break
    return kept
