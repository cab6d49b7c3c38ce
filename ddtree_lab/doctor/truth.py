"""The truth about a target, and how far rounding alone may move it.

The truth is the slowest obvious method: one forward of a whole text without any cache. How much of a
difference rounding explains is measured on the very same text, in two ways: copies of it run as batch rows
in which what enters each layer is disturbed by one unit in the last place, and plain decoding, token by
token. The first sees a router near a tie, a text on which the target is sensitive, the precision it runs in;
the second what another order of sums does inside a layer (a decay summed over a long chunk, say).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ddtree_lab.compat import layer_tensors
from ddtree_lab.doctor.hooks import disturbed, first_of, given_rows, hidden_of
from ddtree_lab.stages.cache import make_cache
from ddtree_lab.stages.forward import decoder_layers, run_target

Tokens = tuple[int, ...]
State = tuple[str, int, Tensor, float]  # tensor's name, layer, numbers, the difference rounding explains

NUM_DISTURBED = 6  # disturbed copies of each text
# Times the largest of these differences. In 49 clean examinations (13 prompts on the embedded pair, three seeds of each
# small target in float32 and bfloat16) nothing used more than 0.52 of it; in float32 the bugs of the verify pass move
# logits by more than ten thousand times a disturbed copy's difference.
ALLOWED = 4.0
LEAST = 1e-6  # of the largest value: nothing is asked to be more exact
STATE_WIDTHS = 16384  # numbers kept of each tensor of a cache: whole rows thinned out along their width


@dataclass(frozen=True)
class Known:
    """A true answer, and the difference to it that rounding explains, row by row.

    Args:
        values: one row a node, token or tensor.
        slack: of each row.
    """

    values: Float[Tensor, "row width"]
    slack: Float[Tensor, " row"]

    def excess(self, answer: Tensor) -> Float[Tensor, " row"]:
        """Each row's largest difference over its slack; above 1 it is no rounding."""
        return row_distance(answer, self.values) / self.slack

    @classmethod
    def exactly(cls, values: Tensor) -> Known:
        """Whole numbers, where any difference counts."""
        rows = values.double().reshape(len(values), -1)
        return cls(rows, torch.full((len(rows),), 0.5, dtype=torch.float64))

    @classmethod
    def joined(cls, parts: Sequence[Known]) -> Known:
        return cls(torch.cat([part.values for part in parts]), torch.cat([part.slack for part in parts]))


def row_distance(one: Tensor, other: Tensor) -> Float[Tensor, " row"]:
    """Largest difference in each row; infinite values count as equal where both have them."""
    both = (one == other) | (one.isinf() & other.isinf())
    apart = torch.where(both, 0.0, (one.double() - other.double()).abs().nan_to_num(torch.inf))
    return apart.amax(-1)


@dataclass(frozen=True)
class LayerTruth:
    """What each decoder layer reads and returns along a text.

    Args:
        inputs: of each layer.
        outputs: of each layer.
        slack: of each layer and token: how far rounding at the layer's own input moves its output.
    """

    inputs: Float[Tensor, "layer token hidden"]
    outputs: Float[Tensor, "layer token hidden"]
    slack: Float[Tensor, "layer token"]

    def until(self, length: int) -> LayerTruth:
        """The same of the first tokens."""
        return LayerTruth(self.inputs[:, :length], self.outputs[:, :length], self.slack[:, :length])

    def followed_by(self, longer: LayerTruth) -> LayerTruth:
        """These tokens, then what a longer text has after them."""
        length = self.slack.shape[1]
        parts = ((self.inputs, longer.inputs), (self.outputs, longer.outputs), (self.slack, longer.slack))
        return LayerTruth(*(torch.cat([mine, other[:, length:]], dim=1) for mine, other in parts))


