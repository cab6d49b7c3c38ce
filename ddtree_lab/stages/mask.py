"""Mask constructor: each node sees the committed context, its ancestors and itself.

The mask only reaches attention layers. Recurrent layers have no mask to honour; what they need
instead is in `ddtree_lab.recurrent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ddtree_lab.records import Record
from ddtree_lab.stages.tree import DraftTree

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, eq=False)
class TreeMask(Record):
    """What the attention layers need to see a tree.

    Args:
        additive: 0 where a row may look, the dtype's minimum elsewhere. Additive rather than bool
            because eager attention *adds* a bool mask, silently (0 and 1).
        position_ids: past_length + depth.
        past_length: committed tokens before the root.
        windowed: the masks of sliding-window layers by window size. Their cache holds the last
            `window - 1` committed rows only, so these masks are narrower.
        tree: what the rows are, where it is known; for pictures.
    """

    additive: Float[Tensor, "1 1 node keys"]
    position_ids: Int[Tensor, "1 node"]
    past_length: int
    windowed: dict[int, Float[Tensor, "1 1 node windowed_keys"]] = field(default_factory=dict)
    tree: DraftTree | None = None

    @property
    def visible(self) -> Bool[Tensor, "node keys"]:
        """True where a row may look."""
        return self.additive[0, 0] == 0

    @property
    def num_nodes(self) -> int:
        return self.additive.shape[-2]

    def __repr__(self) -> str:
        windows = f", windows {sorted(self.windowed)}" if self.windowed else ""
        return f"TreeMask({self.num_nodes} nodes after {self.past_length} tokens{windows})"

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(
            title=f"mask: {self.num_nodes} rows × ({self.past_length} committed + {self.num_nodes} nodes)",
            title_justify="left",
        )
        table.add_column("row", justify="right")
        table.add_column("position", justify="right")
        table.add_column("committed")
        table.add_column("nodes seen (● self, ○ ancestor)")
        seen = self.visible[:, self.past_length :].cpu().numpy()
        for i in range(self.num_nodes):
            row = "".join("●" if j == i else "○" if seen[i, j] else "·" for j in range(self.num_nodes))
            table.add_row(str(i), str(int(self.position_ids[0, i])), "all", row)
        return table


def build_mask(
    tree: DraftTree,
    past_length: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    windows: Sequence[int] = (),
) -> TreeMask:
    """The 4-D additive mask and the position ids of a tree after `past_length` committed tokens.

    Args:
        windows: sliding-window sizes of the target's layers; a query at position p sees keys at
            positions above p − window (the Hugging Face convention, itself included).
    """
    if past_length < 0:
        raise ValueError(f"past_length is {past_length}; it counts committed tokens, so 0 or more.")
    if not dtype.is_floating_point:
        raise ValueError(
            f"dtype is {dtype}; the mask is added to attention scores, so give the target's float dtype."
        )
    if windows and min(windows) < 1:
        raise ValueError(f"windows has {min(windows)}; a window holds at least the query's own position.")
    positions = past_length + tree.depths  # [n]
    windowed = {}
    for window in sorted(set(windows)):
        first_kept = max(0, past_length - (window - 1))  # older rows have left the cache
        committed = np.arange(first_kept, past_length) > positions[:, None] - window  # [n, kept]
        near = tree.visibility & (positions > positions[:, None] - window)
        windowed[window] = _additive(np.concatenate([committed, near], axis=1), dtype, device)
    return TreeMask(
        additive=_additive(tree.visibility, dtype, device, past_length),
        position_ids=torch.from_numpy(positions).to(device)[None],
        past_length=past_length,
        windowed=windowed,
        tree=tree,
    )


def build_mask_naive(
    tree: DraftTree, past_length: int, window: int | None = None
) -> Bool[np.ndarray, "node keys"]:
    """The same visibility, one pair at a time, over all keys: the definition spelled out."""
    n = tree.num_nodes
    visible = np.zeros((n, past_length + n), dtype=bool)
    for query in range(n):
        ancestors = tree.path(query)
        position = past_length + len(ancestors) - 1
        for key in range(past_length + n):
            is_committed = key < past_length
            key_position = key if is_committed else past_length + len(tree.path(key - past_length)) - 1
            on_path = is_committed or key - past_length in ancestors
            visible[query, key] = on_path and (window is None or position - key_position < window)
    return visible


def _additive(
    visible: np.ndarray, dtype: torch.dtype, device: torch.device | str, num_seen: int = 0
) -> Tensor:
    """[n, keys] → (1, 1, n, num_seen + keys), after keys that every row sees."""
    n, num_keys = visible.shape
    mask = torch.zeros((1, 1, n, num_seen + num_keys), dtype=dtype, device=device)
    hidden = torch.from_numpy(~visible).to(device)
    mask[..., num_seen:].masked_fill_(hidden, torch.finfo(dtype).min)
    return mask
