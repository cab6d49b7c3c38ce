"""The shape of a tree as the tensors that recurrent layers ask for, made once a pass and device."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ddtree_lab.stages.tree import DraftTree


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
