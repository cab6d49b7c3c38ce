"""What the rows of a sweep say together: the best choice of a domain, and `auto` beside the best fixed one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ddtree_lab import budget
from ddtree_lab.bench.rows import Row, method_label
from ddtree_lab.bench.sweep import by_prompt, by_text, over_prompts

AUTO = method_label("ddtree", budget.AUTO)


def decode_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """For each domain and temperature: the best choice, the best tree, and `auto` as a share of the best fixed choice.

    Medians over prompts, of each the median of its repeats. `bound` is the largest speed-up that any of the choices
    would have if a round took no longer than its draft and its verify pass.
    """
    for (domain, temperature), groups in by_text(rows).items():
        common: Row = dict(bench="decode", domain=domain, temperature=temperature)
        trees = [label for label in groups if label.startswith("ddtree")]
        drafted = [*trees, *(label for label in groups if label == "dflash")]
        fixed = [label for label in drafted if label != AUTO]
        for case, labels in (("best", drafted), ("tree", trees)):
            if best := _best(groups, labels):
                bounds = [
                    up for label in labels if (up := over_prompts(groups[label], "ceiling")) is not None
                ]
                speedup = over_prompts(groups[best], "speedup")
                yield {
                    **common,
                    "case": case,
                    "label": best,
                    "ratio": speedup,
                    "bound": max(bounds, default=None),
                }
        if AUTO in groups and (best := _best(groups, fixed)):
            yield {**common, "case": "auto", "label": best, "ratio": _share(groups[AUTO], groups[best])}


def _best(groups: dict[str, list[Row]], labels: Sequence[str]) -> str:
    """The label with the largest speed-up, empty where none has one."""
    found = {label: up for label in labels if (up := over_prompts(groups[label], "speedup")) is not None}
    return max(found, key=found.__getitem__, default="")


def _share(group: Sequence[Row], of: Sequence[Row]) -> float:
    """Tokens a second as a share of another choice's on the same prompts."""
    mine, theirs = (by_prompt(rows, "tokens_per_second") for rows in (group, of))
    return float(np.median([mine[prompt] / theirs[prompt] for prompt in mine if prompt in theirs]))
