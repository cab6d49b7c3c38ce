"""Tree builder: the drafter's marginals become a best-first tree (DDTree, algorithm 1).

A node's score is the sum of the drafter's log-probabilities along its path. The tree of budget b
holds the b best nodes, in the order in which a best-first heap pops them, so

* parents come before their children and scores never increase,
* the tree of a smaller budget is a prefix of a larger one,
* the sum of `exp(score)` is the drafter's own expectation of the number of accepted drafts.

`build_tree_heap` is the method as published; `build_tree` gives the same tree from fewer ranks, because sorting
the vocabulary costs more than the heap, and compiles the heap (`tree_compiled`) where that pays. No torch is imported
until logits arrive, so saved trees open without it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int

from ddtree_lab.records import Record

if TYPE_CHECKING:
    from rich.tree import Tree as RichTree
    from torch import Tensor

NARROW = 64  # ranks that are tried first: a tree of a thousand nodes seldom has a token beyond the tenth
ROW_BLOCK = 64  # tokens whose largest logit stands for them
CACHED_LOGITS = 2**17  # float32 numbers that fit the second-level cache of most processors
COMPILED_FROM = (
    400_000  # nodes: the interpreted heap has then taken as long as importing numba and loading the other
)
BestFirst = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # parents, depths, ranks, scores


@dataclass(frozen=True, eq=False)
class DraftTree(Record):
    """A draft tree in topological order, the root (the anchor) at index 0.

    Node i is also verify row i, mask row i and pending cache slot `past_length + i`.

    Args:
        token_ids: the token of each node.
        parents: index of the parent, smaller than the node's own; -1 for the root.
        depths: edges from the root; the root has 0.
        ranks: the token's rank in the drafter's distribution at its depth; 0 is its favourite.
            -1 where the drafter did not propose it (the root, a node added by hand).
        log_probs: the drafter's log-probability of the whole path; 0 for the root.
    """

    token_ids: Int[np.ndarray, " node"]
    parents: Int[np.ndarray, " node"]
    depths: Int[np.ndarray, " node"]
    ranks: Int[np.ndarray, " node"]
    log_probs: Float[np.ndarray, " node"]
    _children: list[dict[int, int]] | None = field(default=None, repr=False)

    @classmethod
    def _built(cls, *columns: np.ndarray) -> DraftTree:
        """From the builder, or the first nodes of a tree: checking it would take a tenth of what building it does."""
        tree = object.__new__(cls)
        tree.__dict__.update(zip(cls.__dataclass_fields__, (*columns, None), strict=True))
        return tree

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if n == 0 or self.parents[0] != -1:
            raise ValueError("parents must start with -1: node 0 is the root (the anchor token).")
        order = np.arange(1, n)
        if n > 1 and not ((self.parents[1:] >= 0) & (self.parents[1:] < order)).all():
            bad = int(order[(self.parents[1:] < 0) | (self.parents[1:] >= order)][0])
            raise ValueError(
                f"parents[{bad}] is {self.parents[bad]}; a parent's index must be between 0 and {bad - 1}, "
                "so that parents come before their children."
            )
        if n > 1 and (self.depths[1:] != self.depths[self.parents[1:]] + 1).any():
            raise ValueError("depths do not follow from parents: a child is one deeper than its parent.")

    @classmethod
    def from_parents(
        cls,
        token_ids: Any,
        parents: Any,
        ranks: Any = None,
        log_probs: Any = None,
    ) -> DraftTree:
        """A tree from its tokens and parents; depths are derived, unknown ranks are -1.

        >>> tree = DraftTree.from_parents([5, 7, 8, 9], [-1, 0, 0, 1])
        >>> tree.depths.tolist(), tree.path(3)
        ([0, 1, 1, 2], [0, 1, 3])
        """
        parents = np.asarray(parents, dtype=np.int64)
        n = len(parents)
        depths = np.zeros(n, dtype=np.int64)
        for i in range(1, n):
            if not 0 <= parents[i] < i:
                break  # reported by __post_init__
            depths[i] = depths[parents[i]] + 1
        return cls(
            token_ids=np.asarray(token_ids, dtype=np.int64),
            parents=parents,
            depths=depths,
            ranks=np.full(n, -1, dtype=np.int64) if ranks is None else np.asarray(ranks, dtype=np.int64),
            log_probs=np.zeros(n) if log_probs is None else np.asarray(log_probs, dtype=np.float64),
        )

    @property
    def num_nodes(self) -> int:
        """Nodes, the root counted: rows of the verify pass."""
        return len(self.token_ids)

    @property
    def num_drafted(self) -> int:
        """Drafted nodes, the root not counted: what the budget limits."""
        return self.num_nodes - 1

    @property
    def depth(self) -> int:
        """Depth of the deepest node: the most drafts a round can accept."""
        return int(self.depths.max())

    @property
    def is_chain(self) -> bool:
        return bool((self.parents == np.arange(-1, self.num_nodes - 1)).all())

    @property
    def mass(self) -> float:
        """Σ exp(log_prob) over drafted nodes: the drafter's expected number of accepted drafts."""
        return float(np.exp(self.log_probs[1:]).sum())

    @cached_property
    def visibility(self) -> Bool[np.ndarray, "node node"]:
        """`[i, j]` is True where j is i or an ancestor of i: what row i may attend to."""
        rows = [1]  # as numbers, bit j for node j: Python joins two in a tenth of the time that numpy takes
        for i, parent in enumerate(self.parents[1:].tolist(), start=1):
            rows.append(rows[parent] | 1 << i)
        num_bytes = -(-self.num_nodes // 8)
        packed = np.frombuffer(b"".join(row.to_bytes(num_bytes, "little") for row in rows), dtype=np.uint8)
        bits = np.unpackbits(packed.reshape(-1, num_bytes), axis=1, count=self.num_nodes, bitorder="little")
        return bits.view(bool)

    def children(self, node: int) -> dict[int, int]:
        """Child token id → child node. Of two children with one token the first counts."""
        if self._children is None:
            table: list[dict[int, int]] = [{} for _ in range(self.num_nodes)]
            edges = zip(self.parents[1:].tolist(), self.token_ids[1:].tolist(), strict=True)
            for i, (parent, token) in enumerate(edges, start=1):
                table[parent].setdefault(token, i)
            object.__setattr__(self, "_children", table)
        assert self._children is not None
        return self._children[node]

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(int(self.parents[nodes[-1]]))
        return nodes[::-1]

    def leaves(self) -> list[int]:
        has_child = np.zeros(self.num_nodes, dtype=bool)
        has_child[self.parents[1:]] = True
        return [int(i) for i in np.flatnonzero(~has_child)]

    def prefix(self, budget: int) -> DraftTree:
        """The tree of a smaller budget: the root and the first `budget` pops."""
        return self._first(max(0, budget) + 1)

    def up_to_depth(self, depth: int) -> DraftTree:
        """The tree without nodes deeper than `depth`."""
        keep = self.depths <= depth
        if keep.all():
            return self
        index = np.cumsum(keep) - 1  # old index → new; a kept node's parent is kept too
        parents = np.where(self.parents[keep] < 0, -1, index[self.parents[keep]])
        return DraftTree(
            self.token_ids[keep], parents, self.depths[keep], self.ranks[keep], self.log_probs[keep]
        )

    def _first(self, n: int) -> DraftTree:
        if n >= self.num_nodes:
            return self
        return DraftTree._built(
            self.token_ids[:n], self.parents[:n], self.depths[:n], self.ranks[:n], self.log_probs[:n]
        )

    def __repr__(self) -> str:
        return f"DraftTree({self.num_drafted} drafted nodes, depth {self.depth}, mass {self.mass:.2f})"

    def __rich__(self) -> RichTree:
        from rich.tree import Tree

        branches = [Tree(f"root [bold]{self.token_ids[0]}[/]")]
        for i in range(1, self.num_nodes):
            label = f"{self.token_ids[i]}  [dim]node {i}, rank {self.ranks[i]}, p {np.exp(self.log_probs[i]):.3g}[/]"
            branches.append(branches[self.parents[i]].add(label))
        return branches[0]


def build_tree(draft_logits: Any, budget: int, root_token_id: int = 0) -> DraftTree:
    """The `budget` best nodes of the drafter's product distribution, best first.

    The same tree as `build_tree_heap`. Of equal logits another token may come first, as between two calls of top-k.

    Args:
        draft_logits: [depth, vocab], row d for the token d + 1 after the anchor; a torch tensor or
            an array. Scores are log-softmax in float32 over the whole vocabulary.
        budget: drafted nodes at most; the root is not counted. 0 or less gives the root alone.
        root_token_id: the anchor.

    Raises:
        ValueError: logits of another shape, or with NaN or +inf in them.
    """
    logits = _checked(draft_logits)
    if not len(logits):
        return DraftTree.from_parents([root_token_id], [-1])
    if min(budget, logits.shape[1]) > NARROW:
        log_probs, token_ids = _top(logits, NARROW)
        found = best_first(log_probs, budget, more_ranks=True)
        if found is not None:
            return _tree(found, token_ids, root_token_id)
    log_probs, token_ids = _top(logits, budget)
    return _tree(best_first(log_probs, max(budget, 0)), token_ids, root_token_id)


def build_tree_heap(draft_logits: Any, budget: int, root_token_id: int = 0) -> DraftTree:
    """The published builder: a heap, best first; ties go to the smaller tuple of ranks."""
    log_probs, token_ids = top_log_probs(draft_logits, max(budget, 0))
    return _tree(best_first_heap(log_probs, max(budget, 0)), token_ids, root_token_id)


def build_chain(draft_logits: Any, root_token_id: int = 0) -> DraftTree:
    """The DFlash chain: the drafter's favourite at every depth, one below the other."""
    log_probs, token_ids = top_log_probs(draft_logits, 1)
    depth = len(log_probs)
    return DraftTree(
        token_ids=np.concatenate([[root_token_id], token_ids[:, 0]]).astype(np.int64),
        parents=np.arange(-1, depth),
        depths=np.arange(depth + 1),
        ranks=np.concatenate([[-1], np.zeros(depth, dtype=np.int64)]),
        log_probs=np.concatenate([[0.0], np.cumsum(log_probs[:, 0], dtype=np.float64)]),
    )


def _tree(found: BestFirst | None, token_ids: np.ndarray, root_token_id: int) -> DraftTree:
    assert found is not None
    parents, depths, ranks, scores = found
    if len(parents) == 1:  # nor need there be a token to choose from
        return DraftTree.from_parents([root_token_id], [-1])
    tokens = token_ids[depths - 1, ranks]  # of the root anything
    tokens[0] = root_token_id
    return DraftTree._built(tokens, parents, depths, ranks, scores)


def top_log_probs(draft_logits: Any, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Per depth the `width` best log-probabilities, falling, and their tokens: two of [depth, k].

    No more than `width` ranks of a depth can be in a tree of `width` nodes, and k is no larger
    than the vocabulary. Log-probabilities are rounded to float32, as published, so that two builders agree.
    """
    log_probs, token_ids = _top(_checked(draft_logits), width)
    return log_probs[:, : max(width, 0)], token_ids[:, : max(width, 0)]


def _checked(draft_logits: Any) -> Tensor:
    import torch

    logits = torch.as_tensor(draft_logits).detach()
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"draft_logits has shape {list(logits.shape)}; give [depth, vocab].")
    return logits if logits.is_floating_point() else logits.float()


def _top(logits: Tensor, width: int) -> tuple[np.ndarray, np.ndarray]:
    """`top_log_probs` of checked logits, one rank at least, which shows what is broken.

    A few rows at a time, so that they stay in the processor's cache.
    """
    import torch

    at_once = max(1, CACHED_LOGITS // logits.shape[1])
    k = max(1, min(width, logits.shape[1]))
    _, token_ids = top_logits(logits, k)
    chunks = [
        logits[i : i + at_once].float().log_softmax(-1).gather(1, token_ids[i : i + at_once])
        for i in range(0, max(1, len(logits)), at_once)
    ]
    log_probs = (chunks[0] if len(chunks) == 1 else torch.cat(chunks)).cpu().numpy()
    if np.isnan(log_probs).any():  # in softmax one such logit makes all of its row NaN
        raise ValueError(
            "draft_logits holds NaN or +inf, or a row without a finite value; the drafter's output is "
            "broken (half precision overflows in its tap fusion, use bfloat16 or float32)."
        )
    return log_probs, token_ids.cpu().numpy()


def top_logits(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`torch.topk(logits, k)` over rows, with two small sorts in place of a large one where that is less work.

    A row's k largest lie in its k blocks of largest maximum: a token outside of them is no larger than the
    maxima of k blocks, hence than k tokens.
    """
    import torch

    depth, vocab = logits.shape
    num_blocks = vocab // ROW_BLOCK
    if logits.device.type != "cpu" or vocab % ROW_BLOCK or not 0 < 8 * k <= num_blocks:
        values, token_ids = torch.topk(logits, k, dim=-1)
        return values, token_ids
    blocks = logits.reshape(depth, num_blocks, ROW_BLOCK)
    chosen = blocks.amax(-1).topk(k, dim=-1, sorted=False).indices.sort(-1).values  # (depth, k)
    among = blocks.gather(1, chosen[..., None].expand(-1, -1, ROW_BLOCK)).flatten(1)
    values, places = among.topk(k, dim=-1)
    token_ids = chosen.gather(1, places // ROW_BLOCK) * ROW_BLOCK + places % ROW_BLOCK
    return values, token_ids


def best_first(log_probs: np.ndarray, budget: int, more_ranks: bool = False) -> BestFirst | None:
    """`best_first_heap`, or its compiled twin once so many nodes were grown that it pays."""
    global _nodes_grown
    _nodes_grown += budget
    grow = compiled_heap() if _nodes_grown >= COMPILED_FROM else None
    return (grow or best_first_heap)(log_probs, budget, more_ranks)


_nodes_grown = 0  # in this process


@cache
def compiled_heap() -> Callable[[np.ndarray, int, bool], BestFirst | None] | None:
    """The compiled twin; None where numba is not installed or does not work."""
    try:
        from ddtree_lab.stages.tree_compiled import best_first_compiled
    except (ImportError, RuntimeError):  # no numba, or no folder for what it compiles
        return None
    return best_first_compiled


def best_first_heap(log_probs: np.ndarray, budget: int, more_ranks: bool = False) -> BestFirst | None:
    """Pop the best; push its next sibling and its first child; repeat. [depth, k] → four of [n], the root's first.

    Args:
        more_ranks: the vocabulary is larger than k. None as soon as a node's next sibling is not among the k, as
            it might have been the next best.
    """
    num_depths, width = log_probs.shape
    lp = log_probs.tolist()
    popped = [(-1, 0, -1, 0.0)]  # parent, depth, rank, score; the root
    # (−score, ranks along the path, parent node, parent's score)
    heap: list[tuple[float, tuple[int, ...], int, float]] = (
        [(-lp[0][0], (0,), 0, 0.0)] if num_depths and width and budget else []
    )
    while heap and len(popped) <= budget:
        negative, ranks, parent, parent_score = heap[0]
        depth, rank, node = len(ranks), ranks[-1], len(popped)
        popped.append((parent, depth, rank, -negative))
        if rank + 1 < width:
            sibling = parent_score + lp[depth - 1][rank + 1]
            heapq.heapreplace(heap, (-sibling, (*ranks[:-1], rank + 1), parent, parent_score))
        elif more_ranks:
            return None
        else:
            heapq.heappop(heap)
        if depth < num_depths:
            heapq.heappush(heap, (-(-negative + lp[depth][0]), (*ranks, 0), node, -negative))
    *columns, scores = zip(*popped, strict=True)
    parents, depths, ranks_ = (np.array(column, dtype=np.int64) for column in columns)
    return parents, depths, ranks_, np.array(scores)
