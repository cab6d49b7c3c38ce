"""How many bytes a model's weights, caches and verify passes take, told without weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from ddtree_lab.compat import layer_tensors
from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.stages.cache import describe_cache, layer_kinds, make_cache
from ddtree_lab.stages.forward import run_target
from ddtree_lab.stages.support import tree_support
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.verify import PATHS_PER_PASS, _verify_masked, _verify_paths
from ddtree_lab.weightless.rehearsal import Rehearsal, rehearse, without_weights

QUANTIZATIONS = (None, "8bit", "4bit")
# Bytes a weight, and weights that share one float32 scale (None: a row of the matrix), in bitsandbytes.
BITSANDBYTES: dict[str, tuple[float, int | None]] = {"8bit": (1.0, None), "4bit": (0.5, 64)}
PROBE_TOKENS = 2


@dataclass(frozen=True)
class LayerFootprint:
    """What one layer keeps between passes.

    Args:
        rollback: how it can be undone, as `describe_cache` says.
        bytes_per_token: keys and values of a token.
        window: tokens a sliding layer keeps at most; `None` where there is no bound.
        recurrent_bytes, conv_bytes: states whose size does not depend on the context.
        recurrent_dtype: of the states; empty where there are none. Which one is the library's choice.
        shapes: of the tensors, after `PROBE_TOKENS` tokens.
    """

    layer_idx: int
    kind: str
    class_name: str
    rollback: str
    bytes_per_token: int
    window: int | None
    recurrent_bytes: int
    recurrent_dtype: str
    conv_bytes: int
    shapes: dict[str, tuple[int, ...]]

    def tokens_kept(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)

    def bytes_at(self, context: int) -> int:
        """Bytes after `context` tokens."""
        return self.tokens_kept(context) * self.bytes_per_token + self.recurrent_bytes + self.conv_bytes


def cache_footprint(target: PreTrainedModel) -> tuple[LayerFootprint, ...]:
    """What every layer's cache takes, read off the cache that a pass on the meta device leaves.

    Args:
        target: a model on the meta device.

    Raises:
        ValueError: the model's forward depends on values, so it cannot be run there.
    """
    cache = make_cache(target)
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta")
    with without_weights():
        run_target(target, ids, cache, logits_to_keep=1)
    return tuple(
        LayerFootprint(
            layer_idx=report.layer_idx,
            kind=kind,
            class_name=report.class_name,
            rollback=report.rollback,
            bytes_per_token=_bytes_of(layer, "keys", "values") // PROBE_TOKENS,
            window=int(layer.sliding_window) - 1 if getattr(layer, "is_sliding", False) else None,
            recurrent_bytes=_bytes_of(layer, "recurrent_states"),
            recurrent_dtype=_dtype_of(layer, "recurrent_states"),
            conv_bytes=_bytes_of(layer, "conv_states"),
            shapes=report.shapes,
        )
        for report, layer, kind in zip(
            describe_cache(cache).layers, cache.layers, layer_kinds(target), strict=True
        )
    )


def _bytes_of(layer: object, *names: str) -> int:
    return sum(t.nbytes for name, t in layer_tensors(layer).items() if name.startswith(names))


def _dtype_of(layer: object, name: str) -> str:
    found = (str(t.dtype) for key, t in layer_tensors(layer).items() if key.startswith(name))
    return next(found, "").removeprefix("torch.")


def parameter_bytes(target: nn.Module, quantization: str | None = None) -> dict[str, float]:
    """Bytes of each parameter by name, tied ones once.

    bitsandbytes converts the weights of linear layers, not the embedding, not the head, and not experts
    that are kept as one tensor. Each block of 64 weights (4-bit) or row (8-bit) brings a float32 scale.
    """
    converted = quantized_weights(target) if quantization else frozenset()
    found: dict[str, float] = {}
    for name, parameter in target.named_parameters():
        if name in converted and quantization is not None:
            size, block = BITSANDBYTES[quantization]
            scales = parameter.shape[0] if block is None else parameter.numel() / block
            found[name] = parameter.numel() * size + 4 * scales
        else:
            found[name] = float(parameter.nbytes)
    return found


def quantized_weights(target: nn.Module) -> frozenset[str]:
    """Names of the weights that the library gives to bitsandbytes."""
    if not isinstance(target, PreTrainedModel):
        return frozenset()
    kept = HfQuantizer.get_modules_to_not_convert(target, None, target._keep_in_fp32_modules)
    return frozenset(
        f"{name}.weight"
        for name, module in target.named_modules()
        if type(module) is nn.Linear and should_convert_module(name, kept)
    )


@dataclass(frozen=True)
class VerifyNeeds:
    """What one verify pass over n nodes needs beside weights and committed cache, b being a number's bytes.

    Args:
        method: `"tree"`, or `"paths"` where a tree pass is not exact.
        num_nodes: n, the root among them.
        logits: n · vocabulary · b.
        taps: n · tapped layers · hidden size · b.
        mask: n · (context + n) · b; none for paths.
        cache_copy: (context + 2 n) · key-value bytes of a token: the nodes' own rows for the commit, and a
            copy beside the committed cache, which grows by concatenation. For paths a cache for each row.
        factors: for each recurrent layer 4 · n · (key width + heads · (d_v + 1)), kept instead of a state for
            each node, and n · channels · b inputs of its convolution; none for paths.
        working: what the pass takes at its peak beyond all these; by rehearsal, with fused attention.
        snapshots: not needed, for comparison: n copies of the recurrent and convolution states.
    """

    method: str
    num_nodes: int
    logits: int
    taps: int
    mask: int
    cache_copy: int
    factors: int
    working: int = 0
    snapshots: int = 0

    @property
    def held(self) -> int:
        return self.logits + self.taps + self.mask + self.cache_copy + self.factors

    @property
    def total(self) -> int:
        return self.held + self.working


def verify_formulas(
    target: PreTrainedModel,
    layers: Sequence[LayerFootprint],
    *,
    tree_budget: int,
    context: int,
    num_taps: int = 0,
    method: str = "tree",
) -> VerifyNeeds:
    """What a pass over `tree_budget` drafted nodes after `context` tokens holds, by the formulas of `VerifyNeeds`."""
    n, is_tree = tree_budget + 1, method == "tree"
    weight = target.get_input_embeddings().weight
    hidden, size = weight.shape[1], weight.element_size()
    rows = min(PATHS_PER_PASS, max(tree_budget, 1))
    return VerifyNeeds(
        method=method,
        num_nodes=n,
        logits=n * target.get_output_embeddings().weight.shape[0] * size,
        taps=n * num_taps * hidden * size,
        mask=n * (context + n) * size if is_tree else 0,
        cache_copy=sum(
            layer.bytes_per_token * (layer.tokens_kept(context) + 2 * n)
            if is_tree
            else rows * layer.bytes_at(context)
            for layer in layers
        ),
        factors=sum(_factor_bytes(layer, n, size) for layer in layers) if is_tree else 0,
        snapshots=n * sum(layer.recurrent_bytes + layer.conv_bytes for layer in layers),
    )


def _factor_bytes(layer: LayerFootprint, n: int, size: int) -> int:
    shapes = {name.split("[")[0]: shape for name, shape in layer.shapes.items()}
    if "recurrent_states" not in shapes:
        return 0
    _, heads, key_dim, value_dim = shapes["recurrent_states"]
    channels = shapes["conv_states"][1] if "conv_states" in shapes else 0
    # The convolution's channels are queries, keys and values; several value heads may share a key head.
    key_width = (channels - heads * value_dim) // 2 if channels else heads * key_dim
    return 4 * n * (key_width + heads * (value_dim + 1)) + n * channels * size


@dataclass(frozen=True)
class RoundNeeds:
    """What a decode needs beside weights, per stage: the caches stay, the rest is gone after the stage.

    Args:
        cache_layers: what each layer keeps.
        prefill: at the peak of the prompt's pass, beyond the cache it leaves.
        verify: of a tree of the budget.
        draft: logits of a block and their log-probabilities, (block − 1) · vocabulary · (b + 4), or what the
            prompt's taps take on their way into the drafter's context, whichever is more.
        drafter_context: the drafter's keys and values.
    """

    cache_layers: tuple[LayerFootprint, ...]
    prefill: int
    verify: VerifyNeeds
    draft: int = 0
    drafter_context: int = 0

    @property
    def working(self) -> int:
        """The widest stage. Stages run one after the other, so this is what has to be free."""
        return max(self.prefill, self.verify.total, self.draft)


def round_needs(
    target: PreTrainedModel, drafter: DFlashDrafter | None, *, tree_budget: int, context: int
) -> RoundNeeds:
    """Rehearse the stages of a round on the meta device.

    Args:
        target, drafter: on the meta device.
        tree_budget: drafted nodes.
        context: tokens of the prompt.

    Raises:
        ValueError: the target cannot be run without weights.
    """
    taps = drafter.config.target_layer_ids if drafter is not None else ()
    layers, weights = cache_footprint(target), _tensors_of(target)
    cache = make_cache(target)
    ids = torch.zeros(1, context, dtype=torch.long, device="meta")
    prefill = rehearse(partial(run_target, target, ids, cache, taps, logits_to_keep=1), weights)
    method = "tree" if tree_support(target).ok else "paths"
    held = verify_formulas(
        target, layers, tree_budget=tree_budget, context=context, num_taps=len(taps), method=method
    )
    pass_peak = _rehearse_verify(target, cache, tree_budget, taps, method).peak
    return RoundNeeds(
        cache_layers=layers,
        prefill=max(0, prefill.peak - sum(layer.bytes_at(context) for layer in layers)),
        verify=replace(held, working=max(0, pass_peak - held.held)),
        draft=0 if drafter is None else _draft_bytes(drafter, context),
        drafter_context=0 if drafter is None else drafter_context_bytes(drafter, context),
    )


def _rehearse_verify(
    target: PreTrainedModel, cache: Cache, tree_budget: int, taps: Sequence[int], method: str
) -> Rehearsal:
    """A pass over a tree with as many branches as go into one pass of paths; for a tree pass only n matters."""
    parents = [-1] + [max(0, node - PATHS_PER_PASS) for node in range(1, tree_budget + 1)]
    rows = target.get_input_embeddings().weight.shape[0]
    tree = DraftTree.from_parents([node % rows for node in range(len(parents))], parents)
    committed = [t for layer in cache.layers for t in layer_tensors(layer).values()]
    run = (
        partial(_verify_masked, target, cache, tree, method, None, taps)  # verify_tree would try it out first
        if method == "tree"
        else partial(_verify_paths, target, cache, tree, taps)
    )
    return rehearse(run, (*_tensors_of(target), *committed))


def _draft_bytes(drafter: DFlashDrafter, context: int) -> int:
    config, size = drafter.config, drafter.fc.weight.element_size()
    taps = torch.empty(1, context, drafter.fc.in_features, dtype=drafter.dtype, device="meta")
    positions = torch.zeros(1, context, dtype=torch.long, device="meta")
    extended = rehearse(partial(drafter.extend_context, taps, positions), (*_tensors_of(drafter), positions))
    return max(taps.nbytes + extended.working, (config.block_size - 1) * config.vocab_size * (size + 4))


def drafter_context_bytes(drafter: DFlashDrafter, context: int) -> int:
    """Keys and values of every drafter layer for `context` committed tokens."""
    config = drafter.config
    row = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    return context * row * drafter.fc.weight.element_size()


def _tensors_of(model: nn.Module) -> tuple[Tensor, ...]:
    return (*model.parameters(), *model.buffers())
