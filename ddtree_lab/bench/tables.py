"""Rows as tables: one description of the columns, shown by rich and written as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ddtree_lab.bench.goals import Goal, judge
from ddtree_lab.bench.rows import Row
from ddtree_lab.bench.sweep import by_prompt, grouped
from ddtree_lab.bench.timing import Spread
from ddtree_lab.records import Record, format_bytes

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table(Record):
    """Columns of text."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]

    def __rich__(self) -> RichTable:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        title = Text(self.title)  # quartiles are in brackets, which rich would take for its markup
        table = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
        for line in self.lines:
            table.add_row(*map(Text, line))
        return table

    def markdown(self) -> str:
        rows = [self.columns, tuple("---" for _ in self.columns), *self.lines]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def milliseconds(row: Row, name: str = "seconds") -> str:
    if name not in row:
        return "–"
    return f"{Spread(row[name], row[f'{name}_low'], row[f'{name}_high']).scaled(1e3):.3g}"


def ratio(row: Row) -> str:
    if "ratio" not in row:
        return "1" if "seconds" in row else "–"
    return f"{Spread(row['ratio'], row['ratio_low'], row['ratio_high']):.3g}"


def micro_table(rows: Sequence[Row]) -> Table:
    """Every measured stage: milliseconds, ratio, peak memory."""
    lines = [
        (
            row["bench"], str(row["subject"]), f"{row['case']}{', ' + row['part'] if 'part' in row else ''}",
            str(row.get("nodes", row.get("budget", ""))), milliseconds(row), ratio(row), row.get("ratio_to", ""),
            format_bytes(row["peak_bytes"]) if "peak_bytes" in row else "",
        )
        for row in rows
    ]  # fmt: skip
    columns = ("stage", "on", "what", "nodes", "ms", "ratio", "to", "peak memory")
    return Table("stages: median [quartiles]", columns, tuple(lines))


def goals_table(rows: Sequence[Row], goals: Sequence[Goal]) -> Table:
    """Each goal beside what was measured, and beside what nothing could be better than."""
    lines = []
    for goal in goals:
        found = judge(goal, rows)
        limit = f"{'≤' if goal.at_most else '≥'} {goal.limit:g}"
        if found is None:
            lines.append((goal.text, limit, "not measured", "", ""))
            continue
        bound = "" if found.bound is None else f"{found.bound:.3g}"
        value = f"{found.value:.3g}" + (f" ({found.label})" if found.label else "")
        lines.append((goal.text, limit, value, bound, "yes" if found.is_met else "no"))
    return Table("goals", ("goal", "limit", "measured", "bound", "met"), tuple(lines))


def sweep_table(rows: Sequence[Row]) -> Table:
    """Speed-up and emitted tokens a round, by domain, temperature and method."""
    lines = []
    for (domain, temperature, label), group in grouped(rows):
        checked = [row["lossless"] for row in group if row["lossless"] is not None]
        speeds, ups, ceilings = (
            list(by_prompt(group, name).values()) for name in ("tokens_per_second", "speedup", "ceiling")
        )
        rounds = [row for row in group if row.get("num_rounds")]
        emitted = f"{np.mean([row['mean_emitted_tokens'] for row in rounds]):.2f}" if rounds else "–"
        drafted = f"{np.mean([row['mean_drafted'] for row in rounds]):.1f}" if rounds else "–"
        lines.append(
            (
                domain, f"{temperature:g}", label, str(len(speeds)), f"{Spread.of(speeds).median:.3g}",
                f"{Spread.of(ups):.2f}" if ups else "–",
                f"{Spread.of(ceilings).median:.2f}" if ceilings else "–", emitted, drafted,
                f"{sum(checked)} of {len(checked)}" if checked else "–",
            )
        )  # fmt: skip
    columns = (
        "domain", "T", "method", "prompts", "tokens/s", "speed-up", "ceiling", "emitted", "drafted", "lossless",
    )  # fmt: skip
    return Table("decodes at temperature T: median [quartiles] over prompts", columns, tuple(lines))
