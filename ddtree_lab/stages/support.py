"""Which verify method is exact on a target, and why not where it is not."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from ddtree_lab.compat import is_recurrent, text_config
from ddtree_lab.records import format_bytes
from ddtree_lab.recurrent.ports import find_recurrent_modules, registered_ports
from ddtree_lab.stages.cache import describe_cache, layer_kinds, make_cache, sliding_windows
from ddtree_lab.stages.tree import DraftTree

METHODS = ("auto", "tree", "scan", "paths", "flattened")
MASKABLE_KINDS = {"full_attention", "sliding_attention", "linear_attention"}
# A probe's difference above this share of the logits' range is no rounding; wrong masks give O(1).
PROBE_TOLERANCE = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}

Probe = Callable[[PreTrainedModel], tuple[float, float]]


@dataclass(frozen=True)
class TreeSupport:
    """Whether one masked pass over a tree is exact on a target.

    Args:
        modules: layer index → recurrent module with a port.
        reason: why a tree pass would not be exact; empty if it is.
        has_unported_states: some recurrent layer has no port.
    """

    modules: dict[int, nn.Module]
    reason: str = ""
    has_unported_states: bool = False

    @property
    def ok(self) -> bool:
        return not self.reason


_judged: weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple, TreeSupport]] = weakref.WeakKeyDictionary()


def tree_support(target: PreTrainedModel) -> TreeSupport:
    """Judge a target by its layers alone, without running it; once a model and set of ports."""
    ports = registered_ports()
    if target not in _judged or _judged[target][0] != ports:
        _judged[target] = (ports, _judge(target))
    return _judged[target][1]


def _judge(target: PreTrainedModel) -> TreeSupport:
    cache = make_cache(target)
    modules = find_recurrent_modules(target)
    for i, (layer, kind) in enumerate(zip(cache.layers, layer_kinds(target), strict=False)):
        name = type(layer).__name__
        if is_recurrent(layer):
            if i not in modules or isinstance(layer, DynamicLayer):
                return TreeSupport(
                    modules, f"layer {i} ({kind}) is recurrent and has no tree-structured port", True
                )
        elif type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) and name != "DummyLayer":
            return TreeSupport(modules, f"layer {i} keeps a {name}, whose rows cannot be rearranged")
        elif kind not in MASKABLE_KINDS:
            return TreeSupport(modules, f"layer {i} is {kind}, for which no tree mask is known")
    if not cache.layers:
        return TreeSupport(modules, "the library gives it no cache layers")
    return TreeSupport(modules)


def mask_refusal(target: PreTrainedModel) -> str:
    """Why the target's attention back end cannot take a tree mask, told by its name; empty where it may."""
    backend = attention_backend(target)
    takes = "the lengths of sequences only"
    if "flex" in backend:
        takes = "a block mask of its own"
    elif "flash" not in backend and "paged" not in backend:
        return ""  # sdpa, eager, or one that the trial pass will judge
    return (
        f"{backend} attention takes no 4-D mask but {takes}; a target loaded with attn_implementation='sdpa' verifies "
        "trees in one pass"
    )


def attention_backend(target: PreTrainedModel) -> str:
    """The attention implementation of the decoder, as in `attn_implementation`."""
    return str(text_config(target)._attn_implementation)


_probed: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple, str]] = weakref.WeakKeyDictionary()


def probe_support(target: PreTrainedModel, probe: Probe) -> str:
    """Why a tree pass is not exact on this very model, found by running one; empty if it is.

    An architecture may use what a mask cannot express (positions taken from the cache slot, say),
    and its config does not tell. Run once a model, attention back end, dtype and set of ports.
    """
    return _tried(target, probe, "tree pass", "the paths alone")


def check_continuation(target: PreTrainedModel, probe: Probe) -> None:
    """Refuse a target whose forwards from a cache are not what they are without one, so that no method is exact.

    Such faults are the library's: states kept on the modules and not in the cache, say.

    Raises:
        ValueError: with what the target's code or a trial of `probe` showed.
    """
    known, key = _probed.setdefault(target, {}), ("window", type(target))
    if key not in known:
        known[key] = _unmasked_window(target)
    unsound = known[key] or _tried(target, probe, "continuation from a cache", "the text alone")
    if unsound:
        raise ValueError(
            f"no method is exact on {type(target).__name__}: {unsound}. Decode it without a cache, with the library."
        )


def _unmasked_window(target: PreTrainedModel) -> str:
    """Layers whose cache forgets rows that the model's own code would still look at, as Moshi's."""
    windows = sliding_windows(make_cache(target))
    module = sys.modules[type(target.get_decoder()).__module__]
    makers = ("create_sliding_window_causal_mask", "create_chunked_causal_mask", "create_masks_for_generate")
    own = module.__name__.startswith("transformers.")
    if not windows or not own or any(hasattr(module, name) for name in makers):
        return ""
    return f"its cache keeps {min(windows) - 1} tokens in some layers, but its attention has no such window"


def _tried(target: PreTrainedModel, probe: Probe, what: str, truth: str) -> str:
    """What a trial on the model says, remembered."""
    backend = attention_backend(target)
    dtype = str(target.dtype).removeprefix("torch.")
    known, key = _probed.setdefault(target, {}), (what, backend, dtype, registered_ports())
    if key not in known:
        try:
            error, scale = probe(target)
        except torch.OutOfMemoryError:
            raise  # says nothing about the architecture, and may not happen again
        except (ValueError, TypeError, RuntimeError, AttributeError, LookupError, AssertionError) as fault:
            known[key] = f"a trial {what} failed under {backend} attention ({type(fault).__name__}: {fault})"
        else:
            exact = error <= PROBE_TOLERANCE.get(dtype, 0.1) * scale
            known[key] = "" if exact else (
                f"a trial {what} under {backend} attention differs from {truth} by {error:.2g} "
                f"on logits of scale {scale:.2g}"
            )  # fmt: skip
    return known[key]


def tree_refusal(target: PreTrainedModel, probe: Probe | None) -> str:
    """Why one pass over a tree is not exact on a target: its layers, its back end, or a trial; empty if it is.

    Args:
        probe: the trial; None to do without.
    """
    refusal = tree_support(target).reason or mask_refusal(target)
    return refusal if refusal or probe is None else probe_support(target, probe)


def resolve_method(
    target: PreTrainedModel, cache: Cache, tree: DraftTree, method: str, probe: Probe | None
) -> str:
    """The method to run: what was asked for if it is exact, or the best exact one for `"auto"`.

    Args:
        probe: the trial of a tree pass; None to do without.

    Raises:
        ValueError: an unknown method, or one that would be wrong without saying so.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; choose one of {', '.join(map(repr, METHODS))}.")
    if method == "paths" or (method == "flattened" and not mask_refusal(target)):
        return method
    reason = tree_refusal(target, probe)
    if not reason:
        return "tree" if method == "auto" else method
    if method == "auto":
        return "paths"
    num_leaves = len(tree.leaves())
    port = ", or register a port" if tree_support(target).has_unported_states else ""
    cost = format_bytes(describe_cache(cache).num_bytes * num_leaves)
    raise ValueError(
        f"method={method!r} would not be exact on {type(target).__name__}: {reason}. Use method='paths', which costs "
        f"{num_leaves} batch rows and {cost} of cache copies for this tree{port}."
    )
