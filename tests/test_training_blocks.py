"""What the embedded pair's drafter is trained towards."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from models import VOCAB, hybrid, random_ids
from pairs import random_pair

sys.path.insert(0, str(Path(__file__).parents[1]))  # assets/ is beside the package, and no part of it

from assets.training.blocks import (
    block_loss,
    draft_logits,
    make_blocks,
    read_text,
    target_probabilities,
)


def some_blocks():
    target, drafter = hybrid(), random_pair().drafter
    ids = torch.cat([random_ids(14, seed=seed) for seed in (0, 1)])
    anchors, config = torch.tensor([[2, 5], [3, 9]]), drafter.config
    blocks = make_blocks(
        ids, torch.tensor([14, 12]), anchors, config.block_size, config.mask_token_id, position_decay=4.0
    )
    return target, drafter, ids, anchors, blocks


def test_a_drafted_token_is_compared_with_what_the_target_drew_it_from():
    target, drafter, ids, anchors, blocks = some_blocks()
    _, logits = read_text(target, ids, drafter.tap_layer_ids)
    wanted = target_probabilities(logits, blocks, torch.tensor([0.7, 0.0]))
    assert wanted.shape == (*blocks.labels.shape, VOCAB)
    for text in range(2):
        for block, anchor in enumerate(anchors[text].tolist()):
            for k in range(1, drafter.config.block_size):
                if blocks.weights[text, block, k - 1] == 0:  # past the end
                    continue
                if text == 0:
                    alone = target(ids[:1, : anchor + k]).logits[0, -1]
                    expected = (alone / 0.7).softmax(-1)
                else:
                    expected = torch.eye(VOCAB)[ids[1, anchor + k]]
                torch.testing.assert_close(wanted[text, block, k - 1], expected, rtol=1e-3, atol=1e-5)


def test_of_drawn_tokens_the_loss_is_the_same_in_the_mean():
    target, drafter, ids, _, blocks = some_blocks()
    taps, logits = read_text(target, ids, drafter.tap_layer_ids)
    drafted = draft_logits(drafter, target, taps, blocks).detach()
    wanted = target_probabilities(logits, blocks, torch.tensor([1.0, 1.0]))
    eye, generator = torch.eye(VOCAB), torch.Generator().manual_seed(0)
    drawn = torch.zeros(400)
    for i in range(len(drawn)):
        tokens = torch.multinomial(wanted.flatten(0, 2), 1, generator=generator).view(blocks.labels.shape)
        drawn[i] = block_loss(drafted, eye[tokens], blocks)
    loss = float(block_loss(drafted, wanted, blocks))
    assert loss == pytest.approx(float(drawn.mean()), abs=4 * float(drawn.std()) / len(drawn) ** 0.5)
    assert float(drawn.std()) > 0
