"""One call of the target, whatever the library calls its arguments, and the prefill built on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ddtree_lab.compat import cache_keyword, forward_kwargs
from ddtree_lab.records import Record
from ddtree_lab.stages.cache import cache_length, check_cache
from ddtree_lab.stages.support import tree_support


@dataclass(frozen=True, eq=False)
class TargetOutput(Record):
    """Logits of a pass, and taps if any were asked for.

    Args:
        logits: float, one row a position.
        taps: hidden states of the tapped layers, concatenated in the drafter's order.
    """

    logits: Float[Tensor, "batch rows vocab"]
    taps: Float[Tensor, "batch positions taps_width"] | None

    def __repr__(self) -> str:
        taps = "no taps" if self.taps is None else f"taps {list(self.taps.shape)}"
        return f"TargetOutput(logits {list(self.logits.shape)}, {taps})"


def run_target(
    target: PreTrainedModel,
    input_ids: Int[Tensor, "batch rows"],
    cache: Cache | None,
    tap_layer_ids: Sequence[int] = (),
    **kwargs: Any,
) -> TargetOutput:
    """A forward of the target that extends `cache` in place.

    Args:
        tap_layer_ids: layers whose hidden states are returned; id i is `hidden_states[i + 1]`.
        **kwargs: `attention_mask`, `position_ids`, `logits_to_keep`; left out where the model's forward
            has no such argument.
    """
    past_length = 0 if cache is None else cache_length(cache)
    if past_length and kwargs.get("position_ids") is None:  # a few models (Bamba) would count from 0 again
        positions = torch.arange(past_length, past_length + input_ids.shape[1], device=target.device)
        kwargs["position_ids"] = positions.expand(input_ids.shape)
    extra = forward_kwargs(target, **kwargs)
    if cache is not None:
        extra[cache_keyword(target)] = cache
    with torch.no_grad():
        out = target(
            input_ids=input_ids.to(target.device),
            use_cache=cache is not None,
            output_hidden_states=bool(tap_layer_ids),
            return_dict=True,
            **extra,
        )
    taps = collect_taps(out.hidden_states, tap_layer_ids) if tap_layer_ids else None
    return TargetOutput(out.logits, taps)


def continue_target(
    target: PreTrainedModel,
    input_ids: Int[Tensor, "batch rows"],
    cache: Cache,
    tap_layer_ids: Sequence[int] = (),
) -> TargetOutput:
    """Plain causal rows after what `cache` holds, as the target itself would generate them.

    One token a forward where recurrent layers have no port: the library's kernels for several tokens
    start from an empty state on some of them (the Mamba-1 layers of Jamba), without a word.
    """
    if not tree_support(target).has_unported_states:
        return run_target(target, input_ids, cache, tap_layer_ids)
    steps = [run_target(target, column, cache, tap_layer_ids) for column in input_ids.split(1, dim=1)]
    taps = torch.cat([step.taps for step in steps if step.taps is not None], dim=1) if tap_layer_ids else None
    return TargetOutput(torch.cat([step.logits for step in steps], dim=1), taps)


def collect_taps(
    hidden_states: Sequence[Tensor], tap_layer_ids: Sequence[int]
) -> Float[Tensor, "batch rows width"]:
    """Hidden states after the tapped layers, side by side. Index 0 holds the embeddings, so id i is i + 1."""
    if max(tap_layer_ids) + 1 >= len(hidden_states):
        raise ValueError(
            f"tap_layer_ids has {max(tap_layer_ids)}, but the target has {len(hidden_states) - 1} layers "
            "(ids from 0); was the drafter trained for another target?"
        )
    device = hidden_states[-1].device  # layers may live on several devices
    return torch.cat([hidden_states[i + 1].to(device) for i in tap_layer_ids], dim=-1)


def prefill(
    target: PreTrainedModel,
    input_ids: Int[Tensor, "1 rows"],
    cache: Cache,
    tap_layer_ids: Sequence[int] = (),
) -> TargetOutput:
    """Run the prompt into an empty (or partly filled) cache; logits of its last token only.

    Raises:
        ValueError: an empty prompt, more than one row, or a cache that does not fit the target.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}; give one prompt of at least one token, [1, P]."
        )
    check_cache(target, cache, filled=False)
    if cache_length(cache):
        out = continue_target(target, input_ids, cache, tap_layer_ids)
    else:
        out = run_target(target, input_ids, cache, tap_layer_ids, logits_to_keep=1)
    return TargetOutput(out.logits[:, -1:], out.taps)
