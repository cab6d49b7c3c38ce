"""Verifier: the target's logits at every node of a tree, each as if its path were the only text.

Three exact ways and a wrong one:

* `"tree"`: one pass. Attention layers get the tree mask, recurrent layers their tree-structured port.
* `"scan"`: the same pass on the naive recurrences, node by node.
* `"paths"`: every root-to-leaf path is a batch row of a plain forward. Any architecture, slower: the oracle.
* `"flattened"`: what a port does that only passes the mask: recurrent layers run the nodes as one
  chain. Exact on attention-only targets, WRONG on hybrids from the first sibling on. For teaching.

The committed cache is left as it was. What the pass adds, pending key-value rows and recurrent
factors, lives on the `Verification` and reaches the cache only through `commit_path`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ddtree_lab.compat import is_recurrent, iter_states, iter_tensors
from ddtree_lab.offload import execution_device
from ddtree_lab.records import Record
from ddtree_lab.recurrent.factors import Factors
from ddtree_lab.recurrent.ports import find_port, replaced_forwards
from ddtree_lab.recurrent.topology import TreeTopology
from ddtree_lab.stages.cache import (
    cache_length,
    check_cache,
    fork_cache,
    layer_kinds,
    make_cache,
    sliding_windows,
)
from ddtree_lab.stages.forward import continue_target, prefill, run_target
from ddtree_lab.stages.mask import TreeMask, build_mask
from ddtree_lab.stages.support import check_continuation, resolve_method, tree_refusal, tree_support
from ddtree_lab.stages.tree import DraftTree

if TYPE_CHECKING:
    from rich.table import Table

PATHS_PER_PASS = 16  # batch rows of one `paths` forward; each holds a whole copy of the cache


@dataclass(frozen=True, eq=False)
class Verification(Record):
    """What the target says about a tree, and all that a commit needs.

    Args:
        logits: the target's logits at each node, for the token after it.
        method: how they were computed.
        past_length: committed tokens before the root.
        taps: hidden states of the tapped layers at each node, if asked for.
        rows: layer index → keys and values of the nodes, each [1, heads, n, width].
        factors: layer index → what the states after a path are made of.
        states: `flattened` only: layer index → recurrent states after *all* nodes.
        grown: `paths` on a tree of one path only: the cache with all of it.
        committed: the cache's tensors at the time, with their versions, to notice a stale commit.
    """

    tree: DraftTree
    logits: Float[Tensor, "node vocab"]
    method: str
    past_length: int
    taps: Float[Tensor, "node taps_width"] | None = None
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    factors: dict[int, Factors] = field(default_factory=dict)
    states: dict[int, list[tuple[str, int | None, Tensor]]] = field(default_factory=dict)
    grown: Cache | None = None
    committed: tuple[tuple[Tensor, int], ...] = ()

    @property
    def argmax_token_ids(self) -> Int[Tensor, " node"]:
        """The target's greedy token at each node."""
        return self.logits.argmax(-1)

    def __repr__(self) -> str:
        wrong = ", WRONG on recurrent layers" if self.states else ""
        nodes = f"{self.tree.num_nodes} nodes after {self.past_length} tokens"
        return f"Verification({nodes}, method={self.method!r}{wrong})"

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=repr(self), title_justify="left")
        for name in ("node", "token", "target's token", "p", "gap"):
            table.add_column(name, justify="right")
        probabilities = self.logits.float().softmax(-1)
        best = self.logits.float().topk(2, dim=-1)
        for i in range(self.tree.num_nodes):
            gap = best.values[i, 0] - best.values[i, 1]
            token = int(best.indices[i, 0])
            table.add_row(
                str(i),
                str(self.tree.token_ids[i]),
                str(token),
                f"{probabilities[i, token]:.3f}",
                f"{gap:.2f}",
            )
        table.caption = "gap: first minus second logit; below about 0.25 rounding may decide"
        return table


def verify_tree(
    target: PreTrainedModel,
    cache: Cache,
    tree: DraftTree,
    method: str = "auto",
    *,
    mask: TreeMask | None = None,
    tap_layer_ids: Sequence[int] = (),
    unchecked: bool = False,
) -> Verification:
    """The target's logits at every node of `tree`, which hangs below what `cache` holds.

    Args:
        cache: committed tokens, the root not among them; left as it was.
        method: `"auto"` (tree where it is exact, else paths), `"tree"`, `"scan"`, `"paths"`, `"flattened"`.
        mask: the mask of this tree if it was built already.
        tap_layer_ids: layers whose hidden states the drafter wants.
        unchecked: run "tree" or "scan" although a trial of it was not exact: to look at a port in the making.

    Raises:
        ValueError: the cache does not fit the target, or the method would not be exact on it.
    """
    check_cache(target, cache)
    _check_tokens(target, tree)
    method = resolve_method(target, cache, tree, method, probe=None if unchecked else _probe)
    if method != "flattened":
        check_continuation(target, _probe_cache)
    if method == "paths":
        return _verify_paths(target, cache, tree, tap_layer_ids)
    return _verify_masked(target, cache, tree, method, mask, tap_layer_ids)


