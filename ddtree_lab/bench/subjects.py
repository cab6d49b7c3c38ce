"""What is measured: a target, a filled cache, and the tree of a drafter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ddtree_lab.compat import layer_tensors
from ddtree_lab.stages.cache import make_cache
from ddtree_lab.stages.forward import prefill
from ddtree_lab.stages.tree import DraftTree, build_tree

DEPTH = 15  # of the published drafters: a block of 16, the anchor among them


@dataclass(frozen=True)
class Subject:
    """A target whose cache holds a prompt.

    Args:
        label: how results name it.
        cache: committed context; only ever read.
    """

    label: str
    target: PreTrainedModel
    cache: Cache
    num_prompt_tokens: int

    @property
    def vocab_size(self) -> int:
        return self.target.get_input_embeddings().weight.shape[0]

    def tensors(self) -> tuple[Tensor, ...]:
        """Weights and committed context: what is there before a pass."""
        model = self.target
        held = [tensor for layer in self.cache.layers for tensor in layer_tensors(layer).values()]
        return (*model.parameters(), *model.buffers(), *held)

    def tree(self, num_nodes: int, depth: int = DEPTH) -> DraftTree:
        """A best-first tree with that many rows to verify, the root among them."""
        return build_tree(random_marginals(depth, self.vocab_size), num_nodes - 1, root_token_id=1)


def make_subject(label: str, target: PreTrainedModel, num_prompt_tokens: int = 128) -> Subject:
    """A subject with a prompt of random tokens."""
    cache = make_cache(target)
    vocab = target.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocab, (1, num_prompt_tokens), generator=torch.Generator().manual_seed(0))
    prefill(target, ids, cache)
    return Subject(label, target, cache, num_prompt_tokens)


def random_marginals(depth: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Logits as a drafter gives them: a few likely tokens, a long tail, less sure the deeper."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(depth, vocab_size, generator=generator)
    likely = torch.randint(0, vocab_size, (depth, 8), generator=generator)
    lift = torch.randn(depth, 8, generator=generator) * 2 + 14 - 0.5 * torch.arange(depth)[:, None]
    return logits.scatter_(1, likely, lift)


def random_hybrid(
    hidden_size: int = 1024, num_layers: int = 8, vocab_size: int = 4096, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A Qwen3.5 hybrid with random weights and about the proportions of Qwen3.6-27B.

    Args:
        hidden_size: a multiple of 128; heads of 128 where it is 512 or more, else of 32.
    """
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    width = 128 if hidden_size >= 512 else 32
    key_heads = max(1, hidden_size // (2 * width))
    config = Qwen3_5TextConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=hidden_size * 7 // 2,
        num_hidden_layers=num_layers, num_attention_heads=hidden_size // width,
        num_key_value_heads=max(1, hidden_size // (4 * width)), head_dim=width,
        linear_num_key_heads=key_heads, linear_num_value_heads=3 * key_heads,
        linear_key_head_dim=width, linear_value_head_dim=width, tie_word_embeddings=True,
        max_position_embeddings=16384,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # made in it: a wide model in float32 would be twice the size on the way
    try:
        return Qwen3_5ForCausalLM(config).to(dtype).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
