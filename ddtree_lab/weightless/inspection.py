"""What can be said of a model from its config alone: layers, caches, bytes, and which verify method is exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ddtree_lab.drafter_config import DFlashConfig
from ddtree_lab.records import Record, format_bytes, ranges
from ddtree_lab.stages.embedding import resolve_embeddings
from ddtree_lab.stages.support import tree_support
from ddtree_lab.weightless.footprint import (
    LayerFootprint,
    cache_footprint,
    drafter_context_bytes,
    parameter_bytes,
)
from ddtree_lab.weightless.models import Blueprint, build_weightless, build_weightless_drafter, read_blueprint

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

TREE_REASON = (
    "every layer takes a tree mask or has a tree-structured port; a loaded model is tried out once more"
)


@dataclass(frozen=True)
class DrafterFacts:
    """The drafter of a preset."""

    hub_id: str
    num_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    attention: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    context_bytes_per_token: int


@dataclass(frozen=True)
class Inspection(Record):
    """A model as its config describes it.

    Args:
        source: `"preset"`, `"folder"` or `"hub"`.
        layers: what each layer's cache keeps; empty where `cache_unknown` says why it could not be found out.
        num_tensors: weight tensors of a checkpoint, tied ones once.
        num_bytes: of the weights, in `dtype` and in others, by name; `8bit` and `4bit` are bitsandbytes'.
        verify_method: `"tree"` or `"paths"`, the exact way to verify a tree; `verify_reason` says why.
        not_published: of a preset: what a value is instead of published → names of the config's keys.
    """

    name: str
    source: str
    architecture: str
    model_type: str
    dtype: str
    num_tensors: int
    num_parameters: int
    num_bytes: dict[str, int]
    input_path: str
    output_path: str
    tied: bool
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerFootprint, ...]
    cache_unknown: str
    verify_method: str
    verify_reason: str
    drafter: DrafterFacts | None = None
    not_published: dict[str, dict[str, list[str]]] | None = None
    note: str = ""

    @property
    def layer_counts(self) -> dict[str, int]:
        """Layers of each kind, e.g. 48 `linear_attention` and 16 `full_attention`."""
        return dict(Counter(layer.kind for layer in self.layers))

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def recurrent_bytes(self) -> int:
        """States of the recurrent layers, whatever the context; the convolutions' windows apart."""
        return sum(layer.recurrent_bytes for layer in self.layers)

    @property
    def conv_bytes(self) -> int:
        return sum(layer.conv_bytes for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        sums = ("layer_counts", "kv_bytes_per_token", "recurrent_bytes", "conv_bytes")
        return {
            **{key: value for key, value in asdict(self).items() if key != "layers"},
            "num_layers": len(self.layers),
            **{name: getattr(self, name) for name in sums},
            "layers": [asdict(layer) for layer in self.layers],
        }

    def __repr__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.layer_counts.items())
        return f"Inspection({self.name}: {self.num_tensors} tensors, {kinds or 'layers unknown'})"

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        facts = Table.grid(padding=(0, 2))
        facts.add_column(no_wrap=True)
        facts.add_column()
        for name, value in self._facts():
            facts.add_row(name, value)
        title = Text.assemble((self.name, "bold"), f"  {self.architecture}, by its config ({self.source})")
        parts: list[RenderableType] = [title, "", facts]
        if self.layers:
            parts += ["", self._layers_table()]
        return Group(*parts)

    def _facts(self) -> Iterable[tuple[str, str]]:
        yield "tensors", f"{self.num_tensors}, {format_count(self.num_parameters)} parameters"
        yield "weights", ", ".join(f"{format_bytes(size)} {name}" for name, size in self.num_bytes.items())
        tied = "tied" if self.tied else "untied"
        yield (
            "embedding",
            f"{self.input_path} → {self.output_path}, {tied}, {self.vocab_size}×{self.hidden_size}",
        )
        if self.layers:
            counts = " + ".join(f"{count} {kind}" for kind, count in self.layer_counts.items())
            yield "layers", f"{len(self.layers)} = {counts}"
            yield "key-value cache", f"{format_bytes(self.kv_bytes_per_token)} a token"
        else:
            yield "layers", self.cache_unknown
        if self.recurrent_bytes or self.conv_bytes:
            windows = f"{format_bytes(self.conv_bytes)} of convolution windows"
            dtypes = ", ".join(sorted({i.recurrent_dtype for i in self.layers if i.recurrent_dtype}))
            yield (
                "recurrent",
                f"{format_bytes(self.recurrent_bytes)} of {dtypes} states, {windows}, at any length",
            )
        yield "verify", f"{self.verify_method}: {self.verify_reason}"
        if self.drafter is not None:
            d = self.drafter
            size, row = format_bytes(d.num_bytes), format_bytes(d.context_bytes_per_token)
            yield "drafter", f"{d.hub_id}, {d.num_layers} layers: {d.attention}"
            yield (
                "",
                f"taps {', '.join(map(str, d.target_layer_ids))}; block {d.block_size}; mask {d.mask_token_id}",
            )
            yield "", f"{d.num_tensors} tensors, {size} in bfloat16, {row} of context a token"
        for model, replaced in (self.not_published or {}).items():
            told = "; ".join(f"{', '.join(keys)}: {what}" for what, keys in replaced.items())
            if told:
                yield "not published", f"{model} {told}"
        if self.note:
            yield "note", self.note

    def _layers_table(self) -> Table:
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in ("", "kind", "layers", "cache class", "rollback", "a token", "state", "window"):
            right = name in ("", "a token", "state", "window")
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        for alike in _alike(self.layers):
            one = alike[0]
            sizes = [format_bytes(n) if n else "–" for n in (one.bytes_per_token, one.recurrent_bytes)]
            kept = one.conv_bytes and format_bytes(one.conv_bytes)
            table.add_row(
                str(len(alike)), one.kind.removesuffix("_attention"), ranges([i.layer_idx for i in alike], most=3),
                one.class_name, one.rollback, *sizes, kept or (f"{one.window} tokens" if one.window else "–"),
            )  # fmt: skip
        table.caption = "sizes of one layer; the window of sliding attention counts tokens"
        table.caption_justify = "left"
        return table


