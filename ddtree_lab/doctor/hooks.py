"""Hooks on a target's decoder layers: what they read is changed for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ddtree_lab.stages.forward import decoder_layers


@contextmanager
def given_rows(target: PreTrainedModel, rows: Tensor | None) -> Iterator[None]:
    """The first rows of what each layer reads are `rows`, [layer, token, hidden], for the length of a block."""
    with ExitStack() as stack:
        for i, layer in enumerate(decoder_layers(target) if rows is not None else ()):
            hook = partial(_give, rows[i])  # type: ignore[index]
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _give(rows: Tensor, module: Any, args: Any, kwargs: Any) -> Any:
    hidden = hidden_of(args, kwargs).clone()
    hidden[:, : len(rows)] = rows.to(hidden)
    return with_hidden(args, kwargs, hidden)


class disturbed(ExitStack):  # noqa: N801 (a context manager that reads like a function)
    """What enters each layer is moved by a unit in the last place, for the length of a block.

    Args:
        reset: before each layer all rows of the batch are set to the first one, which stays undisturbed: what
            one layer makes of rounding. Otherwise it builds up from layer to layer.
    """

    def __init__(self, target: PreTrainedModel, *, reset: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        try:
            layers: list[nn.Module] = list(decoder_layers(target))
        except ValueError:
            layers = []
        if reset:
            for layer in layers:
                hook = partial(_reset_input, generator)
                self.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            return
        for module in (target.get_input_embeddings(), *layers):
            self.callback(module.register_forward_hook(partial(_move_output, generator)).remove)


def _moved(hidden: Tensor, generator: torch.Generator) -> Tensor:
    step = torch.finfo(hidden.dtype).eps * (2 * torch.rand(hidden.shape, generator=generator) - 1)
    return (hidden.float() * (1 + step.to(hidden.device))).to(hidden.dtype)


def _move_output(generator: torch.Generator, module: Any, args: Any, output: Any) -> Any:
    moved = _moved(first_of(output), generator)
    return moved if isinstance(output, Tensor) else (moved, *output[1:])


def _reset_input(generator: torch.Generator, module: Any, args: Any, kwargs: Any) -> Any:
    hidden = hidden_of(args, kwargs)
    moved = _moved(hidden[:1].expand_as(hidden).contiguous(), generator)
    moved[0] = hidden[0]
    return with_hidden(args, kwargs, moved)


def first_of(output: Any) -> Tensor:
    """A layer's hidden states, whether or not it returns more."""
    return output if isinstance(output, Tensor) else output[0]


def hidden_of(args: Any, kwargs: Any) -> Tensor:
    """The hidden states among a layer's arguments."""
    return args[0] if args else kwargs["hidden_states"]


def with_hidden(args: Any, kwargs: Any, hidden: Tensor) -> tuple[Any, Any]:
    """A layer's arguments with other hidden states."""
    return ((hidden, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": hidden})
