"""The shape of a tree as the tensors that recurrent layers ask for, made once a pass and device."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ddtree_lab.stages.tree import DraftTree

SPARSE_FROM = 40  # pairs of nodes for each that lies on one path; at some 300 nodes of a best-first tree


class TreeTopology:
    """Ancestors and ancestor windows of a tree."""

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree
        self._memo: dict[tuple, Tensor] = {}

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes

    @property
    def parents(self) -> list[int]:
        return self.tree.parents.tolist()

    def ancestors(self, device: torch.device) -> Bool[Tensor, "node node"]:
        """`[i, j]` True where j is i or an ancestor of i; lower triangular, nodes being in order."""
        return self._once(("ancestors", device), lambda: self.tree.visibility, device)

    def conv_columns(self, kernel_size: int, device: torch.device) -> Int[Tensor, "node kernel"]:
        """For each node the columns of `[committed window, nodes]` that its convolution sees.

        The committed window has `kernel_size` columns, the newest last. Column order is oldest
        first, the node itself last, as in the weights of a causal convolution.
        """
        return self._once(("conv", kernel_size, device), lambda: self._conv_columns(kernel_size), device)

    def levels(self, device: torch.device) -> list[Int[Tensor, "_ _"]]:
        """For each depth, from the root's on, the paths of its nodes, root first and the node itself last."""
        return [
            self._once(("level", depth, device), lambda paths=paths: paths, device)
            for depth, paths in enumerate(self._levels)
        ]

    @cached_property
    def _levels(self) -> list[np.ndarray]:
        levels = [np.zeros((1, 1), dtype=np.int64)]
        place = np.zeros(self.num_nodes, dtype=np.int64)  # of a node in its level
        for depth in range(1, self.tree.depth + 1):
            nodes = np.flatnonzero(self.tree.depths == depth)
            above = levels[-1][place[self.tree.parents[nodes]]]
            levels.append(np.concatenate([above, nodes[:, None]], axis=1))
            place[nodes] = np.arange(len(nodes))
        return levels

    @cached_property
    def is_sparse(self) -> bool:
        """Whether so few pairs of nodes lie on one path that it pays to look at no others."""
        return self.num_nodes**2 > SPARSE_FROM * int((self.tree.depths + 1).sum())

    def _conv_columns(self, kernel_size: int) -> np.ndarray:
        # Virtual parents: the root's is the newest committed column, and each committed column's
        # is the one before it. The oldest column is its own, and no node is old enough to ask.
        parent = np.concatenate(
            [np.maximum(np.arange(-1, kernel_size - 1), 0), self.tree.parents + kernel_size]
        )
        columns = [np.arange(self.num_nodes) + kernel_size]
        for _ in range(kernel_size - 1):
            columns.append(parent[columns[-1]])
        return np.stack(columns[::-1], axis=1)

    def _once(self, key: tuple, make: object, device: torch.device) -> Tensor:
        if key not in self._memo:
            self._memo[key] = torch.from_numpy(np.ascontiguousarray(make())).to(device)  # type: ignore[operator]
        return self._memo[key]
