"""How a node's state looks, in every face: a glyph, a shape, a line and a colour, so that colour is never alone.

`static/marks.js` has the same shapes for the browser; a test compares the two. What a glyph becomes where only ASCII
is allowed stands with all other stand-ins in `records.PLAIN`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """The look of a state.

    Args:
        glyph: one character, for text.
        word: what it is called.
        path: the glyph as a path in a 12 × 12 box.
        filled: whether that path is filled.
        style: in the terminal.
        meaning: for the legend.
    """

    glyph: str
    word: str
    path: str
    filled: bool
    style: str
    meaning: str


MARKS = {
    "root": Mark(
        "◆", "anchor", "M6 .8 11.2 6 6 11.2 .8 6Z", True, "bold", "the last token of the text so far"
    ),
    "drafted": Mark(
        "○", "drafted", "M6 2.6A3.4 3.4 0 1 1 5.99 2.6Z", False, "", "proposed by the drafter, not decided yet"
    ),
    "accepted": Mark(
        "✓", "kept", "M1.8 6.4 4.8 9.6 10.4 2.6", False, "bold green", "the target chose the same token"
    ),
    "rejected": Mark(
        "×",
        "not kept",
        "M2.6 2.6 9.4 9.4M9.4 2.6 2.6 9.4",
        False,
        "dim",
        "the target chose another token here or above",
    ),
    "bonus": Mark(
        "★",
        "bonus",
        "M6 .6 7.6 4.2 11.5 4.6 8.6 7.2 9.4 11 6 9 2.6 11 3.4 7.2 .5 4.6 4.4 4.2Z",
        True,
        "bold magenta",
        "the target's own token where no draft agrees",
    ),
}  # fmt: skip


def outline(state: str, width: float, height: float) -> str:
    """The outline of a node of a state as a path from (0, 0); no two states have the same."""
    w, h = width, height
    radius = {"accepted": 7.0, "bonus": h / 2, "drafted": 3.0}.get(state)
    if radius:
        r, a, b = radius, w - 2 * radius, h - 2 * radius
        corner = f"a{r:g} {r:g} 0 0 1"
        return (
            f"M{r:g} 0h{a:g}{corner} {r:g} {r:g}v{b:g}{corner} {-r:g} {r:g}h{-a:g}{corner} {-r:g} {-r:g}v{-b:g}"
            f"{corner} {r:g} {-r:g}z"
        )
    if state == "root":
        c = h / 4
        return f"M{c:g} 0H{w - c:g}L{w:g} {h / 2:g} {w - c:g} {h:g}H{c:g}L0 {h / 2:g}Z"
    return f"M0 0H{w:g}V{h:g}H0Z"
