"""What a survey found: a row an architecture, and all of them in the terminal (page.py: as a document)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ddtree_lab.records import Record

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# Outcome → what it means, in the order in which they are reported.
OUTCOMES = {
    "tree": "one pass over the tree, exact",
    "paths": "every path a batch row, exact",
    "refused": "refused with the reason",
    "wrong": "WRONG and not refused",
    "unjudged": "the tiny model runs, but says nothing",
    "not shrunk": "no tiny model could be made",
    "no answer": "its process hung or died",
}
MARKS = {"yes": "✓", "no": "✗", "raises": "!", "none": "–"}
COLUMNS = ("architecture", "layers", "multi", "mask", "rollback", "method", "error")
# Fits in 80 columns; the longest names and lists of kinds go on in a second line.
WIDTHS: dict[str, dict[str, Any]] = {
    "architecture": {"max_width": 20, "overflow": "fold"},
    "layers": {"min_width": 20, "max_width": 30},
    "error": {"no_wrap": True},
}
CAPTION = (
    "multi: a cached forward of several tokens; mask: a 4-D mask is honoured; rollback: what undoes tokens, verified; "
    "error: of the verify pass, as a share of the logits' scale.  ✓ right  ✗ wrong  ! raises  – does not apply"
)


@dataclass(frozen=True)
class Row:
    """One architecture.

    Args:
        name: its model type.
        outcome: one of `OUTCOMES`.
        reason: why not one tree pass, or why nothing at all.
        answers: question → verdict, detail and error, as in `examine.Answer`.
        caches: equal cache layers together: kind, class, claimed rollback, number; or why there is no cache.
        measured: scale and noise of the logits, the tolerance from them, the effect of a wrong token.
    """

    name: str
    model_class: str
    outcome: str
    reason: str
    transformers: str
    code: str
    seconds: float
    peak_bytes: int | None = None
    num_layers: int | None = None
    num_parameters: int | None = None
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    caches: list[dict[str, Any]] | str = field(default_factory=list)
    embeddings: str = ""
    measured: dict[str, float] = field(default_factory=dict)

    def verdict(self, question: str) -> str:
        return str(self.answers[question]["verdict"]) if question in self.answers else ""

    @property
    def rollback(self) -> str:
        """What was seen to undo tokens: `"crop"`, else `"snapshot"`, else `"none"`; empty if neither could be tried."""
        tried = [way for way in ("crop", "snapshot") if self.verdict(way) in ("yes", "no")]
        return next((way for way in tried if self.verdict(way) == "yes"), "none") if tried else ""

    @property
    def layers(self) -> str:
        """Kinds of cache layers and how many: `"3 linear, 1 full"`."""
        if isinstance(self.caches, str):
            return "no cache"
        counts: dict[str, int] = {}
        for cache in self.caches:
            kind = str(cache["kind"]).removesuffix("_attention").replace("_", " ")
            counts[kind] = counts.get(kind, 0) + int(cache["layers"])
        return ", ".join(f"{count} {kind}" for kind, count in counts.items())

    @property
    def relative_error(self) -> float | None:
        """Largest error of the verify pass over the logits' scale."""
        error, scale = self.answers.get("verify", {}).get("error"), self.measured.get("scale")
        return None if error is None or not scale else float(error) / scale

    def cells(self) -> tuple[str, ...]:
        """The row of a table, in the order of `COLUMNS`."""
        marks = [MARKS.get(self.verdict(question), "") for question in ("multi_token", "mask")]
        error = "" if self.relative_error is None else f"{self.relative_error:.0e}"
        return (self.name, self.layers, *marks, self.rollback, self.outcome, error)


def judge(answers: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """Outcome and reason from the answers about a target."""

    def verdict(question: str) -> str:
        return str(answers.get(question, {}).get("verdict", ""))

    for question in ("causal", "sensitive"):
        if verdict(question) != "yes":
            return "unjudged", str(answers[question]["detail"])
    if verdict("verify") == "raises":
        return "refused", str(answers["verify"]["detail"])
    for question in ("verify", "paths", "commit"):
        if verdict(question) != "yes":
            answer = answers[question]
            by = answer["detail"] or f"the logits are off by {answer['error']:.2g}"
            return "wrong", f"{question}: {by}"
    if verdict("states") == "no":
        return "unjudged", str(answers["states"]["detail"])
    return ("tree", "") if verdict("tree_pass") == "yes" else ("paths", str(answers["tree_pass"]["detail"]))


@dataclass(frozen=True)
class Survey(Record):
    """Every architecture that was asked for."""

    rows: tuple[Row, ...]
    seconds: float = 0.0

    def of(self, outcome: str) -> list[Row]:
        return [row for row in self.rows if row.outcome == outcome]

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong without being refused."""
        return not self.of("wrong")

    def counts(self) -> dict[str, int]:
        return {outcome: len(self.of(outcome)) for outcome in OUTCOMES}

    def __repr__(self) -> str:
        found = ", ".join(f"{count} {outcome}" for outcome, count in self.counts().items() if count)
        return f"Survey({len(self.rows)} architectures: {found})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_architectures": len(self.rows),
            "outcomes": self.counts(),
            "seconds": self.seconds,
            "architectures": [asdict(row) for row in self.rows],
        }

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [self._table()]
        for outcome, meaning in OUTCOMES.items():
            rows = self.of(outcome)
            if not rows:
                continue
            parts.append(Text(f"\n{outcome}: {len(rows)} ({meaning})", "bold"))
            for reason, names in by_reason(rows):
                if reason:
                    parts.append(Text(f"  {', '.join(names)}: {reason}"))
        return Group(*parts)

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(
            box=box.SIMPLE_HEAD, title=f"{len(self.rows)} architectures", title_justify="left", caption=CAPTION,
            caption_justify="left", padding=0, pad_edge=False,
        )  # fmt: skip
        for name in COLUMNS:
            table.add_column(name, justify="right" if name == "error" else "left", **WIDTHS.get(name, {}))
        for row in self.rows:
            table.add_row(*row.cells(), style=None if row.outcome in ("tree", "paths") else "dim")
        return table


def by_reason(rows: Iterable[Row]) -> list[tuple[str, list[str]]]:
    """Rows with one reason together, most of them first; numbers of single architectures are left out."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(general(row.reason, row.model_class), []).append(row)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1][0].name))
    return [
        (group[0].reason if len(group) == 1 else reason, [row.name for row in group])
        for reason, group in ordered
    ]


def general(reason: str, model_class: str) -> str:
    """A reason without what differs from one architecture to the next.

    >>> general("layer 3 (conv) is recurrent and has no tree-structured port", "LfmForCausalLM")
    'a layer is recurrent and has no tree-structured port'
    """
    reason = reason.replace(model_class, "the model")
    reason = re.sub(r"\blayer \d+( \([^)]*\))?", "a layer", reason)
    return re.sub(r" by \d\S* on logits of scale \d\S*", "", reason)
