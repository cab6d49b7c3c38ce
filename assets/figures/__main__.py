"""Draws the README's picture with the tool's own terminal view: `python -m assets.figures`."""

from __future__ import annotations

import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from transformers.utils import logging

import ddtree_lab as dl
from ddtree_lab.commands.run import compare, show

FOLDER = Path(__file__).parent
# The page's own monospace font, instead of one fetched from a server.
TEMPLATE = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code, ", ""
)


def main() -> None:
    """One `ddtree-lab run` on the default prompt, as an SVG."""
    logging.set_verbosity_error()
    pair, prompt = dl.load_pair(), dl.bundled_prompts()[0]
    results = compare(pair, pair.encode(prompt), tree_budgets=[32, 64], max_new_tokens=100)
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=132, file=nowhere, force_terminal=True)
        show(console, prompt, results)
        svg = console.export_svg(title="ddtree-lab run", code_format=TEMPLATE)
    (FOLDER / "round.svg").write_text(svg, encoding="utf-8")
    print(f"wrote {FOLDER / 'round.svg'}")


main()
