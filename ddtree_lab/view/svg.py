"""A round as an SVG picture, in plain Python: nothing to install, nothing fetched.

Each state has its own outline, line, glyph and colour (Okabe and Ito's palette, which colour-blind readers can tell
apart). Colours are CSS variables that follow the reader's theme; `theme` fixes them for converters that know no CSS
variables.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddtree_lab.view.layout import tidy_rows
from ddtree_lab.view.marks import MARKS, outline
from ddtree_lab.view.numbers import Row, is_forced, probability, shown_nodes, step_log_prob, title
from ddtree_lab.view.text import divergence_title

MAX_NODES = 120  # unlikely nodes beyond are counted, not drawn, unless asked for
MAX_CELLS = 20  # of a token's text; the whole of it is in the node's tooltip
CELL, GLYPH, HEIGHT = 7.3, 12.0, 36.0  # widths of a character and a glyph, height of a node, in px
ROW, GAP, MARGIN, HEADER = HEIGHT + 10.0, 30.0, 16.0, 58.0
MONO = "ui-monospace, 'SFMono-Regular', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SANS = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
PALETTES = {
    "light": {
        "ink": "#1c2024", "dim": "#5a606a", "paper": "#ffffff", "fill": "#ffffff", "edge": "#b9bec6",
        "root": "#0072b2", "drafted": "#5a606a", "accepted": "#009e73", "rejected": "#d55e00", "bonus": "#b2558f",
        "heat": "#d55e00",
    },
    "dark": {
        "ink": "#e8eaed", "dim": "#a4abb3", "paper": "#15171a", "fill": "#1d2024", "edge": "#4a5058",
        "root": "#56b4e9", "drafted": "#a4abb3", "accepted": "#2cc79a", "rejected": "#e88a4a", "bonus": "#e39cc6",
        "heat": "#f0a060",
    },
}  # fmt: skip
STYLE = """.ddtree text{font-family:SANS;fill:var(--ink)}.ddtree .title{font-size:15px;font-weight:600}
.ddtree .dim{fill:var(--dim);font-size:11.5px}.ddtree .token{font-family:MONO;font-size:12.5px;font-weight:600}
.ddtree .number{font-family:MONO;font-size:10px;fill:var(--dim)}.ddtree .paper{fill:var(--paper)}
.ddtree .edge{fill:none;stroke:var(--edge);stroke-width:1.2}.ddtree .kept{stroke:var(--accepted);stroke-width:2.6}
.ddtree .own{stroke:var(--bonus);stroke-width:2.2}.ddtree .shape{fill:var(--fill);stroke-width:1.6}
.ddtree .glyph{fill:none;stroke-width:1.8;stroke-linecap:round;stroke-linejoin:round}
.ddtree .root .shape{stroke:var(--root);stroke-width:2.4}.ddtree .root .glyph{fill:var(--root)}
.ddtree .drafted .shape,.ddtree .drafted .glyph{stroke:var(--drafted)}
.ddtree .accepted .shape{stroke:var(--accepted);stroke-width:2.6}.ddtree .accepted .glyph{stroke:var(--accepted)}
.ddtree .rejected .shape{stroke:var(--rejected);stroke-width:1.1;stroke-dasharray:4 3}
.ddtree .rejected .glyph{stroke:var(--rejected)}.ddtree .rejected .token{font-weight:400}
.ddtree .bonus .shape{stroke:var(--bonus);stroke-width:2.4}.ddtree .bonus .glyph{fill:var(--bonus)}
.ddtree .cell{stroke:var(--edge);stroke-width:.5;fill:none}.ddtree .heat{fill:var(--heat)}"""
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Picture:
    """A drawing without its frame, so that several can be put into one."""

    width: float
    height: float
    body: str
    title: str
    description: str
    style: str = ""  # more than `STYLE`

    def to_svg(self, theme: str = "auto") -> str:
        """The whole file.

        Args:
            theme: `"auto"` follows the reader's, `"light"` and `"dark"` are fixed.

        Raises:
            ValueError: another theme.
        """
        if theme not in ("auto", *PALETTES):
            raise ValueError(f"theme is {theme!r}; choose 'auto', 'light' or 'dark'.")
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="ddtree" role="img" {size}>\n'
            f"<title>{escape(self.title)}</title>\n<desc>{escape(self.description)}</desc>\n"
            f"<style>{_style(theme, self.style)}</style>\n"
            f'<rect class="paper" width="100%" height="100%"/>\n{self.body}\n</svg>\n'
        )


def _style(theme: str, more: str) -> str:
    rules = (STYLE + more).replace("SANS", SANS).replace("MONO", MONO)
    if theme != "auto":
        return re.sub(r"var\(--(\w+)\)", lambda found: PALETTES[theme][found[1]], rules)
    light, dark = (
        ".ddtree{" + "".join(f"--{name}:{colour};" for name, colour in palette.items()) + "}"
        for palette in PALETTES.values()
    )
    return f"{light}@media (prefers-color-scheme: dark){{{dark}}}\n{rules}"


def draw_round(
    round_: Row, heading: str | None = None, note: str = "", max_nodes: int | None = MAX_NODES
) -> Picture:
    """The tree of a round, depth from left to right.

    Args:
        round_: of a payload.
        heading: above the tree; what was drafted and kept, where not given.
        note: a second, smaller line.
        max_nodes: the least likely nodes beyond are counted, not drawn; None draws all.
    """
    nodes = shown_nodes(round_, max_nodes)
    heading = heading or title(round_)
    boxes = _boxes(round_, nodes)
    columns = _columns(boxes)
    placed = [_Placed(box, *columns[box.depth], HEADER + box.row * ROW) for box in boxes]
    edges = "\n".join(_edges(placed))
    drawn = "\n".join(map(_node, placed))
    states = dict.fromkeys(box.state for box in boxes)
    bottom = HEADER + (max(box.row for box in boxes) + 1) * ROW + 8
    legend = _legend(states, bottom, _hidden(round_, nodes), _has_target(round_))
    width = max(sum(columns[-1]) + MARGIN, width_of(heading, 9.0), 560.0)
    note = escape(_fitting(note, width))
    body = (
        f'<text class="title" x="{MARGIN:g}" y="26">{escape(heading)}</text>\n'
        f'<text class="dim" x="{MARGIN:g}" y="44">{note}</text>\n{edges}\n{drawn}\n{legend}'
    )
    return Picture(width, bottom + 34, body, heading, description(round_))


def description(round_: Row) -> str:
    """What a round's picture shows, in words."""
    kept = [round_["texts"][node] for node, state in enumerate(round_["states"]) if state == "accepted"]
    if round_["target_ids"] is None:
        return f"Draft tree of {len(round_['ids']) - 1} nodes below {round_['texts'][0]}."
    words = f"Kept below {round_['texts'][0]}: {' '.join(kept) or 'no draft'}."
    return words if round_["bonus"] is None else f"{words} Bonus: {round_['bonus']['text']}."


