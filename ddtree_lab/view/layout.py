"""Where the nodes of a tree are drawn: a tidy tree in O(n), shared by every picture.

Depth runs along x, one unit a level. A node stands in the row of its first child, so the drafter's favourite path, or
the kept one, reads as a straight line from the top left corner. Each further child's subtree is moved down as a whole,
just far enough that at every depth it is below what was placed before. A subtree is remembered by its contours, its
first and last row at each depth (Reingold and Tilford 1981); of two neighbours the shorter contour is walked and then
never again, hence O(n).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int


@dataclass
class _Contour:
    """First and last row at each depth, deepest first, so that the subtree's root is appended last.

    Args:
        shift: to be added to all rows.
    """

    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    shift: int = 0


def tidy_rows(parents: Sequence[int], bonus_under: int | None = None) -> Int[np.ndarray, " node"]:
    """The row (y) of each node, the root in row 0; x is a node's depth.

    Args:
        parents: index of each node's parent, smaller than its own; -1 for the root, which is node 0.
        bonus_under: a node that gets one more child, its first: room for the bonus token in that node's row.

    >>> tidy_rows([-1, 0, 0, 1, 1]).tolist()
    [0, 0, 1, 0, 1]
    >>> tidy_rows([-1, 0, 0, 1, 1], bonus_under=1).tolist()
    [0, 0, 1, 1, 2]
    """
    n = len(parents)
    children: list[list[int]] = [[] for _ in range(n + 1)]
    if bonus_under is not None:
        children[bonus_under].append(n)
    for node in range(1, n):
        children[parents[node]].append(node)
    offsets = [0] * (n + 1)  # of each node from its parent
    contours = [_Contour([0], [0]) for _ in range(n + 1)]
    for node in range(n - 1, -1, -1):  # children before their parents, without recursion
        if children[node]:
            contours[node] = _stack(children[node], contours, offsets)
    rows = np.zeros(n, dtype=np.int64)
    for node in range(1, n):
        rows[node] = rows[parents[node]] + offsets[node]
    return rows


def _stack(nodes: list[int], contours: list[_Contour], offsets: list[int]) -> _Contour:
    """Siblings one below the other and their parent beside the first: the contour around it, offsets filled in."""
    whole = contours[nodes[0]]
    for node in nodes[1:]:
        offsets[node] = _distance(whole, contours[node])
        whole = _joined(whole, contours[node], offsets[node])
    whole.first.append(-whole.shift)
    whole.last.append(-whole.shift)
    return whole


def _distance(above: _Contour, below: _Contour) -> int:
    """How far down `below` has to go to be one row away at every depth that both have."""
    gaps = zip(reversed(above.last), reversed(below.first), strict=False)
    return max(last + above.shift - first - below.shift + 1 for last, first in gaps)


def _joined(above: _Contour, below: _Contour, distance: int) -> _Contour:
    """The contour of both: the deeper one's lists, written over where the other is the outer one."""
    below.shift += distance
    common = min(len(above.first), len(below.first))
    if len(above.first) >= len(below.first):
        for level in range(1, common + 1):
            above.last[-level] = below.last[-level] + below.shift - above.shift
        return above
    for level in range(1, common + 1):
        below.first[-level] = above.first[-level] + above.shift - below.shift
    return below


def tidy_rows_naive(parents: Sequence[int]) -> Int[np.ndarray, " node"]:
    """The same rows with every pair of nodes compared: the definition spelled out."""
    n = len(parents)
    children = [[child for child in range(n) if parents[child] == node] for node in range(n)]

    def placed(node: int) -> list[tuple[int, int, int]]:
        """The subtree's nodes as (node, depth below `node`, row relative to `node`)."""
        found = [(node, 0, 0)]
        for child in children[node]:
            subtree = placed(child)
            gaps = [above - row + 1 for _, d, above in found for _, e, row in subtree if d == e + 1]
            found += [(other, depth + 1, row + max(gaps, default=0)) for other, depth, row in subtree]
        return found

    rows = np.zeros(n, dtype=np.int64)
    for node, _, row in placed(0):
        rows[node] = row
    return rows