def _check_tokens(target: PreTrainedModel, tree: DraftTree) -> None:
    rows = target.get_input_embeddings().weight.shape[0]
    if tree.token_ids.min() < 0 or tree.token_ids.max() >= rows:
        bad = int(tree.token_ids.max() if tree.token_ids.max() >= rows else tree.token_ids.min())
        raise ValueError(f"tree has token id {bad}, outside the target's embedding of {rows} rows.")


def _verify_masked(
    target: PreTrainedModel,
    cache: Cache,
    tree: DraftTree,
    method: str,
    mask: TreeMask | None,
    tap_layer_ids: Sequence[int],
) -> Verification:
    """One pass over all nodes as a sequence, with the tree in the mask (and in the ports)."""
    past_length = cache_length(cache)
    mask = _fitting_mask(target, cache, tree, past_length, mask)
    ported = {} if method == "flattened" else tree_support(target).modules
    # Ports only read the committed states, so they may be shared; the naive pass overwrites them.
    fork = fork_cache(cache, clone_states=method == "flattened")
    factors: dict[int, Factors] = {}
    forwards = _tree_forwards(ported, cache, TreeTopology(tree), method == "scan", factors)
    with replaced_forwards(forwards), _recorded_rows(fork) as rows:
        out = run_target(
            target,
            torch.from_numpy(tree.token_ids)[None],
            fork,
            tap_layer_ids,
            attention_mask=_mask_argument(target, cache, mask),
            position_ids=mask.position_ids,
        )
    recurrent = [i for i, layer in enumerate(fork.layers) if is_recurrent(layer) and i not in factors]
    return Verification(
        tree=tree,
        logits=out.logits[0],
        method=method,
        past_length=past_length,
        taps=None if out.taps is None else out.taps[0],
        rows=rows,
        factors=factors,
        states={i: list(iter_states(fork.layers[i])) for i in recurrent},
        committed=fingerprint(cache),
    )


