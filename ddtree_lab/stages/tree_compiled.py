"""`best_first_heap` compiled by numba (extra `fast`): the same nodes in the same order, ties included.

A candidate is a number; arrays hold its score, depth, rank, and the candidate above it. The heap holds candidates.
Importing this module imports numba; the first call compiles, or loads what an earlier process has compiled.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np
from numba import njit

from ddtree_lab.stages.tree import BestFirst

# numba reads the functions themselves: `no_type_check` keeps runtime type checkers from wrapping them.


def best_first_compiled(log_probs: np.ndarray, budget: int, more_ranks: bool = False) -> BestFirst | None:
    """As `tree.best_first_heap`."""
    budget = max(budget, 0) if log_probs.size else 0
    popped, nodes, above, depths, ranks, scores = _grow(log_probs.astype(np.float64), budget, more_ranks)
    if not len(popped):
        return None
    parents = nodes[above[popped]]
    parents[0] = -1  # of the root
    return parents, depths[popped], ranks[popped], scores[popped]


@njit(cache=True)
@no_type_check
def _grow(log_probs, budget, more_ranks):
    """Candidates in the order they are popped (none where ranks are missing), node of each candidate, and the arrays.

    Candidate 0 is the root, node 0, popped before all others.
    """
    num_depths, width = log_probs.shape
    most = 2 * budget + 2  # each pop makes two candidates at most
    scores, depths = np.zeros(most), np.zeros(most, np.int64)
    ranks, above, nodes = np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64)
    heap, popped = np.empty(most, np.int64), np.zeros(budget + 1, np.int64)
    ranks[0], in_heap, made, done = -1, 0, 1, 1
    if budget:
        scores[1], depths[1], heap[0] = log_probs[0, 0], 1, 1
        in_heap, made = 1, 2
    while in_heap and done <= budget:
        best = heap[0]
        popped[done], nodes[best] = best, done
        done += 1
        depth, rank = depths[best], ranks[best] + 1
        if rank < width:  # its next sibling takes its place
            scores[made] = scores[above[best]] + log_probs[depth - 1, rank]
            depths[made], ranks[made], above[made], heap[0] = depth, rank, above[best], made
            made += 1
        elif more_ranks:
            return popped[:0], nodes, above, depths, ranks, scores
        else:
            in_heap -= 1
            heap[0] = heap[in_heap]
        _sink(heap, in_heap, scores, depths, ranks, above)
        if depth < num_depths:  # its first child
            scores[made] = scores[best] + log_probs[depth, 0]
            depths[made], above[made], heap[in_heap] = depth + 1, best, made
            in_heap += 1
            made += 1
            _rise(heap, in_heap, scores, depths, ranks, above)
    return popped[:done], nodes, above, depths, ranks, scores


@njit(cache=True)
@no_type_check
def _comes_before(a, b, scores, depths, ranks, above):
    """The better score first; of equal ones the smaller tuple of ranks."""
    if scores[a] != scores[b]:
        return scores[a] > scores[b]
    x, y = a, b
    while depths[x] > depths[y]:
        x = above[x]
    while depths[y] > depths[x]:
        y = above[y]
    if x == y:  # one is above the other
        return depths[a] < depths[b]
    while above[x] != above[y]:
        x, y = above[x], above[y]
    return ranks[x] < ranks[y]


@njit(cache=True)
@no_type_check
def _sink(heap, size, scores, depths, ranks, above):
    """Move the first candidate of the heap down to where it belongs."""
    place, child = 0, 1
    while child < size:
        if child + 1 < size and _comes_before(heap[child + 1], heap[child], scores, depths, ranks, above):
            child += 1
        if not _comes_before(heap[child], heap[place], scores, depths, ranks, above):
            return
        heap[place], heap[child] = heap[child], heap[place]
        place, child = child, 2 * child + 1


@njit(cache=True)
@no_type_check
def _rise(heap, size, scores, depths, ranks, above):
    """Move the last candidate of the heap up to where it belongs."""
    place = size - 1
    while place and _comes_before(heap[place], heap[(place - 1) // 2], scores, depths, ranks, above):
        parent = (place - 1) // 2
        heap[place], heap[parent] = heap[parent], heap[place]
        place = parent
