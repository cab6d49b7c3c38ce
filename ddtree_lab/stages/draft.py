"""Draft: one pass of the drafter over anchor and masks gives a distribution for every position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree_lab.drafter import DFlashDrafter, DrafterContext
from ddtree_lab.records import Record
from ddtree_lab.stages.embedding import EmbeddingPath

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, eq=False)
class Draft(Record):
    """The drafter's marginals.

    Args:
        logits: row d is for the token d + 1 after the anchor. They are marginals: no row knows what
            the rows before it will turn out to be.
        anchor_token_id: the last committed token, which the target has not run on yet.
        num_context_rows: committed tokens the drafter has seen taps of.
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
                f"{int(t)} ({v.exp():.2f})" for t, v in zip(best.indices[d], best.values[d], strict=True)
            )
            entropy = -(log_probs[d].exp() * log_probs[d].clamp(min=-1e9)).sum()
            table.add_row(str(d + 1), shown, f"{entropy:.2f}")
        return table


def draft_block(
    drafter: DFlashDrafter,
    embeddings: EmbeddingPath,
    context: DrafterContext,
    anchor_token_id: int,
) -> Draft:
    """Draft the positions after the anchor; the context is read, not changed.

    The block is `[anchor, mask × (block_size − 1)]` in the target's input embedding; the target's output
    head reads the mask rows. Its noise rows never enter the context.

    Args:
        context: rows of every committed token but the anchor.
    """
    config = drafter.config
    if config.mask_token_id >= embeddings.vocab_size:
        raise ValueError(
            f"drafter: mask_token_id {config.mask_token_id} is outside the target's embedding of "
            f"{embeddings.vocab_size} rows; was it trained for another target?"
        )
    block = [anchor_token_id] + [config.mask_token_id] * drafter.num_draft_positions
    with torch.no_grad():
        ids = torch.tensor([block], device=embeddings.device)
        rows = embeddings.input(ids).to(drafter.device)
        positions = torch.arange(len(block), device=drafter.device)[None] + context.num_rows
        hidden = drafter.denoise(rows, positions, context)[:, 1:]  # the anchor's own row predicts nothing
        head = embeddings.output.weight
        logits = embeddings.output(hidden.to(device=head.device, dtype=head.dtype))
    return Draft(logits[0], anchor_token_id, context.num_rows)


def extend_context(
    drafter: DFlashDrafter, taps: Float[Tensor, "rows taps_width"], context: DrafterContext | None = None
) -> DrafterContext:
    """The context with the taps of newly committed tokens appended, in the order of the text."""
    start = 0 if context is None else context.num_rows
    positions = torch.arange(start, start + len(taps), device=drafter.device)[None]
    with torch.no_grad():
        return drafter.extend_context(taps[None].to(drafter.device), positions, context)
