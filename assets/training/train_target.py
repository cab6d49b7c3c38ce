"""Stage 2: the target, a real `Qwen3_5ForCausalLM` (Gated DeltaNet hybrid) of 1.9 million weights.

torchrun --nproc-per-node 2 -m assets.training.train_target [--steps N]
"""

import argparse
import functools

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from .data import IGNORED, Rows, mixed_batches
from .optimisation import Log, Optimisers, Processes, save_checkpoint, schedule
from .settings import BUILD, SEEDS, TARGET_FOLDER, TARGET_TRAINING, VOCABULARY_SIZE
from .tokenizer import load_tokenizer

CHECKPOINT = BUILD / "target_checkpoint.pt"
LOG = BUILD / "target_log.jsonl"
DELTA_RULE_CHUNK_SIZE = 32  # the sequences are short: smaller chunks than the default 64 are faster


def target_config() -> Qwen3_5TextConfig:
    """Three linear-attention layers, one full-attention layer, twice; embeddings tied to the head."""
    tokenizer = load_tokenizer()
    return Qwen3_5TextConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,  # 8 frequencies a head; the sections are the three grids' shares
            "mrope_section": [3, 3, 2],
        },
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def use_small_chunks() -> None:
    """Run the chunked delta rule with smaller chunks in this process; the result is the same."""
    chunked = modeling_qwen3_5.torch_chunk_gated_delta_rule
    modeling_qwen3_5.torch_chunk_gated_delta_rule = functools.partial(
        chunked, chunk_size=DELTA_RULE_CHUNK_SIZE
    )


def losses(model: Qwen3_5ForCausalLM, ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Mean next-token cross-entropy, and that of chat and document rows apart, for the log.

    ids, labels: (B, L). A row is a chat row if it has positions without a label.
    """
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    per_token = F.cross_entropy(
        logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="none"
    ).view(len(ids), -1)
    counted = labels[:, 1:] != IGNORED
    is_chat = ~counted.all(dim=1)
    parts = {}
    for name, rows in (("chat", is_chat), ("documents", ~is_chat)):
        count = counted[rows].sum()
        parts[name] = float(per_token[rows].detach().sum() / count) if count else float("nan")
    return per_token.sum() / counted.sum(), parts


def train(num_steps: int) -> None:
    training = TARGET_TRAINING
    processes = Processes()
    torch.manual_seed(SEEDS.target)
    use_small_chunks()
    model = Qwen3_5ForCausalLM(target_config())
    optimisers = Optimisers(model, training.learning_rate, training.weight_decay)
    start_step = 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(state["model"])
        optimisers.load_state_dict(state["optimisers"])
        start_step = state["step"]
    log = Log(LOG, every=25, is_first=processes.is_first, start_step=start_step)
    batches = mixed_batches(Rows.load(), num_steps, start_step)
    for step, (ids, labels) in enumerate(batches, start_step):
        ids, labels = (processes.share(torch.from_numpy(part)) for part in (ids, labels))
        loss, parts = losses(model, ids, labels)
        loss.backward()
        norm = processes.average_gradients(model)
        optimisers.step(schedule(step, num_steps, training.warmup_steps, training.flat_share))
        log.add(step, {"loss": float(loss.detach()), **parts, "gradient_norm": norm})
        is_last = step + 1 == num_steps
        if processes.is_first and (is_last or (step + 1) % training.checkpoint_every == 0):
            save_checkpoint(
                CHECKPOINT, model=model.state_dict(), optimisers=optimisers.state_dict(), step=step + 1
            )
            save_target(model)
    processes.close()


def save_target(model: Qwen3_5ForCausalLM) -> None:
    """A folder `AutoModelForCausalLM` reads, float32 safetensors."""
    tokenizer = load_tokenizer()
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(TARGET_FOLDER)


def is_done() -> bool:
    """Whether the last checkpoint is that of the last step."""
    return (
        CHECKPOINT.exists() and torch.load(CHECKPOINT, weights_only=True)["step"] >= TARGET_TRAINING.num_steps
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=TARGET_TRAINING.num_steps)
    train(parser.parse_args().steps)
