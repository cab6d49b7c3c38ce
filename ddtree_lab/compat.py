"""Differences between transformers versions, each found by looking and not by a version number.

* The forward's cache argument is `past_key_values` before 5.24 and `cache` from then on.
* A tensor-parallel plan is an argument of `from_pretrained` before 5.17, a field of `DistributedConfig` later.
* A recurrent cache layer holds its states as tensors before 5.15 and as dicts of tensors later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

RECURRENT_STATE_NAMES = ("conv_states", "recurrent_states")


@lru_cache(maxsize=256)
def _parameters(forward: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def cache_keyword(model: PreTrainedModel) -> str:
    """The name of the forward argument that takes the cache."""
    return "cache" if "cache" in _parameters(type(model).forward) else "past_key_values"


def forward_kwargs(model: PreTrainedModel, **wanted: Any) -> dict[str, Any]:
    """`wanted` without `None`s and without what the model's forward does not name."""
    known = _parameters(type(model).forward)
    return {name: value for name, value in wanted.items() if value is not None and name in known}


def is_tensor_parallel(model: PreTrainedModel) -> bool:
    """Whether the model's layers are split over several processes."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def tensor_parallel_kwargs(plan: str | None) -> dict[str, Any]:
    """The arguments of `from_pretrained` that split layers over the processes of `torchrun` by `plan`."""
    if plan is None:
        return {}
    from transformers.distributed import DistributedConfig

    if "tp_plan" in inspect.signature(DistributedConfig).parameters:
        return {"distributed_config": DistributedConfig(tp_plan=plan)}
    return {"tp_plan": plan}


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the decoder, also inside a multimodal wrapper."""
    return model.config.get_text_config(decoder=True)


def is_recurrent(layer: Any) -> bool:
    """Whether a cache layer holds states that are overwritten, not appended to."""
    return hasattr(layer, "recurrent_states") or hasattr(layer, "conv_states")


def iter_states(layer: Any) -> Iterator[tuple[str, int | None, Tensor]]:
    """Each initialised recurrent state of a cache layer: attribute name, index in it, tensor."""
    for name in RECURRENT_STATE_NAMES:
        held = getattr(layer, name, None)
        items = held.items() if isinstance(held, dict) else [(None, held)]
        for index, tensor in items:
            if isinstance(tensor, Tensor):
                yield name, index, tensor


def get_state(layer: Any, name: str) -> Tensor:
    """The layer's first state called `name` (`"conv_states"` or `"recurrent_states"`)."""
    held = getattr(layer, name, None)
    tensor = next(iter(held.values()), None) if isinstance(held, dict) else held
    if isinstance(tensor, Tensor):
        return tensor
    raise ValueError(f"cache: a {type(layer).__name__} holds no {name} yet; prefill the prompt first.")


def set_state(layer: Any, name: str, tensor: Tensor) -> None:
    """Put a new tensor in place of the layer's first state called `name`; the old one stays as it was."""
    held = getattr(layer, name)
    if isinstance(held, dict):
        held[next(iter(held))] = tensor
    else:
        setattr(layer, name, tensor)


def iter_tensors(layer: Any) -> Iterator[Tensor]:
    """The tensors of `layer_tensors`, without their names."""
    for name in ("keys", "values"):
        held = getattr(layer, name, None)
        if isinstance(held, Tensor) and held.numel():
            yield held
    for _, _, tensor in iter_states(layer):
        yield tensor


def layer_tensors(layer: Any) -> dict[str, Tensor]:
    """Every tensor of committed context in a cache layer, by a readable name."""
    tensors = {name: getattr(layer, name, None) for name in ("keys", "values")}
    found = {name: t for name, t in tensors.items() if isinstance(t, Tensor) and t.numel()}
    for name, index, tensor in iter_states(layer):
        found[name if index is None else f"{name}[{index}]"] = tensor
    return found