def _tree_forwards(
    modules: dict[int, nn.Module],
    cache: Cache,
    topology: TreeTopology,
    scan: bool,
    factors: dict[int, Factors],
) -> dict[nn.Module, Callable[..., Tensor]]:
    """For each recurrent module a forward over the tree that leaves its factors in `factors`."""

    def forward(
        layer_idx: int, module: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        port = find_port(module)
        assert port is not None
        out, factors[layer_idx] = port.forward(module, hidden_states, cache.layers[layer_idx], topology, scan)
        return out

    return {module: partial(forward, i, module) for i, module in modules.items()}


@contextmanager
def _recorded_rows(fork: Cache) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """Keep the rows that each attention layer of a forked cache is given, as the layer grows."""
    rows: dict[int, tuple[Tensor, Tensor]] = {}

    def recording(
        layer_idx: int, update: Callable, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        rows[layer_idx] = (keys, values)
        return update(keys, values, *args, **kwargs)

    for i, layer in enumerate(fork.layers):
        if hasattr(layer, "update"):
            layer.update = partial(recording, i, layer.update)
    try:
        yield rows
    finally:  # a layer that holds its own method would keep the grown copy alive until the garbage collector runs
        for layer in fork.layers:
            vars(layer).pop("update", None)


def _fitting_mask(
    target: PreTrainedModel, cache: Cache, tree: DraftTree, past_length: int, mask: TreeMask | None
) -> TreeMask:
    embedding = target.get_input_embeddings()
    dtype = embedding.weight.dtype
    if mask is None:
        return build_mask(tree, past_length, dtype, execution_device(embedding), sliding_windows(cache))
    if (mask.num_nodes, mask.past_length) != (tree.num_nodes, past_length):
        raise ValueError(
            f"mask is for {mask.num_nodes} nodes after {mask.past_length} tokens, but the tree has {tree.num_nodes} "
            f"and the cache holds {past_length}; build it with build_mask(tree, past_length)."
        )
    if mask.additive.dtype != dtype:
        raise ValueError(
            f"mask is {mask.additive.dtype}, the target runs in {dtype}; pass that dtype to build_mask."
        )
    if not set(sliding_windows(cache)) <= set(mask.windowed):
        raise ValueError(
            f"mask has no windows for the target's {sorted(set(sliding_windows(cache)))}; pass windows= to build_mask."
        )
    return mask


def _mask_argument(
    target: PreTrainedModel, cache: Cache, mask: TreeMask
) -> Tensor | dict[str, Tensor | None]:
    """The mask as the target's forward takes it: one tensor, or one for each layer type."""
    windows = sliding_windows(cache)
    if not windows:
        return mask.additive  # recurrent layers drop a 4-D mask, and their ports do not need one
    kinds = set(layer_kinds(target))
    if kinds == {"sliding_attention"}:
        return mask.windowed[windows[0]]
    by_kind: dict[str, Tensor | None] = {"full_attention": mask.additive, "linear_attention": None}
    unknown = sorted(kinds - {*by_kind, "sliding_attention"})
    if unknown:
        raise ValueError(
            f"target has {', '.join(unknown)} layers beside sliding ones, for which no mask is known; take 'paths'."
        )
    return {
        kind: mask.windowed[windows[0]] if kind == "sliding_attention" else by_kind[kind] for kind in kinds
    }


def _verify_paths(
    target: PreTrainedModel, cache: Cache, tree: DraftTree, tap_layer_ids: Sequence[int]
) -> Verification:
    """Every root-to-leaf path as a row of a plain forward over copies of the cache.

    Shorter paths are padded on the right by repeating their last token: a causal model's earlier
    positions do not depend on it, and the copies are thrown away.
    """
    paths = [tree.path(leaf) for leaf in tree.leaves()]
    device = execution_device(target.get_input_embeddings())
    logits: dict[int, Tensor] = {}
    taps: dict[int, Tensor] = {}
    for start in range(0, len(paths), PATHS_PER_PASS):
        group = paths[start : start + PATHS_PER_PASS]
        longest = max(map(len, group))
        padded = [path + path[-1:] * (longest - len(path)) for path in group]
        fork = fork_cache(cache)
        if len(group) > 1:
            fork.reorder_cache(torch.zeros(len(group), dtype=torch.long, device=device))
        out = continue_target(target, torch.from_numpy(tree.token_ids[padded]), fork, tap_layer_ids)
        for row, path in enumerate(group):
            for depth, node in enumerate(path):
                logits.setdefault(node, out.logits[row, depth])
                if out.taps is not None:
                    taps.setdefault(node, out.taps[row, depth])
    nodes = range(tree.num_nodes)
    return Verification(
        tree=tree,
        logits=torch.stack([logits[i] for i in nodes]),
        method="paths",
        past_length=cache_length(cache),
        taps=torch.stack([taps[i] for i in nodes]) if taps else None,
        grown=fork if len(paths) == 1 else None,
        committed=fingerprint(cache),
    )


def fingerprint(cache: Cache) -> tuple[tuple[Tensor, int], ...]:
    """The tensors a cache holds and how often each was written: equal while nothing was committed."""
    tensors = (t for layer in cache.layers for t in iter_tensors(layer))
    return tuple((t, 0 if t.is_inference() else t._version) for t in tensors)


def _probe(target: PreTrainedModel) -> tuple[float, float]:
    """Largest difference between a tree pass and the same paths alone, and the scale of the logits."""
    _, cache, tree = _trial(target)
    masked = _verify_masked(target, cache, tree, "tree", None, ()).logits.float()
    alone = _verify_paths(target, cache, tree, ()).logits.float()
    return float((masked - alone).abs().max()), logits_scale(alone)


def _probe_cache(target: PreTrainedModel) -> tuple[float, float]:
    """Difference between paths and forwards of the same texts without a cache, and the scale of the logits.

    The median over nodes: a wrong cache is wrong everywhere, while in half precision a router may send
    one token to another expert.
    """
    before, cache, tree = _trial(target)
    found = _verify_paths(target, cache, tree, ()).logits.float()
    texts = torch.tensor([[*before, *tree.token_ids[tree.path(leaf)].tolist()] for leaf in tree.leaves()])
    rows = run_target(target, texts, None).logits.float()
    alone = torch.stack([rows[0, 6], rows[0, 7], rows[1, 7], rows[0, 8], rows[1, 8]])  # in the tree's order
    return float((found - alone).abs().amax(-1).median()), logits_scale(alone)


def _trial(target: PreTrainedModel) -> tuple[list[int], Cache, DraftTree]:
    """Six tokens, a cache that holds them, and a tree of two branches of two nodes below."""
    rows = target.get_input_embeddings().weight.shape[0]
    ids = [(7 * i + 3) % rows for i in range(12)]
    cache = make_cache(target)
    prefill(target, torch.tensor([ids[:6]]), cache)
    return ids[:6], cache, DraftTree.from_parents(ids[6:11], [-1, 0, 0, 1, 2])


def logits_scale(logits: Tensor) -> float:
    """Largest distance of a logit from its row's mean: what differences are compared with."""
    return float((logits - logits.mean(-1, keepdim=True)).abs().max())


def exact_method(target: PreTrainedModel) -> str:
    """What `"auto"` stands for on a target: `"tree"` where one pass over the tree is exact, else `"paths"`."""
    return "paths" if why_no_tree_pass(target) else "tree"


def why_no_tree_pass(target: PreTrainedModel) -> str:
    """Why one pass over a tree would not be exact on a target; empty where it is."""
    return tree_refusal(target, _probe)
