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
def read_text(target: Qwen3_5ForCausalLM, ids: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target's pass over ids (B, C): taps, side by side (B, C, taps · H), and logits (B, C, V)."""
    out = target(input_ids=ids, use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[layer_id + 1] for layer_id in layer_ids], dim=-1), out.logits


def draft_logits(drafter: DFlashDrafter, target: Qwen3_5ForCausalLM, taps: Tensor, blocks: Blocks) -> Tensor:
    """Logits of the drafted positions: (B, A, block_size − 1, V)."""
    context_position_ids = torch.arange(taps.shape[1]).expand(taps.shape[:2])
    embeddings = target.model.embed_tokens(blocks.token_ids)
    hidden = drafter(embeddings, taps, context_position_ids, blocks.position_ids, blocks.attention_mask)
    rows = hidden.unflatten(1, (-1, drafter.config.block_size))
    return target.lm_head(rows[:, :, 1:])  # the anchor's row predicts nothing


def target_probabilities(target_logits: Tensor, blocks: Blocks, temperatures: Tensor) -> Tensor:
    """What the target drew every drafted token from, given all before it: (B, A, block_size − 1, V).

    The token itself at temperature 0. Given only the anchor, the mean of these is the token's distribution, which
    is what the drafter is to learn, so they are labels with less noise than the tokens drawn from them.

    Args:
        target_logits: (B, C, V) of the sequences.
        temperatures: (B,) at which they were written.
    """
    vocab_size = target_logits.shape[-1]
    positions = blocks.position_ids.unflatten(1, (blocks.labels.shape[1], -1))
    before = positions[:, :, :-1]  # the token before each
    rows = before.clamp(max=target_logits.shape[1] - 1).flatten(1)
    logits = target_logits.gather(1, rows[..., None].expand(-1, -1, vocab_size)).view(*before.shape, -1)
    temperatures = temperatures[:, None, None, None]
    drawn_from = (logits / temperatures.clamp(min=1e-3)).softmax(dim=-1)
    return torch.where(temperatures > 0, drawn_from, F.one_hot(blocks.labels, vocab_size).to(logits.dtype))


def block_loss(logits: Tensor, wanted: Tensor, blocks: Blocks) -> Tensor:
    """Cross-entropy against `target_probabilities`, weighted by the distance from the anchor."""
    per_token = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(0, 2), reduction="none")
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
    taps, _ = read_text(target, ids, drafter.config.target_layer_ids)
    right = draft_logits(drafter, target, taps, blocks).argmax(-1) == blocks.labels
    right &= blocks.weights > 0
    accepted = right.long().cumprod(dim=-1).sum(dim=-1)[0].tolist()  # by anchor
    rounds, anchor = 0, prompt_length
    while anchor < length - 1:
        anchor += 1 + accepted[anchor - prompt_length]
        rounds += 1
    return (length - 1 - prompt_length) / rounds
