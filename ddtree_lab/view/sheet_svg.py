"""A sheet as an SVG picture: the same marks, bars and badges as everywhere."""

from __future__ import annotations

import textwrap
from itertools import accumulate

from ddtree_lab.view.marks import MARKS, outline
from ddtree_lab.view.sheets import Cell, Part, Sheet
from ddtree_lab.view.svg import CELL, MARGIN, Picture, cells_of, escape, shortened, width_of

LINE, TALL, SIDE = 22.0, 40.0, 16.0  # heights of a row: one line, numbers below it, squares
HEIGHTS = {"number": TALL, "seen": SIDE}
GAP, BAR = 18.0, 60.0  # between columns, and the length of a bar
MAX_CELLS = 72  # of a text
STYLE = """
.ddtree .part{font-size:13px;font-weight:600}.ddtree .plain{font-family:MONO;font-size:12.5px}
.ddtree .bar{fill:var(--root)}.ddtree .rest{fill:var(--edge);opacity:.4}.ddtree .hidden{fill:var(--dim)}
.ddtree .self{fill:var(--root)}.ddtree .ancestor{fill:none;stroke:var(--root);stroke-width:2}
.ddtree .badge{fill:none;stroke-width:1.4;stroke:var(--root)}.ddtree .badge.snapshot{stroke:var(--accepted)}
.ddtree .badge.none{stroke:var(--rejected);stroke-dasharray:4 3}"""


def draw_sheet(payload: Sheet) -> Picture:
    """Title, what it says, and its tables one below the other."""
    parts = [_Table(part) for part in payload["parts"]]
    titles = [width_of(part["title"], 8.0) for part in payload["parts"]]
    width = max([560.0, *(table.width for table in parts), *titles])
    lead = textwrap.wrap(payload["lead"], int((width - 2 * MARGIN) / 6.2))
    body = [_text("title", MARGIN, 26, payload["title"])]
    body += [_text("dim", MARGIN, 46 + 16 * i, line) for i, line in enumerate(lead)]
    y = 46 + 16.0 * len(lead)
    for table in parts:
        body.append(f'<g transform="translate(0 {y:g})">{table.drawn}</g>')
        y += table.height
    return Picture(width, y + 8, "\n".join(body), payload["title"], payload["lead"], STYLE)


class _Table:
    """A part, drawn from (0, 0)."""

    def __init__(self, part: Part) -> None:
        heads = [{"text": row["head"]} for row in part["rows"]]
        rows = [[head, *row["cells"]] for head, row in zip(heads, part["rows"], strict=True)]
        cells = [cell for row in rows for cell in row]
        step = next((height for name, height in HEIGHTS.items() if any(name in cell for cell in cells)), LINE)
        widths = [_column(name, [row[i] for row in rows]) for i, name in enumerate(part["columns"])]
        lefts = list(accumulate(widths, initial=MARGIN))
        lines = [_text("part", MARGIN, 20, part["title"])]
        lines += [_text("number", left, 40, name) for left, name in zip(lefts, part["columns"], strict=False)]
        lines += [
            _placed(cell, left, 48 + index * step, step)
            for index, row in enumerate(rows)
            for left, cell in zip(lefts, row, strict=False)
        ]
        lines.append(_text("dim", MARGIN, 62 + len(rows) * step, part["note"]))
        self.width = lefts[-1] + MARGIN
        self.height = 56 + len(rows) * step + (18 if part["note"] else 0)
        self.drawn = "\n".join(lines)


def _text(name: str, x: float | int, y: float | int, text: str) -> str:
    return f'<text class="{name}" x="{x:g}" y="{y:g}">{escape(text)}</text>' if text else ""


def _column(name: str, cells: list[Cell]) -> float:
    if any("seen" in cell for cell in cells):
        return SIDE
    return GAP + max([len(name) * 6.2, *map(_wide, cells)])


def _placed(cell: Cell, x: float, y: float, step: float) -> str:
    tip = f"<title>{escape(cell['tip'])}</title>" if "tip" in cell else ""
    return f'<g transform="translate({x:g} {y:g})">{tip}{_drawn(cell, step)}</g>'


def _wide(cell: Cell) -> float:
    if "prose" in cell:
        return min(len(cell["text"]), MAX_CELLS) * 6.4
    letters = max(min(cells_of(cell["text"]), MAX_CELLS), len(cell.get("number", "")) + 2)
    least = BAR + 6 if "share" in cell else 0.0
    return max(least, letters * CELL) + (34.0 if "state" in cell else 16.0 if "rollback" in cell else 0.0)


def _drawn(cell: Cell, step: float) -> str:
    if "seen" in cell:
        return _square(cell["seen"])
    text = escape(shortened(cell["text"], MAX_CELLS))
    if "prose" in cell:
        return f'<text class="dim" y="13">{text}</text>'
    if "state" in cell:
        mark = MARKS[cell["state"]]
        return (
            f'<g class="{cell["state"]}"><path class="shape" d="{outline(cell["state"], _wide(cell), 19.0)}"/>'
            f'<path class="glyph" d="{mark.path}" transform="translate(9 3.5)"/>'
            f'<text class="token" x="26" y="14">{text}</text></g>'
        )
    if "rollback" in cell:
        radius = 9 if cell["rollback"] == "snapshot" else 3
        return (
            f'<rect class="badge {cell["rollback"]}" width="{_wide(cell):g}" height="18" rx="{radius}"/>'
            f'<text class="token" x="8" y="13">{text}</text>'
        )
    bar = ""
    if "share" in cell:
        y = 30 if step == TALL else 16
        bar = f'<rect class="rest" y="{y}" width="{BAR:g}" height="3"/>'
        bar += f'<rect class="bar" y="{y}" width="{BAR * cell["share"]:.1f}" height="3"/>'
    number = f'<text class="number" y="26">{escape(cell["number"])}</text>' if "number" in cell else ""
    return f'<text class="plain" y="13">{text}</text>{number}{bar}'


def _square(seen: str) -> str:
    """Told apart by form as well: a disc, a ring, a dot."""
    radius = {"self": 5, "ancestor": 4, "hidden": 1}[seen]
    return f'<circle class="{seen}" cx="{SIDE / 2:g}" cy="{SIDE / 2:g}" r="{radius}"/>'
