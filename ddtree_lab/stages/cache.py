"""Cache factory: the right cache layer for every layer of the target, and what each can undo.

Bare `DynamicCache()` gives every layer a key-value cache. On a hybrid that crashes at best; the
config has to be asked which layers are recurrent. The factory does, `describe_cache` shows it,
and `check_cache` refuses a cache that does not fit before a later stage trips over it.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    QuantizedLayer,
    StaticLayer,
)

from ddtree_lab.compat import is_recurrent, layer_tensors, text_config
from ddtree_lab.records import Record, format_bytes

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class LayerReport:
    """One layer of a cache.

    `rollback` says how to undo tokens: `"crop"` cuts rows, `"snapshot"` needs the state from before
    (recurrent states are overwritten, a full sliding window has already dropped old rows),
    `"none"` means there is nothing to undo or no way to.
    """

    layer_idx: int
    kind: str
    class_name: str
    rollback: str
    num_bytes: int
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class CacheReport(Record):
    """What a cache is made of, layer by layer."""

    layers: tuple[LayerReport, ...]
    seq_length: int

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)

    @property
    def is_croppable(self) -> bool:
        """Whether cutting rows undoes tokens in every layer; false for hybrids."""
        return all(layer.rollback != "snapshot" for layer in self.layers)

    def __repr__(self) -> str:
        kinds = {layer.kind: sum(other.kind == layer.kind for other in self.layers) for layer in self.layers}
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        return f"CacheReport({counts}; {self.seq_length} tokens, {format_bytes(self.num_bytes)})"

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(
            title=f"cache: {self.seq_length} tokens, {format_bytes(self.num_bytes)}", title_justify="left"
        )
        for name in ("layer", "kind", "class", "rollback", "bytes", "shapes"):
            table.add_column(name, justify="right" if name in ("layer", "bytes") else "left")
        for layer in self.layers:
            shapes = ", ".join(f"{name} {list(shape)}" for name, shape in layer.shapes.items())
            table.add_row(
                str(layer.layer_idx), layer.kind, layer.class_name, layer.rollback,
                format_bytes(layer.num_bytes), shapes or "empty",
            )  # fmt: skip
        return table


def make_cache(target: PreTrainedModel) -> Cache:
    """An empty cache with the right layer class for every layer of `target`.

    The same as `DynamicCache(config=...)` with the *decoder's* config, which is what knows the
    layer types; a multimodal wrapper keeps it one level down.
    """
    return DynamicCache(config=text_config(target))


def describe_cache(target_or_cache: PreTrainedModel | Cache) -> CacheReport:
    """Per layer: kind, cache class, bytes held now, and how it can be rolled back.

    Args:
        target_or_cache: a model (its empty cache is described) or a cache (with what it holds).
    """
    if isinstance(target_or_cache, Cache):
        cache, kinds = target_or_cache, None
    elif isinstance(target_or_cache, PreTrainedModel):
        cache, kinds = make_cache(target_or_cache), layer_kinds(target_or_cache)
    else:
        raise TypeError(
            f"target_or_cache is a {type(target_or_cache).__name__}; give a transformers model or a Cache."
        )
    layers = []
    for i, layer in enumerate(cache.layers):
        tensors = layer_tensors(layer)
        layers.append(
            LayerReport(
                layer_idx=i,
                kind=kinds[i] if kinds else _kind_of(layer),
                class_name=type(layer).__name__,
                rollback=_rollback_of(layer),
                num_bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
                shapes={name: tuple(t.shape) for name, t in tensors.items()},
            )
        )
    return CacheReport(tuple(layers), cache_length(cache))


def layer_kinds(target: PreTrainedModel) -> list[str]:
    """The kind of each layer that has a cache, `"full_attention"` where the config does not say."""
    config = text_config(target)
    kinds = getattr(config, "layer_types", None)
    count = len(_layer_classes(target)) or config.num_hidden_layers
    if kinds is None:
        kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        return [kind] * count
    return list(kinds)[:count]


_classes: weakref.WeakKeyDictionary[PreTrainedModel, tuple[type, ...]] = weakref.WeakKeyDictionary()


def _layer_classes(target: PreTrainedModel) -> tuple[type, ...]:
    """The class of each layer of a cache made for `target`; asked for in every stage, so found once a model."""
    if target not in _classes:
        _classes[target] = tuple(type(layer) for layer in make_cache(target).layers)
    return _classes[target]


_sizes: weakref.WeakKeyDictionary[PreTrainedModel, list[dict[str, tuple[int, ...]]]] = (
    weakref.WeakKeyDictionary()
)


def learn_sizes(target: PreTrainedModel, cache: Cache) -> None:
    """Remember the sizes of a cache that `target` has just filled: what `check_cache` holds others against."""
    if target not in _sizes:
        _sizes[target] = [_layer_sizes(layer) for layer in cache.layers]


def _layer_sizes(layer: Any) -> dict[str, tuple[int, ...]]:
    """Sizes of a layer's tensors that depend on neither batch nor tokens: heads and widths."""
    rows = ("keys", "values")  # [batch, heads, tokens, width]
    return {
        name: (t.shape[1], t.shape[-1]) if name in rows else tuple(t.shape[1:])
        for name, t in layer_tensors(layer).items()
    }