@dataclass(frozen=True)
class _Box:
    """A node to be drawn."""

    node: int | None  # None: the bonus token
    parent: int | None
    depth: int
    row: int
    state: str
    text: str
    numbers: str
    tooltip: str

    @property
    def width(self) -> float:
        cells = max(cells_of(self.text) * CELL, len(self.numbers) * 6.1)
        return cells + GLYPH + (30.0 if self.state in ("root", "bonus") else 22.0)


def _boxes(round_: Row, nodes: list[int]) -> list[_Box]:
    place = {node: i for i, node in enumerate(nodes)}
    parents = [-1 if node == 0 else place[round_["parents"][node]] for node in nodes]
    last = None if round_["bonus"] is None else round_["path"][-1]
    rows = tidy_rows(parents, None if last is None else place[last]).tolist()
    boxes = [_box(round_, node, rows[place[node]]) for node in nodes]
    if last is not None:
        boxes.append(_bonus_box(round_, last, rows[place[last]]))
    return boxes


def _box(round_: Row, node: int, row: int) -> _Box:
    state = round_["states"][node]
    parent = round_["parents"][node] if node else None
    numbers, facts = f"position {round_['past_length']}", [f"node {node}", MARKS[state].word]
    if node:
        step = step_log_prob(round_, node)
        own = (round_["token_target_log_probs"] or {node: None})[node]
        parts = [f"p {probability(step)}"] * (step is not None) + [f"t {probability(own)}"] * (
            own is not None
        )
        numbers = " ".join(parts)
        position = round_["past_length"] + round_["depths"][node]
        facts += [f"token {round_['ids'][node]}", f"position {position}", f"rank {round_['ranks'][node]}"]
        facts += [f"path log-probability {round_['log_probs'][node]}"] if step is not None else []
        facts += ["kept only because the path was forced"] if is_forced(round_, node) else []
    if _has_target(round_) and round_["target_texts"][node] is not None:
        facts.append(f"the target goes on with {round_['target_texts'][node]}")
    tooltip = f"{round_['texts'][node]}: {', '.join(facts)}"
    return _Box(
        node, parent, round_["depths"][node], row, state, shortened(round_["texts"][node]), numbers, tooltip
    )


