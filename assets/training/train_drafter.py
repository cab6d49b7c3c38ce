"""Stage 4: the DFlash drafter, trained on the target's own text with the target frozen.

torchrun --nproc-per-node 2 -m assets.training.train_drafter [--steps N]
"""

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from transformers import Qwen3_5ForCausalLM

from ddtree_lab.drafter import DFlashConfig, DFlashDrafter

from .blocks import (
    block_loss,
    chain_emitted_tokens,
    draft_logits,
    make_blocks,
    read_text,
    target_probabilities,
)
from .optimisation import Log, Optimisers, Processes, save_checkpoint, schedule
from .rollouts import Rollouts
from .sampling import load_target
from .settings import BUILD, DRAFTER_FOLDER, DRAFTER_TRAINING, MASK, SEEDS, TARGET_FOLDER
from .tokenizer import load_tokenizer

CHECKPOINT = BUILD / "drafter_checkpoint.pt"
LOG = BUILD / "drafter_log.jsonl"
NUM_VALIDATION = 60
NUM_LAYERS = 3


def drafter_config(target: Qwen3_5ForCausalLM) -> DFlashConfig:
    """Three bidirectional layers as wide as the target, blocks of 8, taps of four layers.

    The last layer is not tapped: its output is only available normed, as the final hidden state.
    """
    config = target.config
    return DFlashConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=config.vocab_size,
        block_size=8,
        target_layer_ids=(1, 3, 5, 6),
        mask_token_id=load_tokenizer().convert_tokens_to_ids(MASK),
        num_target_layers=config.num_hidden_layers,
        target_hidden_size=config.hidden_size,
        rope_theta=1e6,
        max_position_embeddings=config.max_position_embeddings,
        layer_types=("full_attention",) * NUM_LAYERS,
    )


def batches(rollouts: Rollouts, num_steps: int, start_step: int = 0) -> Iterator[tuple[torch.Tensor, ...]]:
    """Batches (ids, lengths, temperatures, anchors) of sequences of similar length, cut to the longest.

    Each epoch is shuffled, sorted by length within pools of 32 batches, and shuffled by batch. The later epochs
    have fewer documents: what can be learnt of them is learnt first.
    """
    training = DRAFTER_TRAINING
    step = epoch = 0
    while True:
        rng = np.random.default_rng((SEEDS.drafter, epoch))
        order = rng.permutation(len(rollouts.ids))
        if epoch >= training.num_whole_epochs:
            order = order[rollouts.is_chat[order] | (rng.random(len(order)) < training.late_document_share)]
        groups = []
        for pool in np.array_split(order, max(1, len(order) // (32 * training.batch_size))):
            by_length = pool[np.argsort(rollouts.lengths[pool], kind="stable")]
            groups += [
                by_length[i : i + training.batch_size] for i in range(0, len(pool), training.batch_size)
            ]
        for group in (groups[index] for index in rng.permutation(len(groups))):
            if len(group) < training.batch_size:
                continue
            if step >= num_steps:
                return
            anchors = _draw_anchors(rng, rollouts, group)
            if step >= start_step:
                width = rollouts.lengths[group].max()
                ids = torch.from_numpy(rollouts.ids[group, :width].astype(np.int64))
                values = (rollouts.lengths[group], rollouts.temperatures[group])
                yield ids, *map(torch.from_numpy, values), anchors
            step += 1
        epoch += 1


def _draw_anchors(rng: np.random.Generator, rollouts: Rollouts, group: np.ndarray) -> torch.Tensor:
    """Anchors (B, A) from the first answer token to the last but one, spread evenly at random."""
    count = DRAFTER_TRAINING.anchors_per_sequence
    first, last = rollouts.prompt_lengths[group, None], rollouts.lengths[group, None] - 1
    shares = (np.arange(count) + rng.random((len(group), count))) / count
    return torch.from_numpy((first + shares * (last - first)).astype(np.int64))


def validate(drafter: DFlashDrafter, target: Qwen3_5ForCausalLM, validation: Rollouts) -> float:
    """Mean emitted tokens a round of the greedy chain on held-out chat prompts."""
    values = []
    for ids, prompt_length, length in zip(
        validation.ids[:NUM_VALIDATION], validation.prompt_lengths, validation.lengths, strict=False
    ):
        tokens = torch.from_numpy(ids[:length].astype(np.int64))[None]
        values.append(chain_emitted_tokens(drafter, target, tokens, int(prompt_length), int(length)))
    return float(np.mean(values))


def train(num_steps: int) -> None:
    training = DRAFTER_TRAINING
    processes = Processes()
    torch.manual_seed(SEEDS.drafter)
    target = load_target(TARGET_FOLDER)
    drafter = DFlashDrafter(drafter_config(target))
    optimisers = Optimisers(drafter, training.learning_rate, training.weight_decay)
    rollouts = Rollouts.load()
    validation = rollouts.select(rollouts.is_validation)
    start_step = 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, weights_only=True)
        drafter.load_state_dict(state["drafter"])
        optimisers.load_state_dict(state["optimisers"])
        start_step = state["step"]
    log = Log(LOG, every=25, is_first=processes.is_first, start_step=start_step)
    stream = batches(rollouts.select(~rollouts.is_validation), num_steps, start_step)
    for step, batch in enumerate(stream, start_step):
        ids, lengths, temperatures, anchors = (processes.share(part) for part in batch)
        config = drafter.config
        blocks = make_blocks(
            ids, lengths, anchors, config.block_size, config.mask_token_id, training.position_decay
        )
        taps, target_logits = read_text(target, ids, config.target_layer_ids)
        wanted = target_probabilities(target_logits, blocks, temperatures)
        loss = block_loss(draft_logits(drafter, target, taps, blocks), wanted, blocks)
        loss.backward()
        norm = processes.average_gradients(drafter)
        optimisers.step(schedule(step, num_steps, training.warmup_steps, training.flat_share))
        values = {"loss": float(loss.detach()), "gradient_norm": norm}
        is_last = step + 1 == num_steps
        if processes.is_first and (is_last or (step + 1) % training.checkpoint_every == 0):
            save_checkpoint(
                CHECKPOINT, drafter=drafter.state_dict(), optimisers=optimisers.state_dict(), step=step + 1
            )
            drafter.save_pretrained(DRAFTER_FOLDER)
            values["chain_emitted_tokens"] = validate(drafter, target, validation)
        log.add(step, values)
    processes.close()


def is_done() -> bool:
    """Whether the last checkpoint is that of the last step."""
    return (
        CHECKPOINT.exists()
        and torch.load(CHECKPOINT, weights_only=True)["step"] >= DRAFTER_TRAINING.num_steps
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=DRAFTER_TRAINING.num_steps)
    train(parser.parse_args().steps)