def inspect_model(
    name: str, dtype: torch.dtype | str | None = None, *, local_files_only: bool | None = None
) -> Inspection:
    """Describe a model without its weights; nothing is downloaded but a hub id's config.

    Args:
        name: a bundled preset (`"qwen3.6-27b"`), a folder or a hub id.
        dtype: of the weights; the checkpoint's own if not given.

    Raises:
        ValueError: no such model, or no causal language model.
    """
    blueprint = read_blueprint(name, local_files_only=local_files_only)
    dtype = torch_dtype(dtype) or blueprint.dtype
    target = build_weightless(blueprint.config, dtype)
    layers, unknown = _layers(target)
    support, embeddings = tree_support(target), resolve_embeddings(target)
    preset = blueprint.preset
    return Inspection(
        name=blueprint.name,
        source=blueprint.source,
        architecture=type(target).__name__,
        model_type=str(target.config.model_type),
        dtype=_name_of(dtype),
        num_tensors=num_stored_tensors(target),
        num_parameters=sum(p.numel() for p in target.parameters()),
        num_bytes=_weights_at(target, blueprint, dtype),
        input_path=embeddings.input_path,
        output_path=embeddings.output_path,
        tied=embeddings.tied,
        vocab_size=embeddings.vocab_size,
        hidden_size=embeddings.hidden_size,
        layers=layers,
        cache_unknown=unknown,
        verify_method="tree" if support.ok else "paths",
        verify_reason=support.reason or TREE_REASON,
        drafter=None if preset is None else _drafter_facts(preset.drafter_id, preset.drafter_config()),
        not_published=None if preset is None else preset.not_published,
        note="" if preset is None else preset.note,
    )


def torch_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by its name.

    Raises:
        ValueError: it is no floating-point dtype of torch.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}; give a floating-point dtype of torch, e.g. 'bfloat16'.")
    return found


def format_count(count: int) -> str:
    """A large number in words.

    >>> format_count(26_895_998_464)
    '26.9 billion'
    >>> format_count(1_880_000)
    '1.88 million'
    """
    for size, word in ((1e9, " billion"), (1e6, " million"), (1e3, " thousand")):
        if count >= size:
            return f"{count / size:.3g}{word}"
    return str(count)


def num_stored_tensors(model: nn.Module) -> int:
    """Tensors that a checkpoint of the model holds; tied ones are stored once."""
    return len({id(tensor) for tensor in model.state_dict(keep_vars=True).values()})


def _layers(target: PreTrainedModel) -> tuple[tuple[LayerFootprint, ...], str]:
    try:
        return cache_footprint(target), ""
    except ValueError as error:
        return (), f"unknown: {error}"


def _weights_at(target: PreTrainedModel, blueprint: Blueprint, dtype: torch.dtype) -> dict[str, int]:
    """Bytes in the asked dtype first, then in the others that one might ask for."""
    sizes = {_name_of(dtype): round(sum(parameter_bytes(target).values()))}
    for other in (torch.float32, torch.bfloat16):
        count = sum(p.numel() for p in target.parameters())
        sizes.setdefault(_name_of(other), count * other.itemsize)
    for bits in ("8bit", "4bit"):
        sizes[bits] = round(sum(parameter_bytes(target, bits).values()))
    return sizes


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _drafter_facts(hub_id: str, config: DFlashConfig) -> DrafterFacts:
    drafter = build_weightless_drafter(config)
    kinds = Counter(kind.removesuffix("_attention") for kind in config.layer_types)
    window = f", window {config.sliding_window}" if config.sliding_window else ""
    return DrafterFacts(
        hub_id=hub_id,
        num_layers=config.num_hidden_layers,
        target_layer_ids=config.target_layer_ids,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        attention=" + ".join(f"{count} {kind}" for kind, count in kinds.items()) + window,
        num_tensors=num_stored_tensors(drafter),
        num_parameters=sum(p.numel() for p in drafter.parameters()),
        num_bytes=sum(p.nbytes for p in drafter.parameters()),
        context_bytes_per_token=drafter_context_bytes(drafter, 1),
    )


def _alike(layers: Sequence[LayerFootprint]) -> list[list[LayerFootprint]]:
    """Layers that differ in nothing but their place, in the order of the first of each group."""
    groups: dict[tuple, list[LayerFootprint]] = {}
    for layer in layers:
        key = (layer.kind, layer.class_name, layer.bytes_per_token, layer.window, tuple(layer.shapes.items()))
        groups.setdefault(key, []).append(layer)
    return list(groups.values())
