"""A diagnosis as one self-contained HTML page: nothing is fetched, nothing runs."""

from __future__ import annotations

import html
from typing import Any

from ddtree_lab.doctor.report import MARKS, Finding, Report, shown
from ddtree_lab.records import ranges

STYLE = """
:root { color-scheme: light dark; --fg: #1c2024; --bg: #fff; --card: #f6f7f9; --dim: #5a5f68; --line: #d9dce1;
        --problem: #b3261e; --ok: #1a7f37; --note: #0b6bcb; --heat: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --fg: #e8eaed; --bg: #15171a; --card: #1e2125; --dim: #a3a9b1; --line: #34383e;
          --problem: #ff8a80; --ok: #6fdd8b; --note: #7cc0ff; --heat: #ff8a80; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg);
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .6rem; }
.verdict { font-size: 1.15rem; font-weight: 600; border-left: .3rem solid; padding-left: .8rem; margin: 1rem 0; }
.problem { color: var(--problem); } .ok { color: var(--ok); } .note { color: var(--note); }
.skipped, .dim { color: var(--dim); }
section { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: 1rem; margin: 1rem 0; }
table { border-collapse: collapse; } td, th { text-align: left; vertical-align: top;
  padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } .checks { width: 100%; } .checks td:first-child { white-space: nowrap; }
.numbers td, .numbers th + th { text-align: right; font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .35rem 1rem; margin: 0; }
dt { color: var(--dim); max-width: 14rem; } dd { margin: 0; overflow-wrap: anywhere; }
dd ul { margin: 0; padding-left: 1.1rem; } a { color: var(--note); }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
.scroll { overflow-x: auto; } .heat { font-size: .8rem; margin-top: .8rem; }
.heat caption { text-align: left; padding-bottom: .3rem; white-space: nowrap; }
.heat td { width: 1.8rem; height: 1.4rem; text-align: center; padding: 0; border: 1px solid var(--line); }
.heat th { padding: 0 .8rem 0 0; font-weight: normal; white-space: nowrap; border: 0; vertical-align: middle; }
.heat .head td { border: 0; color: var(--dim); }
"""


def render(report: Report) -> str:
    """The page: verdict, acceptance, problems with evidence, then everything that was checked."""
    state = "ok" if report.ok else "problem"
    problems = "".join(_problem(finding) for finding in report.problems)
    rows = "".join(_row(finding) for finding in report.findings)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_text(report.subject)}: port doctor</title><style>{STYLE}</style></head><body>
<h1>Port doctor: {_text(report.subject)}</h1>
<p class="verdict {state}">{_text(report.verdict)}</p>
{_acceptance(report.acceptance)}
{"<h2>Problems</h2>" if problems else ""}{problems}
<h2>What was checked</h2>
<div class="scroll"><table class="checks">
<tr><th>found</th><th>check</th><th>stage</th><th>what</th></tr>{rows}
</table></div>
<p class="dim">{report.num_forwards} forwards for the truth, {report.seconds:.1f} s</p>
</body></html>
"""


def _text(value: Any) -> str:
    return html.escape(str(value))


def _acceptance(measured: dict[str, Any]) -> str:
    if not measured:
        return ""
    depths = range(1, max(len(measured["port_by_depth"]), len(measured["drafter_by_depth"])) + 1)
    head = "".join(f"<th>{depth}</th>" for depth in depths)
    rows = "".join(
        f"<tr><th>{name}</th>"
        + "".join(f"<td>{share:.0%}</td>" for share in measured[key])
        + "<td></td>" * (len(depths) - len(measured[key]))
        + "</tr>"
        for name, key in (("the port", "port_by_depth"), ("the drafter on clean states", "drafter_by_depth"))
    )
    return (
        '<h2>Drafts kept at each depth, of those reached</h2><div class="scroll"><table class="numbers">'
        f"<tr><th>depth</th>{head}</tr>{rows}</table></div>"
    )


def _problem(finding: Finding) -> str:
    layers = f", layers {ranges(finding.layers)}" if finding.layers else ""
    parts = [("seen", finding.symptom), ("cause", finding.cause), ("fix", finding.fix)]
    parts += [
        (name.replace("_", " "), shown(value)) for name, value in finding.evidence.items() if name != "matrix"
    ]
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(text)}</dd>" for name, text in parts if text)
    links = "".join(
        f'<li><a rel="noreferrer" href="{_text(address)}">{_text(address.removeprefix("https://"))}</a></li>'
        for address in finding.references
    )
    reports = f"<dt>public reports of the same kind</dt><dd><ul>{links}</ul></dd>" if links else ""
    heat = _heat(finding.evidence["matrix"]) if "matrix" in finding.evidence else ""
    named = f": {', '.join(finding.bugs)}" if finding.bugs else ""
    return (
        f'<section><h3 class="problem">✗ {_text(finding.check)} ({_text(finding.stage)}{_text(layers)}){_text(named)}'
        "</h3>"
        f"<dl>{items}{reports}</dl>{heat}</section>"
    )


def _heat(matrix: dict[str, Any]) -> str:
    """Layers × nodes; each cell says its number too, so colour is not the only carrier."""
    nodes = range(len(matrix["moved"][0]))
    head = '<tr class="head"><th>layer</th>' + "".join(f"<td>{node}</td>" for node in nodes) + "</tr>"
    rows = "".join(
        f"<tr><th>{layer} {_text(kind)}</th>" + "".join(_cell(value) for value in row) + "</tr>"
        for layer, kind, row in zip(matrix["layers"], matrix["kinds"], matrix["moved"], strict=True)
    )
    caption = f"{_text(matrix['caption'])}, in % of the row; columns are nodes"
    return f'<div class="scroll"><table class="heat"><caption class="dim">{caption}</caption>{head}{rows}</table></div>'


def _cell(value: float) -> str:
    share = min(100.0, 100 * value**0.5)  # small movements must show too
    said = "" if value < 0.005 else f"{100 * value:.0f}"
    return (
        f'<td title="{value:.3g}" style="background: color-mix(in srgb, var(--heat) {share * 0.7:.0f}%, transparent)">'
        f"{said}</td>"
    )


def _row(finding: Finding) -> str:
    mark = f'<span class="{finding.status}">{MARKS[finding.status]} {finding.status}</span>'
    heat = ""
    if finding.status == "note" and "matrix" in finding.evidence:
        heat = f"<details><summary>by layer and node</summary>{_heat(finding.evidence['matrix'])}</details>"
    cells = (_text(finding.check), _text(finding.stage), _text(finding.symptom) + heat)
    return f"<tr><td>{mark}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
