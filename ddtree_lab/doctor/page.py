"""A diagnosis as one self-contained HTML page: nothing is fetched, nothing runs."""

from __future__ import annotations

import html
from typing import Any

from ddtree_lab.doctor.report import MARKS, Finding, Report, shown
from ddtree_lab.records import ranges

STYLE = """
:root { color-scheme: light dark; --fg: #1c2024; --bg: #fff; --dim: #60646c; --line: #d9dce1;
        --problem: #b3261e; --ok: #1a7f37; --note: #0b6bcb; --heat: 179, 38, 30; }
@media (prefers-color-scheme: dark) {
  :root { --fg: #e8eaed; --bg: #15171a; --dim: #9ba1a8; --line: #34383e;
          --problem: #ff8a80; --ok: #6fdd8b; --note: #7cc0ff; --heat: 255, 138, 128; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg);
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin-bottom: .2rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.verdict { font-size: 1.15rem; font-weight: 600; border-left: .3rem solid; padding-left: .8rem; margin: 1rem 0; }
.problem { color: var(--problem); } .ok { color: var(--ok); } .note { color: var(--note); }
.skipped, .dim { color: var(--dim); }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; vertical-align: top;
  padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } dt { color: var(--dim); } dd { margin: 0 0 .4rem 0; overflow-wrap: anywhere; }
.heat { width: auto; font-size: .8rem; } .heat td { width: 1.6rem; text-align: center; padding: .1rem; }
.heat th { padding-right: .8rem; font-weight: normal; white-space: nowrap; }
"""


def render(report: Report) -> str:
    """The page: verdict, problems with evidence, then everything that was checked."""
    state = "ok" if report.ok else "problem"
    problems = "".join(_problem(finding) for finding in report.problems)
    rows = "".join(_row(finding) for finding in report.findings)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(report.subject)}: port doctor</title><style>{STYLE}</style></head><body>
<h1>Port doctor: {_text(report.subject)}</h1>
<p class="verdict {state}">{_text(report.verdict)}</p>
{problems}
<h2>What was checked</h2>
<table><tr><th></th><th>check</th><th>stage</th><th>found</th></tr>{rows}</table>
<p class="dim">{report.num_forwards} forwards for the truth, {report.seconds:.1f} s</p>
</body></html>
"""


def _text(value: Any) -> str:
    return html.escape(str(value))


def _problem(finding: Finding) -> str:
    layers = f", layers {ranges(finding.layers)}" if finding.layers else ""
    parts = [("seen", finding.symptom), ("cause", finding.cause), ("fix", finding.fix)]
    parts += [
        (name.replace("_", " "), shown(value)) for name, value in finding.evidence.items() if name != "matrix"
    ]
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in parts if text)
    links = "".join(
        f'<li><a rel="noreferrer" href="{_text(address)}">{_text(address)}</a></li>'
        for address in finding.references
    )
    reports = f"<dt>public reports of the same kind</dt><dd><ul>{links}</ul></dd>" if links else ""
    heat = _heat(finding.evidence["matrix"]) if "matrix" in finding.evidence else ""
    return (
        f'<section><h2 class="problem">✗ {_text(finding.check)} ({_text(finding.stage)}{_text(layers)})</h2>'
        f"<dl>{items}{reports}</dl>{heat}</section>"
    )


def _heat(matrix: dict[str, Any]) -> str:
    """Layers × nodes; the number is in each cell's title, so colour is not the only carrier."""
    nodes = range(len(matrix["moved"][0]))
    head = "<tr><th>layer</th>" + "".join(f"<td>{node}</td>" for node in nodes) + "</tr>"
    rows = "".join(
        f"<tr><th>{layer} {_text(kind)}</th>"
        + "".join(
            f'<td title="{value:.3g}" style="background: rgba(var(--heat), {min(1.0, value * 3):.2f})">'
            f"{'' if value == 0 else '•'}</td>"
            for value in row
        )
        + "</tr>"
        for layer, kind, row in zip(matrix["layers"], matrix["kinds"], matrix["moved"], strict=True)
    )
    caption = "how far each node's row moves, by layer, when node 1's token is changed"
    return f'<table class="heat"><caption class="dim">{caption}</caption>{head}{rows}</table>'


def _row(finding: Finding) -> str:
    mark = f'<span class="{finding.status}">{MARKS[finding.status]} {finding.status}</span>'
    cells = (_text(finding.check), _text(finding.stage), _text(finding.symptom))
    return f"<tr><td>{mark}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
