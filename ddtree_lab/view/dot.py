"""A round in Graphviz's language, and whatever of Graphviz is there to draw it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from ddtree_lab.view.numbers import Row, probability, step_log_prob, title

COLOURS = {
    "root": "#0072b2",
    "drafted": "#5a606a",
    "accepted": "#009e73",
    "rejected": "#d55e00",
    "bonus": "#b2558f",
}
SHAPES = {"root": "hexagon", "drafted": "ellipse", "accepted": "box", "rejected": "box", "bonus": "oval"}
STYLES = {
    "root": "bold",
    "drafted": "solid",
    "accepted": "rounded,bold",
    "rejected": "dashed",
    "bonus": "bold",
}
SECONDS = 60  # for a layout; 1,024 nodes take less than one


def to_dot(round_: Row) -> str:
    """The tree of a round as a digraph, depth from left to right."""
    lines = [f"  {node} [{_attributes(round_, node)}];" for node in range(len(round_["ids"]))]
    lines += [
        f"  {round_['parents'][node]} -> {node} [{_line(round_['states'][node])}];"
        for node in range(1, len(round_["ids"]))
    ]
    if round_["bonus"] is not None:
        lines.append(f"  bonus [label={_quoted('★ ' + round_['bonus']['text'])}, {_look('bonus')}];")
        lines.append(f"  {round_['path'][-1]} -> bonus [{_line('bonus')}];")
    head = (
        f"  graph [rankdir=LR, label={_quoted(title(round_))}, labelloc=t];\n"
        '  node [fontname="monospace", fontsize=11];\n  edge [arrowhead=none];'
    )
    return "\n".join(["digraph round {", head, *lines, "}"]) + "\n"


def _attributes(round_: Row, node: int) -> str:
    step = step_log_prob(round_, node) if node else None
    below = "" if step is None else f"\np {probability(step)}"
    return f"label={_quoted(round_['texts'][node] + below)}, {_look(round_['states'][node])}"


def _look(state: str) -> str:
    return f'shape={SHAPES[state]}, style="{STYLES[state]}", color="{COLOURS[state]}"'


def _line(state: str) -> str:
    width = 2.4 if state in ("accepted", "bonus") else 1
    return f'color="{COLOURS[state]}", penwidth={width}'


def _quoted(text: str) -> str:
    """A DOT string, in which a backslash begins an escape."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def find_renderer() -> tuple[str, Path] | None:
    """Graphviz's name and place: `dot`, else the program of the package `graphviz-pure`; None if neither."""
    beside_python = str(Path(sys.executable).parent)
    for name in ("dot", "graphviz-pure"):
        found = shutil.which(name) or shutil.which(name, path=beside_python)
        if found:
            return name, Path(found)
    return None


def render(dot: str, file_format: str = "svg") -> tuple[str, bytes] | None:
    """The renderer's name and what it drew; None where there is no Graphviz.

    Raises:
        RuntimeError: Graphviz failed, with what it said.
    """
    renderer = find_renderer()
    if renderer is None:
        return None
    name, binary = renderer
    done = subprocess.run(
        [binary, f"-T{file_format}"], input=dot.encode(), capture_output=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.decode(errors='replace').strip()}")
    return name, done.stdout
