"""`tree_budget="auto"`: each round's budget from what it would cost and what the drafter expects of it.

A tree of budget b is the first b pops of any larger one, and the drafter expects to have

    mass(b) = Σ exp(log_prob) over its first b nodes

drafts accepted. So the budget that emits most tokens a second is found without a model, before the verify pass:

    argmax_b  (1 + trust · mass(b)) / (draft seconds + round seconds of b + 1 rows)

`trust` is how many of the drafts it expected were accepted lately. Any choice is lossless: the tree decides how
much is verified, never what is emitted. Where drafting has not paid lately it is left out for some rounds: plain
decoding then, at its own price.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddtree_lab.costs import RoundCosts
from ddtree_lab.stages.tree import DraftTree

AUTO = "auto"
MEMORY = 0.9  # weight of the past, per round: for trust about the last ten count
LONG_MEMORY = 0.97  # for whether drafting pays, about the last thirty
PRIOR_DRAFTS = 4.0  # accepted as expected, before anything was seen
PATIENCE = 4.0  # tokens credited at first, so that a few bad rounds do not end drafting
LONGEST_REST = 16  # rounds without a draft before it is tried again


@dataclass(frozen=True)
class Pace:
    """What a decode has learnt about its own rounds; a value, as everything in a `State`.

    Args:
        costs: of a round, by its rows.
        accepted, expected: drafts accepted lately, and those the drafter had expected.
        emitted, seconds: tokens emitted lately by rounds with a draft, and the seconds foreseen for them.
        limit: drafted nodes the next tree may have.
        rest: rounds without a draft, when drafting does not pay.
        resting: how many of them are still to come.
    """

    costs: RoundCosts
    accepted: float = 0.0
    expected: float = 0.0
    emitted: float = PATIENCE
    seconds: float = 0.0
    limit: int = 32
    rest: int = 0
    resting: int = 0

    @property
    def trust(self) -> float:
        """Accepted drafts for each that the drafter expected."""
        return (self.accepted + PRIOR_DRAFTS) / (self.expected + PRIOR_DRAFTS)

    @property
    def drafts(self) -> bool:
        """Whether the next round drafts at all."""
        return self.resting == 0

    def best_prefix(self, tree: DraftTree) -> DraftTree:
        """The part of a tree that is worth verifying."""
        mass = np.cumsum(np.exp(tree.log_probs)) - 1  # (n,); the root's own probability is 1
        cost = self.costs.draft_seconds + self.costs.by_rows[: tree.num_nodes]
        return tree.prefix(int(np.argmax((1 + self.trust * mass[: len(cost)]) / cost)))

    def after(self, tree: DraftTree, num_accepted: int, num_emitted: int) -> Pace:
        """The pace after a round that verified `tree`.

        By foreseen seconds, not by those of a clock: what slows a round lately (a longer context, another process)
        slows them all, and one slow round says nothing about its budget.
        """
        if not self.drafts:
            return self.rested(1)
        num_rows = min(tree.num_nodes, len(self.costs.by_rows))
        emitted = LONG_MEMORY * self.emitted + num_emitted
        seconds = (
            LONG_MEMORY * self.seconds + self.costs.draft_seconds + float(self.costs.by_rows[num_rows - 1])
        )
        pays = emitted * self.costs.plain_seconds > seconds  # against plain decoding
        rest = 0 if pays else min(2 * self.rest + 1, LONGEST_REST)
        return replace(
            self,
            accepted=MEMORY * self.accepted + num_accepted,
            expected=MEMORY * self.expected + tree.mass,
            emitted=emitted,
            seconds=seconds,
            limit=min(self.costs.largest_budget, tree.num_drafted + max(tree.num_drafted, 16)),
            rest=rest,
            resting=rest,
        )

    def rested(self, num_rounds: int) -> Pace:
        """The pace after rounds without a draft."""
        return replace(self, resting=self.resting - num_rounds)
