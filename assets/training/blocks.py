"""DFlash training blocks: many anchors of a sequence in one pass of the drafter.

A block is `[anchor, mask × (block_size − 1)]`. It attends to the context rows before its anchor
and, in both directions, to its own rows; other blocks of the same sequence are invisible to it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM

from ddtree_lab.drafter import DFlashDrafter


@dataclass(frozen=True)
class Blocks:
    """Inputs and labels of A blocks for each of B sequences; Q = A · block_size rows.

    labels, weights: (B, A, block_size − 1); weight 0 where the sequence has ended.
    """

    token_ids: Tensor  # (B, Q)
    position_ids: Tensor  # (B, Q)
    attention_mask: Tensor  # (B, 1, Q, C + Q) bool
    labels: Tensor
    weights: Tensor


def make_blocks(
    ids: Tensor, lengths: Tensor, anchors: Tensor, block_size: int, mask_token_id: int, position_decay: float
) -> Blocks:
    """Blocks at `anchors` (B, A) of `ids` (B, C), whose sequences end at `lengths` (B,)."""
    batch, num_anchors = anchors.shape
    context_length = ids.shape[1]
    offsets = torch.arange(block_size)
    positions = anchors[:, :, None] + offsets  # (B, A, block)
    token_ids = torch.full_like(positions, mask_token_id)
    token_ids[:, :, 0] = ids.gather(1, anchors)

    drafted = positions[:, :, 1:]
    exists = drafted < lengths[:, None, None]
    labels = ids.gather(1, drafted.clamp(max=context_length - 1).flatten(1)).view_as(drafted)
    # exp(−(k − 1) / decay): an early miss costs the whole rest of the block (DFlash, loss weighting)
    weights = exists * torch.exp(-(offsets[1:] - 1) / position_decay)

    block_of_row = torch.arange(num_anchors).repeat_interleave(block_size)
    same_block = (block_of_row[:, None] == block_of_row[None, :]).expand(batch, -1, -1)
    anchor_of_row = anchors.repeat_interleave(block_size, dim=1)  # (B, Q)
    before_anchor = torch.arange(context_length) < anchor_of_row[:, :, None]  # (B, Q, C)
    mask = torch.cat([before_anchor, same_block], dim=2)[:, None]
    return Blocks(token_ids.flatten(1), positions.flatten(1), mask, labels, weights)


@torch.no_grad()
def tapped_states(target: Qwen3_5ForCausalLM, ids: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
    """Hidden states after the tapped layers, side by side: (B, C) → (B, C, taps · H)."""
    states = target.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer_id + 1] for layer_id in layer_ids], dim=-1)


def draft_logits(drafter: DFlashDrafter, target: Qwen3_5ForCausalLM, ids: Tensor, blocks: Blocks) -> Tensor:
    """Logits of the drafted positions: (B, A, block_size − 1, V)."""
    config = drafter.config
    taps = tapped_states(target, ids, config.target_layer_ids)
    context_position_ids = torch.arange(ids.shape[1]).expand_as(ids)
    embeddings = target.model.embed_tokens(blocks.token_ids)
    hidden = drafter(embeddings, taps, context_position_ids, blocks.position_ids, blocks.attention_mask)
    drafted = hidden.unflatten(1, (-1, config.block_size))[:, :, 1:]  # the anchor's row predicts nothing
    return target.lm_head(drafted)


def block_loss(logits: Tensor, blocks: Blocks) -> Tensor:
    """Cross-entropy of every drafted token, weighted by its distance from the anchor."""
    per_token = F.cross_entropy(logits.flatten(0, 2), blocks.labels.flatten(), reduction="none")
    weights = blocks.weights.flatten()
    return (per_token * weights).sum() / weights.sum()


@torch.no_grad()
def chain_emitted_tokens(
    drafter: DFlashDrafter, target: Qwen3_5ForCausalLM, ids: Tensor, prompt_length: int, length: int
) -> float:
    """Emitted tokens a round of the greedy chain on a sequence the target wrote greedily itself.

    Teacher-forced, hence exact: a chain round keeps the leading drafts that equal the target's
    tokens and adds the target's next one. ids: (1, C); the first answer token comes from prefill.
    """
    block_size = drafter.config.block_size
    anchors = torch.arange(prompt_length, length - 1)[None]
    blocks = make_blocks(
        ids, torch.tensor([length]), anchors, block_size, drafter.config.mask_token_id, position_decay=4.0
    )
    right = draft_logits(drafter, target, ids, blocks).argmax(-1) == blocks.labels
    right &= blocks.weights > 0
    accepted = right.long().cumprod(dim=-1).sum(dim=-1)[0].tolist()  # by anchor
    rounds, anchor = 0, prompt_length
    while anchor < length - 1:
        anchor += 1 + accepted[anchor - prompt_length]
        rounds += 1
    return (length - 1 - prompt_length) / rounds
