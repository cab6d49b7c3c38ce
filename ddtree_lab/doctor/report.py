"""What a diagnosis says: findings, a verdict, and how they print."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_lab.records import Record, ranges
from ddtree_lab.trace import write_atomically

if TYPE_CHECKING:
    from rich.console import RenderableType

MARKS = {"problem": "✗", "ok": "✓", "note": "·", "skipped": "–"}
STYLES = {"problem": "bold red", "ok": "green", "note": "cyan", "skipped": "dim"}


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Args:
        check: the check's name.
        status: `"ok"`, `"problem"`, `"note"` (worth knowing, nothing wrong) or `"skipped"`.
        stage: where it is: `"cache"`, `"mask"`, `"verify"`, `"commit"`, `"draft"`, `"walk"`, …
        layers: target layers it goes through, if it is some layers' affair.
        symptom: what was seen, in a user's words; why, where a check was skipped.
        evidence: numbers, by name.
        cause: the mistake behind it, if known.
        fix: what to do.
        bugs: known bugs that give the very same numbers.
        references: addresses of public reports of the same kind.
    """

    check: str
    status: str
    stage: str
    layers: tuple[int, ...] = ()
    symptom: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    cause: str = ""
    fix: str = ""
    bugs: tuple[str, ...] = ()
    references: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report(Record):
    """The findings of a diagnosis, in the order of the checks.

    Args:
        subject: what was examined.
        verdict: one sentence: the drafter, the port, both or neither.
        kinds: the kind of each target layer, by index.
        num_forwards: forwards of the target the truth cost, the port's own not counted.
        seconds: of the whole examination.
    """

    subject: str
    verdict: str
    findings: tuple[Finding, ...]
    kinds: tuple[str, ...] = ()
    num_forwards: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """No check found a problem."""
        return not self.problems

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status == "problem")

    @property
    def acceptance(self) -> dict[str, Any]:
        """What the check `acceptance` measured; empty where it was not run."""
        return next((f.evidence for f in self.findings if f.check == "acceptance" and f.evidence), {})

    @property
    def bugs(self) -> tuple[str, ...]:
        """Known bugs that explain the problems, in the order in which they were found."""
        return tuple(dict.fromkeys(name for finding in self.findings for name in finding.bugs))

    def __repr__(self) -> str:
        return f"Report({self.subject}: {len(self.problems)} problems in {len(self.findings)} findings)"

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        style = "bold green" if self.ok else "bold red"
        parts: list[Any] = [Text(f"{self.subject}"), Text(self.verdict, style), Text()]
        if self.acceptance:
            parts += [_by_depth(self.acceptance), Text()]
        parts += [part for finding in self.problems for part in (_problem(finding), Text())]
        parts.append(_summary(self.findings))
        parts.append(Text(f"{self.num_forwards} forwards for the truth, {self.seconds:.1f} s", "dim"))
        return Group(*parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "ok": self.ok,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "num_forwards": self.num_forwards,
            "seconds": round(self.seconds, 2),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def save_html(self, path: str | Path) -> None:
        """A self-contained page; nothing in it is fetched."""
        from ddtree_lab.doctor.page import render

        write_atomically(path, render(self))


def _problem(finding: Finding) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    layers = f", layers {ranges(finding.layers)}" if finding.layers else ""
    table.add_row(Text("✗", "bold red"), Text(f"{finding.check} ({finding.stage}{layers})", "bold"))
    for name, text in (("seen", finding.symptom), ("cause", finding.cause), ("fix", finding.fix)):
        if text:
            table.add_row(name, Text(text))
    for name, value in finding.evidence.items():
        if name != "matrix":
            table.add_row("", Text(f"{name.replace('_', ' ')}: {shown(value)}", "dim"))
    if "matrix" in finding.evidence:
        table.add_row("", heat_map(finding.evidence["matrix"]))
    for address in finding.references[:3]:
        table.add_row("see", Text(address, "dim"))
    return table


def _by_depth(acceptance: dict[str, Any]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), collapse_padding=True)
    table.add_column("drafts kept, of those reached", style="dim")
    depths = max(len(acceptance["port_by_depth"]), len(acceptance["drafter_by_depth"]))
    for depth in range(1, depths + 1):
        table.add_column(f"{depth}", justify="right")
    for name, key in (
        ("by the port", "port_by_depth"),
        ("by the drafter on clean states", "drafter_by_depth"),
    ):
        table.add_row(Text(name), *(f"{share:.0%}" for share in acceptance[key]))
    return table


def heat_map(matrix: dict[str, Any]) -> RenderableType:
    """Layers × nodes, dark where a row is far off."""
    from rich.text import Text

    text = Text(f"{matrix['caption']} (░ below 1 %, ▒ below 10 %, █ above)\n", "dim")
    for layer, kind, row in zip(matrix["layers"], matrix["kinds"], matrix["moved"], strict=True):
        text.append(f"{layer:>3} {kind:<18}")
        for value in row:
            text.append(" ·" if value == 0 else " ░" if value < 0.01 else " ▒" if value < 0.1 else " █")
        text.append("\n")
    text.append("    node" + " " * 14 + "".join(f"{node:>2}" for node in range(len(matrix["moved"][0]))))
    return text


def _summary(findings: Iterable[Finding]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), collapse_padding=True)
    for name in ("", "check", "stage", "found"):
        table.add_column(name, overflow="fold", no_wrap=name in ("check", "stage"))
    for finding in findings:
        mark = Text(MARKS[finding.status], STYLES[finding.status])
        table.add_row(mark, finding.check, finding.stage, Text(finding.symptom))
    return table


def shown(value: Any) -> str:
    """A number of evidence, short."""
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(shown(part) for part in value) + "]"
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(part)}" for key, part in value.items())
    return str(value)
