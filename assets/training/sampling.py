"""Batched decoding of the target for rollouts: prompts of one length, so that no row is padded."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3_5ForCausalLM

from .settings import END_OF_TEXT, TURN_END
from .tokenizer import load_tokenizer


def load_target(folder: Path) -> Qwen3_5ForCausalLM:
    """The stored target in float32, frozen."""
    return Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def end_token_ids() -> list[int]:
    tokenizer = load_tokenizer()
    return tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])


@torch.inference_mode()
def continuations(
    target: Qwen3_5ForCausalLM,
    prompts: Tensor,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> list[list[int]]:
    """Continue each row of `prompts` (B, P) up to its end token (kept) or `max_new_tokens`.

    Padding on the left would run through the recurrent layers, so rows of one call share a length.
    """
    ends = torch.tensor(end_token_ids())
    cache = DynamicCache(config=target.config)
    fed, tokens = prompts, []
    finished = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(max_new_tokens):
        logits = target(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        drawn = draw(logits, temperature, generator)
        tokens.append(drawn)
        finished |= torch.isin(drawn, ends)
        if finished.all():
            break
        fed = drawn[:, None]
    return [_cut(row.tolist(), set(ends.tolist())) for row in torch.stack(tokens, dim=1)]


def draw(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token a row of `logits` (B, V): argmax at temperature 0, else a draw."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)[:, 0]


def _cut(tokens: list[int], ends: set[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens
