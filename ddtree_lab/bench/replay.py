"""One recorded text answers for every budget: what is emitted does not depend on how it was drafted.

Every method writes the same text, and the drafter's proposal at a token depends on the text before it alone. So the
proposals at all tokens of one decode, token by token, hold the rounds of every budget, of the chain and of
any way to choose between them: how many, how many rows each verifies, how many drafts it accepts. What they
would cost is `costs.RoundCosts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddtree_lab.budget import Pace
from ddtree_lab.costs import RoundCosts
from ddtree_lab.decode import Generation
from ddtree_lab.pair import Pair, Prompt
from ddtree_lab.pipeline import advance, settings_for, start
from ddtree_lab.stages.draft import Draft
from ddtree_lab.stages.tree import DraftTree, build_chain, build_tree

RECORDED_BUDGET = 256


class Replayed(NamedTuple):
    """A round that would have been.

    Args:
        num_drafted: nodes verified, the root not counted.
        num_emitted: tokens emitted.
        has_draft: whether the drafter was asked.
        is_plain: whether it was a step of plain decoding, drafting being at rest.
    """

    num_drafted: int
    num_emitted: int
    has_draft: bool = True
    is_plain: bool = False


def replayed(made: Generation) -> list[Replayed]:
    """The rounds that a decode had."""
    return [Replayed(r.num_drafted, r.num_emitted_tokens, r.num_drafted > 0) for r in made.rounds]


@dataclass(frozen=True, eq=False)
class Recording:
    """A text, and what was proposed at each token of it.

    Args:
        token_ids: new tokens.
        trees: below each token but the last, no deeper than what was left of the text to be written.
        chains: the drafter's favourites there, which a best-first tree does not hold to the end.
    """

    token_ids: tuple[int, ...]
    trees: tuple[DraftTree, ...]
    chains: tuple[DraftTree, ...]

    def accepted(self, index: int, tree: DraftTree) -> int:
        """Drafts of a tree below token `index` that the text agrees with."""
        node, count = 0, 0
        for token in self.token_ids[index + 1 :]:
            child = tree.children(node).get(token)
            if child is None:
                break
            node, count = child, count + 1
        return count

    def rounds(self, choose: Callable[[int], DraftTree]) -> list[Replayed]:
        """The rounds of a decode that verifies `choose(index)` below token `index`."""
        done, index, last = [], 0, len(self.token_ids) - 1
        while index < last:
            tree = choose(index)
            emitted = min(self.accepted(index, tree) + 1, last - index)
            done.append(Replayed(tree.num_drafted, emitted, has_draft=last - index > 1))
            index += emitted
        return done

    def tree_rounds(self, budget: int) -> list[Replayed]:
        """The rounds of a decode with a fixed budget, up to the recorded one."""
        return self.rounds(lambda index: self.trees[index].prefix(budget))

    def chain_rounds(self) -> list[Replayed]:
        """The rounds of a decode with the DFlash chain."""
        return self.rounds(lambda index: self.chains[index])

    def adaptive_rounds(self, costs: RoundCosts) -> list[Replayed]:
        """The rounds of a decode with `tree_budget="auto"`, where rounds cost as given."""
        done, index, last, pace = [], 0, len(self.token_ids) - 1, Pace(costs)
        while index < last:
            if pace.resting:
                done.append(Replayed(0, 1, has_draft=False, is_plain=True))
                pace, index = pace.rested(1), index + 1
                continue
            has_draft = last - index > 1
            proposed = self.trees[index].prefix(pace.limit if has_draft else 0)
            tree = pace.best_prefix(proposed) if has_draft else proposed
            accepted = self.accepted(index, tree)
            done.append(Replayed(tree.num_drafted, min(accepted + 1, last - index), has_draft))
            pace = pace.after(tree, accepted, done[-1].num_emitted)
            index += done[-1].num_emitted
        return done


def record_text(pair: Pair, prompt: Prompt | Any, budget: int = RECORDED_BUDGET, **said: Any) -> Recording:
    """Decode token by token, and keep what is proposed at each.

    Args:
        said: `max_new_tokens`, `temperature`, `seed`, … as in `generate`.
    """
    defaults: dict[str, Any] = dict(
        max_new_tokens=100, temperature=0.0, top_k=None, top_p=None, seed=0, verify_method="auto"
    )
    settings = settings_for(pair, method="ddtree", tree_budget=0, **{**defaults, **said})
    state = start(pair, pair.encode(prompt), settings)
    trees: list[DraftTree] = []
    chains: list[DraftTree] = []
    while not state.finish_reason:
        state = advance(pair, settings, state)
        draft = state.records["draft"]
        assert isinstance(draft, Draft)
        logits = draft.logits[: state.remaining(settings) - 1]
        trees.append(build_tree(logits, budget, state.anchor_token_id))
        chains.append(build_chain(logits, state.anchor_token_id))
        while "commit" not in state.records:
            state = advance(pair, settings, state)
    return Recording(state.new_token_ids, tuple(trees), tuple(chains))