def _kind_of(layer: Any) -> str:
    if is_recurrent(layer):
        return "hybrid" if isinstance(layer, DynamicLayer) else "linear_attention"
    if getattr(layer, "is_sliding", False):
        return "sliding_attention"
    return "full_attention" if isinstance(layer, (DynamicLayer, StaticLayer)) else "none"


def _rollback_of(layer: Any) -> str:
    if is_recurrent(layer) or getattr(layer, "is_sliding", False):
        return "snapshot"
    return (
        "crop"
        if hasattr(layer, "crop") and hasattr(layer, "keys") and hasattr(layer, "lazy_initialization")
        else "none"
    )


def cache_length(cache: Cache) -> int:
    """Committed tokens. Recurrent layers do not count them, so an attention layer is asked."""
    lengths = [int(layer.get_seq_length()) for layer in cache.layers if hasattr(layer, "get_seq_length")]
    return max(lengths, default=0)


def sliding_windows(cache: Cache) -> list[int]:
    """The window of each sliding layer, in layer order; empty where there is none."""
    return [int(layer.sliding_window) for layer in cache.layers if getattr(layer, "is_sliding", False)]


def check_cache(target: PreTrainedModel, cache: Any, *, filled: bool = True) -> None:
    """Refuse a cache that does not belong to `target`, saying why.

    Args:
        filled: also refuse an empty one, since a tree hangs below at least one committed token.

    Raises:
        TypeError: `cache` is no transformers cache.
        ValueError: its layers do not fit the target's, or it is empty.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"cache is a {type(cache).__name__}; make one with make_cache(target).")
    expected, found = _layer_classes(target), len(cache.layers)
    if filled and cache_length(cache) == 0 and not _has_state(cache):
        bare = " It was made without the target's config, so it has no layers." if found == 0 else ""
        raise ValueError(
            f"cache is empty.{bare} Make it with make_cache(target) and prefill the prompt into it."
        )
    if found == 0 and any(layer_class is not DynamicLayer for layer_class in expected):
        raise ValueError(
            "cache has no layers: it was made without the target's config, which says that they are not all "
            "alike. Make it with make_cache(target)."
        )
    if found != len(expected) and (found or filled):
        raise ValueError(
            f"cache has {found} layers, the target has {len(expected)}; make it with make_cache(target)."
        )
    for i, (have, want) in enumerate(zip(cache.layers, expected, strict=False)):
        if isinstance(have, (StaticLayer, QuantizedLayer)):
            raise ValueError(
                f"cache layer {i} is a {type(have).__name__}, which writes in place; the stages need a "
                "dynamic cache: make it with make_cache(target)."
            )
        if type(have) is not want:
            raise ValueError(
                f"cache layer {i} is a {type(have).__name__}, but this {layer_kinds(target)[i]} layer needs a "
                f"{want.__name__}; a cache made without the target's config gives every layer the "
                "same class. Make it with make_cache(target)."
            )
    for i, (have, sizes) in enumerate(zip(cache.layers, _sizes.get(target, ()), strict=False)):
        for name, size in _layer_sizes(have).items():
            if size != sizes.get(name, size):
                raise ValueError(
                    f"cache layer {i} holds {name} of {list(size)} (heads and widths), the target's are "
                    f"{list(sizes[name])}; another model has filled it. Make it with make_cache(target)."
                )


def check_filled(target: PreTrainedModel, cache: Cache) -> None:
    """Refuse a target that left the cache of its first forward empty, or gave it layers that nothing describes.

    Raises:
        ValueError: nothing could be continued from that cache.
    """
    name, expected, found = type(target).__name__, len(_layer_classes(target)), len(cache.layers)
    if cache_length(cache) == 0 and not _has_state(cache):
        raise ValueError(
            f"target: {name} left the cache empty; it keeps none, or one of its own that cannot be branched."
        )
    if found > expected:
        raise ValueError(
            f"target: {name} filled {found} cache layers where its config describes {expected}, so it runs layers "
            "more than once; of which kind the others are is not known."
        )


def _has_state(cache: Cache) -> bool:
    return any(layer_tensors(layer) for layer in cache.layers)


def shallow_copy(x: Any) -> Any:
    """As `copy.copy` of an object without slots, in a third of its time."""
    twin = object.__new__(type(x))
    vars(twin).update(vars(x))
    return twin


def fork_cache(cache: Cache, *, clone_states: bool = True) -> Cache:
    """A second cache that continues from the same committed tokens, leaving the first untouched.

    Keys and values are shared: dynamic layers grow by concatenation, so the tensors of the original
    are never written. Recurrent states are overwritten by a plain forward, so they are cloned;
    `clone_states=False` shares them too, for a pass that only reads them.
    """
    forked = shallow_copy(cache)
    forked.layers = [_fork_layer(layer, clone_states) for layer in cache.layers]
    return forked


def _fork_layer(layer: Any, clone_states: bool) -> Any:
    if not isinstance(layer, DynamicLayer) and not is_recurrent(layer):
        return copy.deepcopy(layer)
    twin = shallow_copy(layer)  # shares every tensor
    held = vars(twin)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            held[name] = {key: _maybe_clone(state, clone_states) for key, state in value.items()}
        elif clone_states and name not in ("keys", "values"):
            held[name] = _maybe_clone(value, clone_states)
    return twin


def _maybe_clone(value: Any, clone: bool) -> Any:
    return value.clone() if clone and isinstance(value, Tensor) else value
