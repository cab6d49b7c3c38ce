"""One call of the target, whatever the library calls its arguments, and the prefill built on it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ddtree_lab.compat import cache_keyword, forward_kwargs, text_config
from ddtree_lab.offload import execution_device, pass_through
from ddtree_lab.records import Record
from ddtree_lab.stages.cache import cache_length, check_cache, check_filled, learn_sizes
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
            has no such argument. Positions count from 0; a model that begins elsewhere gets its own.
    """
    past_length = 0 if cache is None else cache_length(cache)
    device = execution_device(target.get_input_embeddings())
    if past_length and kwargs.get("position_ids") is None:  # a few models (Bamba) would count from 0 again
        positions = torch.arange(past_length, past_length + input_ids.shape[1], device=device)
        kwargs["position_ids"] = positions.expand(input_ids.shape)
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = kwargs["position_ids"] + first_position(target)
    extra = forward_kwargs(target, **kwargs)
    if cache is not None:
        extra[cache_keyword(target)] = cache
    with torch.no_grad(), pass_through(target), tapped_layers(target, tap_layer_ids) as tapped:
        out = target(input_ids=input_ids.to(device), use_cache=cache is not None, return_dict=True, **extra)
    # Layers may live on several devices; the taps go where the logits are.
    taps = (
        torch.cat([tapped[i].to(out.logits.device) for i in tap_layer_ids], dim=-1) if tap_layer_ids else None
    )
    return TargetOutput(out.logits, taps)


_first_positions: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()


def first_position(target: PreTrainedModel) -> int:
    """The position id of a text's first token: 0, but for the RoBERTa family, which begins after its padding id.

    There a position is looked up in a table with a padding row; no other table of positions has one.
    """
    if target not in _first_positions:
        tables = (getattr(module, "position_embeddings", None) for module in target.modules())
        rows = [t.padding_idx for t in tables if isinstance(t, nn.Embedding) and t.padding_idx is not None]
        _first_positions[target] = rows[0] + 1 if rows else 0
    return _first_positions[target]


def continue_target(
    target: PreTrainedModel,
    input_ids: Int[Tensor, "batch rows"],
    cache: Cache,
    tap_layer_ids: Sequence[int] = (),
    logits_to_keep: int = 0,
) -> TargetOutput:
    """Plain causal rows after what `cache` holds, as the target itself would generate them.

    Args:
        logits_to_keep: logits of that many last rows; 0 for all, as in the library.

    One token a forward where recurrent layers have no port: the library's kernels for several tokens
    start from an empty state on some of them (the Mamba-1 layers of Jamba), without a word.
    """
    if not tree_support(target).has_unported_states:
        return run_target(target, input_ids, cache, tap_layer_ids, logits_to_keep=logits_to_keep)
    steps = [run_target(target, column, cache, tap_layer_ids) for column in input_ids.split(1, dim=1)]
    taps = torch.cat([step.taps for step in steps if step.taps is not None], dim=1) if tap_layer_ids else None
    return TargetOutput(torch.cat([step.logits for step in steps[-logits_to_keep:]], dim=1), taps)


@contextmanager
def tapped_layers(target: PreTrainedModel, tap_layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect what the tapped layers return, by id, with hooks that are gone afterwards.

    The same tensors as `output_hidden_states` gives at index id + 1, for which the library would leave
    hooks of its own on every layer. As there, what the last layer returns is taken after the final norm.

    Raises:
        ValueError: an id beyond the target's layers, or a target whose layers cannot be found.
    """
    if not tap_layer_ids:
        yield {}
        return
    decoder = target.get_decoder()
    layers = decoder_layers(target)
    bad = [i for i in tap_layer_ids if not 0 <= i < len(layers)]
    if bad:
        raise ValueError(
            f"tap_layer_ids has {bad}, but the target has {len(layers)} layers (ids from 0); was the "
            "drafter trained for another target?"
        )
    tapped: dict[int, Tensor] = {}

    def keep(layer_idx: int, module: nn.Module, args: Any, output: Any) -> None:
        tapped[layer_idx] = output if isinstance(output, Tensor) else output[0]

    last = len(layers) - 1
    handles = [
        (decoder if i == last else layers[i]).register_forward_hook(partial(keep, i))
        for i in set(tap_layer_ids)
    ]
    try:
        yield tapped
    finally:
        for handle in handles:
            handle.remove()


def decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The target's decoder layers, wherever its architecture keeps them."""
    count = text_config(target).num_hidden_layers
    for module in target.get_decoder().children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"target: no list of {count} decoder layers in {type(target).__name__}; taps cannot be read from it."
    )


def prefill(
    target: PreTrainedModel,
    input_ids: Int[Tensor, "1 rows"],
    cache: Cache,
    tap_layer_ids: Sequence[int] = (),
) -> TargetOutput:
    """Run the prompt into an empty (or partly filled) cache; logits of its last token only.

    Raises:
        ValueError: an empty prompt, more than one row, a cache that does not fit the target, or a target that
            leaves it empty.
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}; give one prompt of at least one token, [1, P]."
        )
    check_cache(target, cache, filled=False)
    if cache_length(cache):
        out = continue_target(target, input_ids, cache, tap_layer_ids, logits_to_keep=1)
    else:
        out = run_target(target, input_ids, cache, tap_layer_ids, logits_to_keep=1)
        check_filled(target, cache)
        learn_sizes(target, cache)
    return TargetOutput(out.logits[:, -1:], out.taps)
