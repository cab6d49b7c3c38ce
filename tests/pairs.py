"""Pairs without weights: random drafters, and drafters that know the answer or always miss it."""

from __future__ import annotations

from collections.abc import Sequence

import models
import torch

from ddtree_lab.compat import text_config
from ddtree_lab.drafter import DFlashConfig, DFlashDrafter, DrafterContext
from ddtree_lab.pair import Pair
from ddtree_lab.stages.draft import Draft

BLOCK_SIZE = 6


def random_drafter(target: torch.nn.Module, seed: int = 1) -> DFlashDrafter:
    torch.manual_seed(seed)
    config = DFlashConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=models.VOCAB, block_size=BLOCK_SIZE, target_layer_ids=(0, 2),
        mask_token_id=models.VOCAB - 1, num_target_layers=text_config(target).num_hidden_layers,
    )  # fmt: skip
    return DFlashDrafter(config).to(target.dtype).eval().requires_grad_(False)


def random_pair(target: torch.nn.Module | None = None) -> Pair:
    """A random hybrid and a random drafter, without an end-of-sequence token."""
    target = models.hybrid() if target is None else target
    target.generation_config.eos_token_id = None
    return Pair(target, random_drafter(target), name="random")


def scripted_draft(text: Sequence[int], right: bool):
    """A `draft_block` that proposes the tokens of `text`, or carefully none of them.

    Args:
        text: prompt and new tokens, as plain decoding gives them.
        right: whether the favourite at each depth is the text's token, or any token but that.
    """

    def draft_block(drafter, embeddings, context: DrafterContext, anchor_token_id: int) -> Draft:
        logits = torch.zeros(BLOCK_SIZE - 1, models.VOCAB)
        for depth in range(BLOCK_SIZE - 1):
            position = context.num_rows + 1 + depth
            token = text[position] if position < len(text) else 0
            logits[depth, token] = 9.0 if right else -torch.inf
        return Draft(logits, anchor_token_id, context.num_rows)

    return draft_block
