"""A sheet in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ddtree_lab.view.marks import MARKS
from ddtree_lab.view.sheets import SEEN

BADGES = {"crop": "bold blue", "snapshot": "bold green", "none": "bold red"}


def draw_sheet(payload: dict[str, Any]) -> Group:
    """Title, what it says in a sentence, and the tables."""
    parts: list[RenderableType] = [Text(f"{payload['title']}: {payload['lead']}")]
    for part in payload["parts"]:
        parts += [Text(), Text(part["title"], "bold"), _table(part)]
        parts += [Text(part["note"], "dim")] if part["note"] else []
    return Group(*parts)


def _table(part: dict[str, Any]) -> Table:
    """The squares of a row stand together in one column, so that a mask stays narrow."""
    plain = [name for name in part["columns"] if not name.isdecimal()]
    has_squares = len(plain) < len(part["columns"])
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in plain:
        table.add_column(overflow="fold")
    table.add_row(*(Text(name, "dim") for name in plain), *[Text("nodes seen", "dim")] * has_squares)
    for row in part["rows"]:
        cells = [_cell(cell) for cell in row["cells"] if "seen" not in cell]
        squares = [Text("".join(SEEN[cell["seen"]] for cell in row["cells"] if "seen" in cell))]
        table.add_row(Text(row["head"]), *cells, *squares * has_squares)
    return table


def columns(payload: dict[str, Any]) -> int:
    """How wide the tables are when no cell is broken."""
    rows = [row for part in payload["parts"] for row in part["rows"]]
    return max((len(row["head"]) + sum(map(_letters, row["cells"])) + 24 for row in rows), default=0)


def _letters(cell: dict[str, Any]) -> int:
    return 1 if "seen" in cell else len(cell["text"]) + len(cell.get("number", "")) + 4


def _cell(cell: dict[str, Any]) -> Text:
    if "rollback" in cell:
        return Text(cell["text"], BADGES[cell["rollback"]])
    mark = MARKS.get(cell.get("state", ""))
    words = Text(f"{mark.glyph} {cell['text']}", mark.style) if mark else Text(cell["text"])
    return words.append(f" {cell['number']}", "not bold dim") if "number" in cell else words
