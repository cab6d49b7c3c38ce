"""Draft: one look of the drafter at the text so far gives a distribution for every position after the anchor.

Which drafter it is makes no difference to any other stage: `Drafter` is all they ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from ddtree_lab.records import Record
from ddtree_lab.stages.embedding import EmbeddingPath

if TYPE_CHECKING:
    from rich.table import Table


@runtime_checkable
class Context(Protocol):
    """What a drafter remembers of committed tokens: a value that is never changed in place."""

    @property
    def num_rows(self) -> int:
        """Tokens it holds: all committed ones but the anchor."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """What the pipeline asks of a drafter: `DFlashDrafter`, `NgramDrafter`, or one of your own."""

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose hidden states it reads; none for a drafter that reads the text only."""
        ...

    @property
    def num_draft_positions(self) -> int:
        """Positions drafted at most."""
        ...

    def remember(
        self,
        token_ids: Sequence[int],
        taps: Float[Tensor, "rows taps_width"] | None,
        context: Any = None,
    ) -> Context:
        """A context with newly committed tokens appended; `context`, its own kind or None, stays as it was."""
        ...

    def propose(
        self, context: Any, anchor_token_id: int, embeddings: EmbeddingPath
    ) -> Float[Tensor, "depth vocab"]:
        """Logits of the positions after the anchor, nearest first: marginals, -inf where impossible."""
        ...


@dataclass(frozen=True, eq=False)
class Draft(Record):
    """The drafter's marginals.

    Args:
        logits: row d is for the token d + 1 after the anchor. They are marginals: no row knows what
            the rows before it will turn out to be.
        anchor_token_id: the last committed token, which the target has not run on yet.
        num_context_rows: committed tokens the drafter has seen.
    """

    logits: Float[Tensor, "depth vocab"]
    anchor_token_id: int
    num_context_rows: int

    @property
    def depth(self) -> int:
        return self.logits.shape[0]

    def __repr__(self) -> str:
        return f"Draft({self.depth} positions after token {self.anchor_token_id}, {self.num_context_rows} context rows)"

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=repr(self), title_justify="left")
        table.add_column("depth", justify="right")
        table.add_column("best tokens (probability)")
        table.add_column("entropy, nats", justify="right")
        log_probs = self.logits.float().log_softmax(-1)
        best = log_probs.topk(min(5, log_probs.shape[-1]), dim=-1)
        for d in range(self.depth):
            shown = "  ".join(
                f"{int(t)} ({v.exp():.2f})"
                for t, v in zip(best.indices[d], best.values[d], strict=True)
                if v.isfinite()
            )
            entropy = -(log_probs[d].exp() * log_probs[d].clamp(min=-1e9)).sum()
            table.add_row(str(d + 1), shown, f"{entropy:.2f}")
        return table


def draft_block(
    drafter: Drafter,
    embeddings: EmbeddingPath,
    context: Context,
    anchor_token_id: int,
) -> Draft:
    """Draft the positions after the anchor; the context is read, not changed.

    Args:
        embeddings: the target's, for a drafter that borrows them.
        context: holds every committed token but the anchor.
    """
    return Draft(drafter.propose(context, anchor_token_id, embeddings), anchor_token_id, context.num_rows)


def extend_context(
    drafter: Drafter,
    taps: Float[Tensor, "rows taps_width"] | None,
    context: Context | None = None,
    token_ids: Sequence[int] = (),
) -> Context:
    """The context with newly committed tokens appended, in the order of the text.

    Args:
        taps: hidden states of the layers the drafter taps, if it taps any.
        token_ids: the tokens, for a drafter that reads the text itself.
    """
    return drafter.remember(token_ids, taps, context)
