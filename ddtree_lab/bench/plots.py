"""Plots from rows."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddtree_lab.bench.rows import Row
from ddtree_lab.bench.sweep import grouped, over_prompts
from ddtree_lab.trace import write_atomically


def figure(width: float = 6.4, height: float = 3.8) -> tuple[Any, Any] | None:
    """A figure and its axes; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots()


def save(made: Any, path: Path) -> Path:
    content = io.BytesIO()
    made.savefig(content, format="svg", metadata={"Date": None})
    write_atomically(path, content.getvalue())
    return path


def plot_sweep(rows: Sequence[Row], folder: str | Path) -> Path | None:
    """Speed-up against the tree budget, a line a domain and temperature; the chain and auto as marks at the right."""
    speeds: dict[str, dict[str, float]] = {}
    for (domain, temperature, label), group in grouped(rows):
        if (speedup := over_prompts(group, "speedup")) is not None:
            speeds.setdefault(f"{domain}, temperature {temperature:g}", {})[label] = speedup
    drawn = figure(height=4.4) if speeds else None
    if drawn is None:
        return None
    made, axes = drawn
    budgets = sorted({int(b) for row in rows if isinstance(b := row["tree_budget"], int)})
    ticks = [*map(str, budgets), "auto", "chain"]
    for name, by_label in speeds.items():
        trees = [(i, by_label[f"ddtree {b}"]) for i, b in enumerate(budgets) if f"ddtree {b}" in by_label]
        (line,) = axes.plot([i for i, _ in trees], [up for _, up in trees], "o-", markersize=4, label=name)
        for place, label, mark in ((len(budgets), "ddtree auto", "*"), (len(budgets) + 1, "dflash", "s")):
            if label in by_label:
                axes.plot([place], [by_label[label]], mark, color=line.get_color())
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set(xlabel="tree budget", ylabel="speed-up, median over prompts", ylim=(0, None))
    made.legend(frameon=False, loc="outside lower center", ncols=2)  # lines may be anywhere inside
    return save(made, Path(folder) / "speedup.svg")


def plot_verify(rows: Sequence[Row], folder: str | Path) -> Path | None:
    """Milliseconds of a verify pass against nodes, a line a method."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["bench"] == "verify" and row["subject"] == "embedded":
            lines.setdefault(row["case"], []).append((row["nodes"], 1e3 * row["seconds"]))
    drawn = figure() if lines else None
    if drawn is None:
        return None
    made, axes = drawn
    for case, points in lines.items():
        points.sort()
        axes.plot(*zip(*points, strict=True), "o-", label=case, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="milliseconds")
    axes.legend(frameon=False)
    return save(made, Path(folder) / "verify.svg")
