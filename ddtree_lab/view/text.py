"""A round in the terminal: the tree with what was kept, what was not, and what came instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from rich.text import Text
from rich.tree import Tree

from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.trace import Round

TextOf = Callable[[int], str]
# Shown whole up to this many nodes; in larger trees unlikely rejected branches are folded.
MAX_NODES_SHOWN = 40


@dataclass(frozen=True)
class Glyphs:
    """Marks that tell states apart without colour."""

    root: str
    accepted: str
    rejected: str
    bonus: str
    folded: str
    space: str
    newline: str


UNICODE = Glyphs("◆", "✓", "·", "★", "…", "␣", "⏎")
ASCII = Glyphs("@", "+", ".", "*", "...", "_", "\\n")


def visible_text(text: str, glyphs: Glyphs = UNICODE) -> str:
    r"""A token's text with its spaces and line ends visible.

    >>> visible_text(" a\n")
    '␣a⏎'
    """
    text = text.replace(" ", glyphs.space).replace("\n", glyphs.newline).replace("\t", "\\t")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text) or '""'


def draw_round(round_: Round, text_of: TextOf, *, ascii: bool = False) -> Tree:  # noqa: A002
    """The tree of a round.

    Every drafted token has its draft probability at its depth (the drafter's marginal). ✓ marks the accepted
    path, ★ the bonus token: the target's own, where the tree had no such child.

    Args:
        text_of: token id → text.
        ascii: only ASCII marks, for terminals without others.
    """
    glyphs = ASCII if ascii else UNICODE
    tree, kept = round_.tree, set(round_.path)
    ended_early = round_.num_accepted_drafts > len(round_.path) - 1
    if ended_early:  # the text ended on a drafted token, which stays outside the cache
        kept.add(tree.children(round_.path[-1])[round_.emitted_token_ids[-1]])
    folded = _folded(tree, kept)

    def shown(token: int) -> str:
        return visible_text(text_of(token), glyphs)

    root = Text.assemble((f"{glyphs.root} ", "bold"), (shown(int(tree.token_ids[0])), "bold"))
    root.append(f"  anchor, position {round_.past_length}", "dim")
    branches: dict[int, Tree] = {0: Tree(root, guide_style="dim")}
    hidden: dict[int, int] = {}
    for node in range(1, tree.num_nodes):
        parent = int(tree.parents[node])
        if node in folded:
            anchor = parent
            while anchor in folded:
                anchor = int(tree.parents[anchor])
            hidden[anchor] = hidden.get(anchor, 0) + 1
            continue
        branches[node] = branches[parent].add(_label(tree, node, shown, node in kept, glyphs))
    for node, count in hidden.items():
        branches[node].add(Text(f"{glyphs.folded} {count} unlikely nodes, none accepted", "dim"))
    if not ended_early:
        last, token = round_.path[-1], round_.emitted_token_ids[-1]
        bonus = Text(f"{glyphs.bonus} {shown(token)}", "bold magenta")
        bonus.append(f"  bonus, target p {np.exp(round_.target_log_probs[last]):.2f}", "dim")
        branches[last].add(bonus)
    return branches[0]


def _label(tree: DraftTree, node: int, shown: Callable[[int], str], kept: bool, glyphs: Glyphs) -> Text:
    probability = np.exp(tree.log_probs[node] - tree.log_probs[tree.parents[node]])
    mark, style = (glyphs.accepted, "bold green") if kept else (glyphs.rejected, "dim")
    label = Text(f"{mark} {shown(int(tree.token_ids[node]))}", style)
    label.append(f"  p {probability:.2f}", "dim")
    return label


def _folded(tree: DraftTree, kept: set[int]) -> set[int]:
    """Nodes to leave out of a large tree: the last ones in pop order that have no kept node below."""
    if tree.num_nodes <= MAX_NODES_SHOWN:
        return set()
    # Pop order is a prefix order, so what is left after cutting at any index is a tree again.
    return {node for node in range(MAX_NODES_SHOWN, tree.num_nodes) if node not in kept}


def round_title(index: int, num_rounds: int, round_: Round) -> str:
    """`round 3 of 14: 32 drafted, 5 accepted drafts, 6 emitted tokens, mass 4.1`."""
    return (
        f"round {index + 1} of {num_rounds}: {round_.tree.num_drafted} drafted, "
        f"{round_.num_accepted_drafts} accepted drafts, {round_.num_emitted_tokens} emitted tokens, "
        f"draft mass {round_.tree.mass:.1f}"
    )
