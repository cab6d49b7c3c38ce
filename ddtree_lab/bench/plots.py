"""Plots from rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_lab.bench.rows import Row
from ddtree_lab.bench.sweep import grouped


def figure(width: float = 6.4, height: float = 3.8) -> tuple[Any, Any] | None:
    """A figure and its axes; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots()


def save(made: Any, path: Path) -> Path:
    made.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def plot_sweep(rows: Sequence[Row], folder: str | Path) -> Path | None:
    """Speed-up against emitted tokens a round, a point a method and a panel's colour a domain and temperature."""
    drawn = figure()
    if drawn is None or not rows:
        return None
    made, axes = drawn
    series: dict[tuple[str, float], list[tuple[float, float, str]]] = {}
    for (domain, temperature, label), group in grouped(rows):
        ups = [row["speedup"] for row in group if row["speedup"] is not None]
        emitted = [row["mean_emitted_tokens"] for row in group if row.get("num_rounds")]
        if ups and emitted:
            point = (float(np.mean(emitted)), float(np.median(ups)), label)
            series.setdefault((domain, temperature), []).append(point)
    for (domain, temperature), points in series.items():
        axes.plot(
            [p[0] for p in points],
            [p[1] for p in points],
            "o",
            label=f"{domain}, temperature {temperature:g}",
        )
        for x, y, label in points:
            axes.annotate(
                label.replace("ddtree ", ""), (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7
            )
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.set(xlabel="emitted tokens a round", ylabel="speed-up, median over prompts")
    axes.legend(frameon=False)
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
