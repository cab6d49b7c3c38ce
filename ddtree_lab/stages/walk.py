"""Tree walk: follow the target's own tokens from the root for as long as the tree has them.

`linear_chain` is the walk of an engine that verifies chains, and wrong on a tree; more verifiers are compared in
`ddtree_lab.verifiers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddtree_lab.records import Record
from ddtree_lab.stages.tree import DraftTree

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Walk(Record):
    """What a round emits.

    Args:
        path: accepted nodes, root first.
        target_token_ids: the target's choice at every node, as it was given.
        tree: what was walked, where it is known; for pictures.
    """

    path: tuple[int, ...]
    target_token_ids: tuple[int, ...]
    tree: DraftTree | None = field(default=None, compare=False)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens the round emits: the accepted drafts, then the bonus token."""
        if self.tree is None:
            return tuple(self.target_token_ids[node] for node in self.path)
        # The same, unless somebody forced the path: then its tokens are not what the target chose.
        return (*self.tree.token_ids[list(self.path[1:])].tolist(), self.bonus_token_id)

    @property
    def bonus_token_id(self) -> int:
        """The target's token at the end of the path, no child there; the next round's anchor."""
        return self.target_token_ids[self.path[-1]]

    @property
    def num_accepted_drafts(self) -> int:
        """Drafted tokens kept: nodes of the path without the root."""
        return len(self.path) - 1

    @property
    def num_emitted_tokens(self) -> int:
        """Accepted drafts and the bonus token: the paper's τ for this round."""
        return len(self.path)

    def __repr__(self) -> str:
        return f"Walk(path={list(self.path)}, bonus_token_id={self.bonus_token_id})"

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(
            title=f"walk: {self.num_accepted_drafts} accepted drafts, {self.num_emitted_tokens} emitted tokens",
            title_justify="left",
        )
        for name in ("depth", "node", "emits", "what"):
            table.add_column(name, justify="right" if name != "what" else "left")
        for depth, node in enumerate(self.path):
            is_bonus = depth == len(self.path) - 1
            what = (
                "bonus: no child of the last node" if is_bonus else f"accepted: node {self.path[depth + 1]}"
            )
            table.add_row(str(depth), str(node), str(self.token_ids[depth]), what)
        return table


def walk_tree(tree: DraftTree, target_token_ids: Any) -> Walk:
    """Walk from the root: while the target's token at the current node is a child, go there.

    Args:
        target_token_ids: [n], the target's choice at each node: argmax, or one draw.

    Raises:
        ValueError: not one token a node.
    """
    tokens = _checked(tree, target_token_ids)
    path = [0]
    while (child := tree.children(path[-1]).get(tokens[path[-1]])) is not None:
        path.append(child)
    return Walk(tuple(path), tuple(tokens), tree)


def linear_chain(tree: DraftTree, target_token_ids: Any) -> Walk:
    """Take the nodes in storage order for a chain: accept node i + 1 while it is the target's token at node i.

    What an engine does that drafts trees and verifies chains; for teaching. It gives what `walk_tree` gives as long
    as each node is a child of the one before. The first accepted node that is not has its logits from another text, so
    what follows it is not the target's own.

    Args:
        target_token_ids: [n], the target's choice at each node.

    Raises:
        ValueError: not one token a node.
    """
    tokens = _checked(tree, target_token_ids)
    end = 0
    while end + 1 < tree.num_nodes and tokens[end] == tree.token_ids[end + 1]:
        end += 1
    return Walk(tuple(range(end + 1)), tuple(tokens), tree)


def _checked(tree: DraftTree, target_token_ids: Any) -> list[int]:
    tokens = [int(token) for token in target_token_ids]
    if len(tokens) != tree.num_nodes:
        raise ValueError(
            f"target_token_ids has {len(tokens)} tokens for a tree of {tree.num_nodes} nodes; "
            "give the target's token at every node, the root included."
        )
    return tokens
