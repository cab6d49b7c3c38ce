"""Batched decoding of the target for rollouts: prompts of one length, so that no row is padded."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3_5ForCausalLM

from ddtree_lab.compat import cache_keyword

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
    temperatures: Tensor,
    generator: torch.Generator,
) -> list[list[int]]:
    """Continue each row of `prompts` (B, P) up to its end token (kept) or `max_new_tokens`.

    Padding on the left would run through the recurrent layers, so rows of one call share a length.
    Finished rows leave the batch. temperatures: (B,), 0 is greedy.
    """
    ends = torch.tensor(end_token_ids())
    cache = DynamicCache(config=target.config)
    keywords = {cache_keyword(target): cache, "use_cache": True, "logits_to_keep": 1}
    rows = torch.arange(len(prompts))  # those still being continued
    answers: list[list[int]] = [[] for _ in rows]
    fed = prompts
    for _ in range(max_new_tokens):
        logits = target(input_ids=fed, **keywords).logits[:, -1]
        drawn = draw(logits, temperatures[rows], generator)
        for row, token in zip(rows.tolist(), drawn.tolist(), strict=True):
            answers[row].append(token)
        going_on = (~torch.isin(drawn, ends)).nonzero()[:, 0]
        if len(going_on) == 0:
            break
        if len(going_on) < len(rows):
            cache.reorder_cache(going_on)
            rows = rows[going_on]
        fed = drawn[going_on, None]
    return answers


def draw(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """One token a row of `logits` (B, V) at its temperature (B,): argmax at 0, else a draw."""
    probabilities = (logits / temperatures.clamp(min=1e-3)[:, None]).softmax(dim=-1)
    drawn = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return torch.where(temperatures > 0, drawn, logits.argmax(dim=-1))