def _bonus_box(round_: Row, last: int, row: int) -> _Box:
    text, sure = round_["bonus"]["text"], round_["target_log_probs"][last]
    numbers = "" if sure is None else f"t {probability(sure)}"
    tooltip = f"{text}: bonus, token {round_['bonus']['id']}, {MARKS['bonus'].meaning}"
    return _Box(None, last, round_["depths"][last] + 1, row, "bonus", shortened(text), numbers, tooltip)


def _has_target(round_: Row) -> bool:
    return round_["target_ids"] is not None


class _Placed(NamedTuple):
    """A box and where it is drawn."""

    box: _Box
    left: float
    width: float
    top: float


def _columns(boxes: list[_Box]) -> list[tuple[float, float]]:
    """Left edge and width of each depth's column."""
    widths = [0.0] * (max(box.depth for box in boxes) + 1)
    for box in boxes:
        widths[box.depth] = max(widths[box.depth], box.width)
    lefts = [MARGIN + sum(widths[:depth]) + depth * GAP for depth in range(len(widths))]
    return list(zip(lefts, widths, strict=True))


def _edges(placed: list[_Placed]) -> Iterable[str]:
    """Elbows from parent to child, the kept ones last and on top."""
    where = {at.box.node: at for at in placed}
    kept = []
    for at in placed:
        if at.box.parent is None:
            continue
        above = where[at.box.parent]
        begin, middle, end = above.left + above.width, at.left - GAP / 2, at.top + HEIGHT / 2
        path = f"M{begin:g} {above.top + HEIGHT / 2:g}H{middle:g}V{end:g}H{at.left:g}"
        if at.box.state in ("accepted", "bonus"):
            name = "kept" if at.box.state == "accepted" else "own"
            kept.append(f'<path class="edge {name}" d="{path}"/>')
        else:
            yield f'<path class="edge" d="{path}"/>'
    yield from kept


def _node(at: _Placed) -> str:
    box, mark = at.box, MARKS[at.box.state]
    inset = 11.0 if box.state in ("root", "bonus") else 8.0
    text_x = inset + GLYPH + 5
    baseline = 16 if box.numbers else 23
    return (
        f'<g class="{box.state}" transform="translate({at.left:g} {at.top:g})"><title>{escape(box.tooltip)}</title>'
        f'<path class="shape" d="{outline(box.state, at.width, HEIGHT)}"/>'
        f'<path class="glyph" d="{mark.path}" transform="translate({inset:g} 6)"/>'
        f'<text class="token" x="{text_x:g}" y="{baseline}">{escape(box.text)}</text>'
        f'<text class="number" x="{text_x:g}" y="29">{escape(box.numbers)}</text></g>'
    )


def _legend(states: Iterable[str], y: float, hidden: int, has_target: bool) -> str:
    parts, x = [], float(MARGIN)
    for state in states:
        mark = MARKS[state]
        parts.append(
            f'<g class="{state}" transform="translate({x:g} {y:g})">'
            f'<path class="shape" d="{outline(state, 24.0, 16.0)}"/>'
            f'<path class="glyph" d="{mark.path}" transform="translate(6 2)"/>'
            f'<text class="dim" x="30" y="12">{mark.word}</text></g>'
        )
        x += 30 + len(mark.word) * 6.4 + 18
    numbers = "p: drafter's probability" + (", t: target's" if has_target else "")
    more = f"; {hidden} unlikely nodes not drawn" if hidden else ""
    parts.append(f'<text class="dim" x="{x:g}" y="{y + 12:g}">{numbers}{more}</text>')
    return "\n".join(parts)


def _hidden(round_: Row, nodes: list[int]) -> int:
    return len(round_["ids"]) - len(nodes)


