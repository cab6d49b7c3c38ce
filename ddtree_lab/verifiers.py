"""Verifiers side by side: what each emits of a drafted round, and with what probability.

A verifier turns the target's distributions at the nodes of a draft into tokens. It is lossless if text made of its
rounds has the target's own distribution, whatever the drafter proposed.

* `tree_walk` draws the target's token at every node it reaches and follows it (DDTree, and `walk_tree` here).
* `sample_and_match` is the same on a chain.
* `chain_rejection` accepts a token *drawn from q* with probability min(1, p/q) and otherwise draws from what p has
  over q. With tokens that were not drawn from its q it is not lossless.
* `linear_chain_rejection` runs that down the nodes of a tree in storage order, as an engine does that drafts trees
  and verifies chains. Below the first node that is no child of the one before, its p belongs to another text.

Every choice a verifier makes goes through `draw`, so the same code is sampled from and enumerated. `decode` and
`session` use the tree walk only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from ddtree_lab.stages.tree import DraftTree

Probabilities = Float[np.ndarray, " outcome"]
Draw = Callable[[Probabilities], int]
Tokens = tuple[int, ...]
Target = Callable[[Tokens], Probabilities]  # text after the anchor → distribution of the next token
Law = dict[Tokens, float]


@dataclass(frozen=True, eq=False)
class DraftedRound:
    """What a verifier is given.

    Args:
        tree: the draft.
        target: p, the target's distribution after each node.
        draft: q, the drafter's distribution at each depth, depth 1 first.
    """

    tree: DraftTree
    target: Float[np.ndarray, "node vocab"]
    draft: Float[np.ndarray, "depth vocab"]

    @classmethod
    def of(cls, tree: DraftTree, target: Target, draft: Float[np.ndarray, "depth vocab"]) -> DraftedRound:
        """A round below a target that is a function of the text."""
        paths = [tuple(tree.token_ids[tree.path(node)[1:]].tolist()) for node in range(tree.num_nodes)]
        return cls(tree, np.stack([target(path) for path in paths]), draft)


Verifier = Callable[[DraftedRound, Draw], Tokens]


def tree_walk(drafted: DraftedRound, draw: Draw) -> Tokens:
    """Draw the target's token; while it is a child, go there and draw again. Lossless.

    Args:
        draw: distribution → index of the outcome.

    Returns:
        The emitted tokens: accepted drafts and one bonus token.
    """
    node: int | None = 0
    tokens: list[int] = []
    while node is not None:
        tokens.append(draw(drafted.target[node]))
        node = drafted.tree.children(node).get(tokens[-1])
    return tuple(tokens)


def sample_and_match(drafted: DraftedRound, draw: Draw) -> Tokens:
    """`tree_walk` on a chain: draw the target's token and stop at the first that the chain does not have. Lossless.

    Raises:
        ValueError: the draft branches.
    """
    _check_chain(drafted.tree, "sample_and_match")
    return tree_walk(drafted, draw)


def chain_rejection(drafted: DraftedRound, draw: Draw) -> Tokens:
    """Accept each token of a chain with probability min(1, p/q). Lossless if the chain was drawn from q.

    Raises:
        ValueError: the draft branches.
    """
    _check_chain(drafted.tree, "chain_rejection")
    return linear_chain_rejection(drafted, draw)


def linear_chain_rejection(drafted: DraftedRound, draw: Draw) -> Tokens:
    """`chain_rejection` down the nodes in storage order, whoever their parents are. Not lossless on a tree.

    `walk.linear_chain` is the same for tokens already chosen.
    """
    tree, tokens = drafted.tree, list[int]()
    for row, node in pairwise(range(tree.num_nodes)):
        token = int(tree.token_ids[node])
        p, q = drafted.target[row], drafted.draft[tree.depths[node] - 1]
        kept = min(1.0, p[token] / q[token]) if q[token] else 1.0
        if draw(np.array([kept, 1 - kept])):
            over = np.maximum(p - q, 0)
            return (*tokens, draw(over / over.sum()))
        tokens.append(token)
    return (*tokens, draw(drafted.target[-1]))


def _check_chain(tree: DraftTree, verifier: str) -> None:
    if not tree.is_chain:
        raise ValueError(f"drafted.tree branches; {verifier} takes chains, `tree_walk` takes any tree.")


def sampled(generator: np.random.Generator) -> Draw:
    """Draws from a generator."""
    return lambda p: int(np.searchsorted(np.cumsum(p), generator.random() * p.sum(), side="right"))


def draw_chain(draft: Float[np.ndarray, "depth vocab"], draw: Draw, root_token_id: int = 0) -> DraftTree:
    """A chain with a token drawn from the drafter at every depth, as `chain_rejection` wants it."""
    return chain_of([root_token_id, *(draw(q) for q in draft)])


def chain_of(token_ids: Sequence[int]) -> DraftTree:
    """A chain of these tokens, the root's first."""
    return DraftTree.from_parents(token_ids, range(-1, len(token_ids) - 1))


