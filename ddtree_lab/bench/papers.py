"""A sweep in the layout of the DDTree paper: speed-up and emitted tokens a round, the published figures beside ours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddtree_lab.bench.rows import Row
from ddtree_lab.bench.sweep import by_text
from ddtree_lab.bench.tables import Table

Figures = tuple[float, float]  # speed-up, emitted tokens a round

# The paper's table at temperature 0 (8 × H200, bfloat16, blocks of 16): the chain, and DDTree at its best budget.
PUBLISHED: dict[str, dict[str, tuple[Figures, Figures]]] = {
    "Qwen3-4B": {
        "math500": ((5.54, 7.72), (7.50, 10.71)),
        "gsm8k": ((4.77, 6.51), (6.58, 9.33)),
        "humaneval": ((4.81, 6.62), (6.81, 9.44)),
        "mt-bench": ((2.64, 4.38), (4.18, 6.70)),
        "alpaca": ((2.03, 3.11), (3.32, 5.35)),
    },
    "Qwen3-8B": {
        "math500": ((5.56, 7.79), (7.52, 10.73)),
        "gsm8k": ((4.78, 6.57), (6.75, 9.54)),
        "humaneval": ((4.84, 6.61), (6.90, 9.67)),
        "mt-bench": ((2.56, 4.28), (4.10, 6.58)),
        "alpaca": ((2.07, 3.12), (3.36, 5.09)),
    },
    "Qwen3-Coder-30B-A3B": {
        "math500": ((4.29, 5.58), (6.21, 8.10)),
        "gsm8k": ((4.00, 5.18), (5.83, 7.55)),
        "humaneval": ((6.09, 8.02), (8.22, 10.72)),
        "mt-bench": ((2.04, 3.52), (3.27, 5.36)),
        "alpaca": ((1.53, 2.22), (2.46, 3.55)),
    },
}


def published(row: Row) -> tuple[Figures, Figures] | None:
    """The paper's figures for the chain and for DDTree where a row has their pair, data set and temperature."""
    target, drafter = (str(row.get(name, "")).rpartition("/")[2] for name in ("pair", "drafter"))
    for name, figures in PUBLISHED.items():
        same_pair = target in (name, f"{name}-Instruct") and drafter.startswith(f"{name}-DFlash")
        if same_pair and row["temperature"] == 0:
            return figures.get(row["domain"])
    return None


def paper_table(rows: Sequence[Row]) -> Table:
    """A line a data set and temperature: the chain, and the tree at its best fixed budget and with `auto`."""
    lines = [_line(*names, groups) for names, groups in by_text(rows).items()]
    columns = ("data set", "T", "chain", "paper's", "tree", "budget", "paper's", "auto")
    return Table(
        "speed-up / emitted tokens a round at temperature T: means over prompts", columns, tuple(lines)
    )


def _line(domain: str, temperature: float, groups: dict[str, list[Row]]) -> tuple[str, ...]:
    found = {label: figures for label, group in groups.items() if (figures := _figures(group))}
    fixed = [label for label in found if label.startswith("ddtree ") and label != "ddtree auto"]
    best = max(fixed, key=lambda label: found[label][0], default="")
    chain, tree = published(next(iter(groups.values()))[0]) or (None, None)
    return (
        domain, f"{temperature:g}", _shown(found.get("dflash")), _shown(chain),
        _shown(found.get(best)), best.removeprefix("ddtree ") or "–", _shown(tree), _shown(found.get("ddtree auto")),
    )  # fmt: skip


def _figures(group: Sequence[Row]) -> Figures | None:
    rows = [row for row in group if row["speedup"] is not None and row.get("num_rounds")]
    if not rows:
        return None
    return float(np.mean([row["speedup"] for row in rows])), float(
        np.mean([row["mean_emitted_tokens"] for row in rows])
    )


def _shown(figures: Figures | None) -> str:
    return "–" if figures is None else f"{figures[0]:.2f} / {figures[1]:.2f}"