def draw_diff(payload: dict[str, Any], max_nodes: int | None = MAX_NODES) -> Picture:
    """The two rounds in which a pair of runs parts, one below the other."""
    found = payload["divergence"]
    heading = "both runs say the same" if found is None else divergence_title(found)
    pictures = []
    for side in "ab":
        number = 0 if found is None else found[f"round_{side}"]
        rounds = payload[side]["rounds"]
        if number is not None and number < len(rounds):
            name = f"{side.upper()}  {title(rounds[number], number + 1, payload[side]['num_rounds'])}"
            pictures.append(draw_round(rounds[number], name, max_nodes=max_nodes))
    y, parts = 40.0, [f'<text class="title" x="{MARGIN:g}" y="26">{escape(heading)}</text>']
    for picture in pictures:
        parts.append(f'<g transform="translate(0 {y:g})">{picture.body}</g>')
        y += picture.height + 8
    width = max([picture.width for picture in pictures] + [width_of(heading, 9.0)])
    words = " ".join(picture.description for picture in pictures)
    return Picture(width, y, "\n".join(parts), heading, words)


def draw_nothing(heading: str) -> Picture:
    """A trace without rounds."""
    body = f'<text class="title" x="{MARGIN:g}" y="26">{escape(heading)}</text>'
    return Picture(width_of(heading, 9.0), 44.0, body, heading, "No round was recorded.")


def draw_leaks(payload: dict[str, Any]) -> Picture:
    """Layers × nodes: the darker a cell, the further off the row is; the number is in its tooltip."""
    matrix, side, left, top = payload["matrix"], 18.0, 190.0, 78.0
    most = max((value for row in matrix for value in row), default=0.0) or 1.0
    parts = [f'<text class="title" x="{MARGIN:g}" y="26">{escape(payload["title"])}</text>']
    parts.append(f'<text class="dim" x="{MARGIN:g}" y="46">{escape(payload["definitions"]["moved"])}</text>')
    for column in range(len(payload["nodes"])):
        x = left + column * side + side / 2
        parts.append(f'<text class="number" text-anchor="middle" x="{x:g}" y="{top - 6}">{column}</text>')
    for i, (layer, row) in enumerate(zip(payload["layers"], matrix, strict=True)):
        y = top + i * side
        label = f"{layer['layer']} {layer['kind']}"
        parts.append(f'<text class="number" x="{MARGIN:g}" y="{y + 13}">{escape(label)}</text>')
        for column, value in enumerate(row):
            place = f'x="{left + column * side}" y="{y}" width="{side}" height="{side}"'
            tip = f"<title>layer {layer['layer']}, {escape(payload['nodes'][column])}: {value:.3g}</title>"
            parts.append(f'<g><rect class="cell" {place}/>')
            if value > payload["tolerance"]:
                parts.append(f'<rect class="heat" opacity="{0.25 + 0.75 * value / most:.2f}" {place}/>')
                middle = left + column * side + side / 2
                parts.append(f'<circle class="paper" cx="{middle:g}" cy="{y + side / 2:g}" r="2.5"/>')
            parts.append(f"{tip}</g>")
    headings = width_of(payload["title"], 9.0), width_of(payload["definitions"]["moved"], 6.0)
    width = max(left + len(payload["nodes"]) * side + MARGIN, *headings)
    leaking = [layer["layer"] for layer, row in zip(payload["layers"], matrix, strict=True) if any(row)]
    words = f"Rows are off in layers {leaking}." if leaking else "No row is off."
    return Picture(width, top + len(matrix) * side + MARGIN, "\n".join(parts), payload["title"], words)


def escape(text: str) -> str:
    """Text as XML, without the characters that XML cannot have."""
    return html.escape(_NOT_XML.sub("\ufffd", text), quote=True)


def cells_of(text: str) -> int:
    """Columns that a text takes in a monospaced font."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def shortened(text: str, most: int = MAX_CELLS) -> str:
    return text if cells_of(text) <= most else f"{text[: most - 1]}…"


def width_of(text: str, per_character: float) -> float:
    """Of a line with its margins, in px."""
    return 2 * MARGIN + len(text) * per_character


def _fitting(text: str, width: float) -> str:
    most = int((width - 2 * MARGIN) / 6.2)
    return text if len(text) <= most else f"…{text[1 - most :]}"