def point_masses(tree: DraftTree, vocab_size: int) -> Float[np.ndarray, "depth vocab"]:
    """The q of a chain that was not drawn: all on the chain's own tokens. With it p/q is lossless, and matches."""
    return np.eye(vocab_size)[tree.token_ids[1:]]


def emissions(verifier: Verifier, drafted: DraftedRound) -> Law:
    """Everything a verifier can emit of a round, with its exact probability: every draw is tried."""
    return enumerated(lambda draw: verifier(drafted, draw))


def enumerated(process: Callable[[Draw], Tokens]) -> Law:
    """The distribution of what a process returns, found by running it once for every sequence of draws.

    >>> enumerated(lambda draw: (draw(np.array([0.25, 0.75])),))
    {(0,): 0.25, (1,): 0.75}
    """
    law: defaultdict[Tokens, float] = defaultdict(float)
    untried: list[Tokens] = [()]
    while untried:
        script = _Script(untried.pop(0))
        law[process(script)] += script.probability
        untried += script.others
    return dict(law)


class _Script:
    """Draws that are told how to fall; behind the end of what is told, the first possible one, others noted."""

    def __init__(self, told: Tokens) -> None:
        self.told, self.made, self.probability = told, tuple[int](), 1.0
        self.others: list[Tokens] = []

    def __call__(self, p: Probabilities) -> int:
        if len(self.made) < len(self.told):
            choice = self.told[len(self.made)]
        else:
            choice, *others = np.flatnonzero(p).tolist()
            self.others += [(*self.made, other) for other in others]
        self.made = (*self.made, choice)
        self.probability *= float(p[choice])
        return choice


def continued(law: Mapping[Tokens, float], target: Target, length: int) -> Law:
    """The distribution of the first `length` tokens where the target goes on after what was emitted."""
    result: defaultdict[Tokens, float] = defaultdict(float)
    for tokens, probability in law.items():
        for rest, share in _own_text(target, tokens, length):
            result[rest] += probability * share
    return dict(result)


def _own_text(target: Target, tokens: Tokens, length: int) -> Iterable[tuple[Tokens, float]]:
    if len(tokens) >= length:
        yield tokens[:length], 1.0
        return
    for token, p in enumerate(target(tokens)):
        for rest, share in _own_text(target, (*tokens, token), length):
            yield rest, float(p) * share


def total_variation(one: Mapping[Tokens, float], other: Mapping[Tokens, float]) -> float:
    """How far two distributions are apart: the largest difference in the probability of any event, 0 to 1."""
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}) / 2


def mean_accepted_drafts(law: Mapping[Tokens, float]) -> float:
    """Expected number of drafted tokens kept: what is emitted, less the token that a verifier adds itself."""
    return sum(probability * (len(tokens) - 1) for tokens, probability in law.items())