class Truth:
    """Logits, layer outputs and cache contents of a target along texts, each computed once.

    Args:
        shortest: tokens of the shortest text that is asked for; of longer ones every prefix down to it is
            known from the same forward.
    """

    def __init__(self, target: PreTrainedModel, shortest: int) -> None:
        self.target, self.shortest = target, shortest
        self.num_forwards = 0
        self._logits: dict[Tokens, tuple[Tensor, float]] = {}
        self._layers: dict[Tokens, LayerTruth] = {}
        self._controls: dict[tuple[Tokens, bool], dict[tuple[str, int], Tensor]] = {}
        self._states: dict[tuple[Tokens, bool], list[State]] = {}

    def logits(self, text: Sequence[int]) -> Float[Tensor, " vocab"]:
        """After a text."""
        return self._after(text)[0]

    def slack(self, text: Sequence[int]) -> float:
        """Largest difference of these logits that rounding explains."""
        return self._after(text)[1]

    def after(self, texts: Sequence[Sequence[int]]) -> Known:
        """The logits after each text; the longest are run, the others are their prefixes if they can be."""
        for text in sorted(texts, key=len, reverse=True):
            self._after(text)
        rows = [self._after(text) for text in texts]
        return Known(torch.stack([row for row, _ in rows]), torch.tensor([slack for _, slack in rows]))

    def _after(self, text: Sequence[int]) -> tuple[Tensor, float]:
        key = tuple(int(token) for token in text)
        if key not in self._logits:
            self._run(key)
        return self._logits[key]

    def _run(self, key: Tokens) -> None:
        first = min(len(key), self.shortest) - 1
        kept = len(key) - first
        ids = torch.tensor([key])
        alone = run_target(self.target, ids, None, logits_to_keep=kept).logits[0, -kept:].float().cpu()
        with disturbed(self.target, reset=False):
            batch = ids.expand(NUM_DISTURBED, -1)
            moved = run_target(self.target, batch, None, logits_to_keep=kept).logits[:, -kept:].float().cpu()
        self.num_forwards += 2
        control = self._step_by_step(key)
        spread = torch.maximum((moved - alone).abs().amax((0, 2)), (control - alone).abs().amax(-1))
        slack = slack_of(spread, alone)
        for i in range(kept):
            self._logits.setdefault(key[: first + i + 1], (alone[i], float(slack[i])))

    def _step_by_step(
        self, key: Tokens, given: Tensor | None = None, each: Callable[[Tokens, Cache], object] | None = None
    ) -> Float[Tensor, "row vocab"]:
        """The control: what plain decoding does; its logits from the shortest prefix on.

        Args:
            given: [layer, token, hidden], what the layers read.
            each: is told every prefix and the cache that holds it.
        """
        cache, first = make_cache(self.target), min(len(key), self.shortest)
        rows = []
        for start, end in ((0, first), *((i, i + 1) for i in range(first, len(key)))):
            with given_rows(self.target, None if given is None else given[:, start:end]):
                out = run_target(self.target, torch.tensor([key[start:end]]), cache, logits_to_keep=1)
            rows.append(out.logits[0, -1].float().cpu())
            if each is not None:
                each(key[:end], cache)
        self.num_forwards += len(rows)
        return torch.stack(rows)

    def layers(self, text: Sequence[int]) -> LayerTruth:
        """What the layers read and return along a text, each layer's rounding apart.

        Texts that begin alike are given the same rows there: two forwards of one text would differ by the
        rounding of all layers together.
        """
        key = tuple(int(token) for token in text)
        if key not in self._layers:
            self._layers[key] = self._layers_along(key)
        return self._layers[key]

    def _layers_along(self, key: Tokens) -> LayerTruth:
        like = max(self._layers, key=lambda other: _common(key, other), default=())
        common = _common(key, like)
        known = self._layers[like].until(common) if common else None
        if known is not None and common == len(key):
            return known
        ids = torch.tensor([key])
        given = None if known is None else known.inputs
        inputs, outputs = self._seen(ids, given, is_disturbed=False)
        _, moved = self._seen(ids.expand(NUM_DISTURBED + 1, -1), inputs[:, 0], is_disturbed=True)
        _, control = self._seen_by(lambda: self._step_by_step(key, inputs[:, 0]))
        spread = torch.maximum((moved - outputs).abs().amax((1, 3)), (control - outputs).abs().amax((1, 3)))
        slack = slack_of(spread, outputs[:, 0])
        found = LayerTruth(inputs[:, 0], outputs[:, 0], slack)
        return found if known is None else known.followed_by(found)

    def _seen(self, ids: Tensor, given: Tensor | None, *, is_disturbed: bool) -> tuple[Tensor, Tensor]:
        """`_seen_by` one forward."""
        self.num_forwards += 1
        with (
            given_rows(self.target, given),
            disturbed(self.target, reset=True) if is_disturbed else nullcontext(),
        ):
            return self._seen_by(lambda: run_target(self.target, ids, None, logits_to_keep=1))

    def _seen_by(self, run: Callable[[], object]) -> tuple[Tensor, Tensor]:
        """Inputs and outputs of every layer while something runs, [layer, batch, token, hidden]."""
        layers = decoder_layers(self.target)
        inputs: list[list[Tensor]] = [[] for _ in layers]
        outputs: list[list[Tensor]] = [[] for _ in layers]

        def keep(i: int, module: Any, args: Any, kwargs: Any, output: Any) -> None:
            inputs[i].append(hidden_of(args, kwargs).float().cpu())
            outputs[i].append(first_of(output).float().cpu())

        with ExitStack() as stack:
            for i, layer in enumerate(layers):
                stack.callback(layer.register_forward_hook(partial(keep, i), with_kwargs=True).remove)
            run()
        read, returned = (torch.stack([torch.cat(p, dim=1) for p in parts]) for parts in (inputs, outputs))
        return read, returned

    def states(self, text: Sequence[int], *, on_clean_input: bool) -> list[State]:
        """Each tensor in a cache that holds a text.

        Args:
            on_clean_input: the layers are given what `layers` has for the text.
        """
        key = tuple(int(token) for token in text)
        if (key, on_clean_input) not in self._states:
            given = self.layers(key).inputs if on_clean_input else None
            cache, moved = make_cache(self.target), make_cache(self.target)
            with given_rows(self.target, given):
                run_target(self.target, torch.tensor([key]), cache, logits_to_keep=1)
                with disturbed(self.target, reset=on_clean_input):
                    copies = torch.tensor([key] * (NUM_DISTURBED + 1))
                    run_target(self.target, copies, moved, logits_to_keep=1)
            self.num_forwards += 2
            others = [{(name, i): rows for name, i, rows in cache_rows(moved)}, self._control(key, given)]
            self._states[key, on_clean_input] = [
                (
                    name,
                    i,
                    rows,
                    float(slack_of(_spread(rows, [other[name, i] for other in others]), rows[None])),
                )
                for name, i, rows in cache_rows(cache)
            ]
        return self._states[key, on_clean_input]

    def _control(self, key: Tokens, given: Tensor | None) -> dict[tuple[str, int], Tensor]:
        """What plain decoding leaves in the cache; kept for every prefix of a text on the way."""
        flagged = given is not None

        def keep(prefix: Tokens, cache: Cache) -> None:
            held = {(name, i): rows.clone() for name, i, rows in cache_rows(cache)}
            self._controls[prefix, flagged] = held

        if (key, flagged) not in self._controls:
            self._step_by_step(key, given, keep)
        return self._controls[key, flagged]


def _spread(rows: Tensor, others: Sequence[Tensor]) -> Tensor:
    return torch.stack([(other - rows).abs().max() for other in others]).amax()[None]


def _common(one: Tokens, other: Tokens) -> int:
    """Tokens at the beginning that two texts share."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def slack_of(spread: Tensor, values: Tensor) -> Tensor:
    """Allowed differences from the spread of disturbed copies."""
    centred = values - values.mean(-1, keepdim=True)
    largest = float(centred.abs().max()) if centred.numel() else 0.0
    return (ALLOWED * spread).clamp(min=LEAST * max(largest, 1e-3))


def cache_rows(cache: Any) -> list[tuple[str, int, Tensor]]:
    """(tensor's name, layer, numbers) of what a cache holds, [batch, …]; wide ones thinned out along their width."""
    rows = []
    for i, layer in enumerate(cache.layers):
        for name, tensor in layer_tensors(layer).items():
            step = max(1, min(tensor.shape[-1], tensor[0].numel() // STATE_WIDTHS))
            rows.append((name.partition("[")[0], i, tensor[..., ::step].float().cpu()))
    return rows
