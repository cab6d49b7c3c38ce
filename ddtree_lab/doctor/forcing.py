"""Each layer on clean input: what one layer does wrong, without what the layers before it did.

Errors grow from layer to layer, and so does rounding: on a sensitive target in bfloat16 nothing can be said
from the logits. While a port runs, hooks give every layer the rows that the truth gives it, so that its own
answer is all that differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ddtree_lab.doctor.hooks import first_of, hidden_of, with_hidden
from ddtree_lab.stages.forward import decoder_layers

Tokens = tuple[int, ...]


@dataclass
class Watched:
    """What was seen of a port's forwards.

    Args:
        outputs: tokens of a forward → what each layer returned, the last time.
        arguments: tokens of a forward → the keyword arguments of each layer.

    Forwards over other tokens (a prompt in pieces, paths as batch rows, a trial of the library) are not seen.
    """

    outputs: dict[Tokens, dict[int, Tensor]] = field(default_factory=dict)
    arguments: dict[Tokens, dict[int, dict[str, Any]]] = field(default_factory=dict)

    def rows(self, tokens: Tokens, num_layers: int) -> Float[Tensor, "layer row hidden"] | None:
        """Outputs of a forward over these tokens; None if there was none through all layers."""
        seen = self.outputs.get(tokens, {})
        return None if len(seen) < num_layers else torch.stack([seen[i] for i in range(num_layers)])


@contextmanager
def watched(target: Any, inputs: Mapping[Tokens, Tensor | None]) -> Iterator[Watched]:
    """Watch the forwards of a port, and give their layers clean input.

    Args:
        inputs: tokens of a forward → [layer, row, hidden], what each layer reads; None to watch only.
    """
    seen = Watched()
    tokens: list[Tokens] = [()]

    def note(module: Any, args: Any) -> None:
        ids = args[0] if args else None
        tokens[0] = tuple(ids[0].tolist()) if isinstance(ids, Tensor) and ids.shape[0] == 1 else ()

    def before(layer: int, module: Any, args: Any, kwargs: Any) -> Any:
        key, hidden = tokens[0], hidden_of(args, kwargs)
        if key not in inputs or hidden.shape[:2] != (1, len(key)):
            return None
        seen.arguments.setdefault(key, {})[layer] = kwargs
        clean = inputs[key]
        return None if clean is None else with_hidden(args, kwargs, clean[layer][None].to(hidden))

    def after(layer: int, module: Any, args: Any, output: Any) -> None:
        rows = first_of(output)
        if tokens[0] in inputs and rows.shape[:2] == (1, len(tokens[0])):
            seen.outputs.setdefault(tokens[0], {})[layer] = rows[0].float().cpu()

    with ExitStack() as stack:
        stack.callback(target.get_input_embeddings().register_forward_pre_hook(note).remove)
        for i, module in enumerate(decoder_layers(target)):
            handle = module.register_forward_pre_hook(partial(before, i), with_kwargs=True)
            stack.callback(handle.remove)
            stack.callback(module.register_forward_hook(partial(after, i)).remove)
        yield seen
