"""Draws the README's picture and the example page with the tool's own views: `python -m assets.figures`."""

from __future__ import annotations

from pathlib import Path

from transformers.utils import logging

import ddtree_lab as dl

ASSETS = Path(__file__).parent.parent
TREE_BUDGET = 24


def main() -> None:
    """One decode of the default prompt: its most telling round as a picture, all of it as a page."""
    logging.set_verbosity_error()
    pair, prompt = dl.load_pair(), dl.bundled_prompts()[0]
    dl.generate(pair, prompt, max_new_tokens=3)  # the first pass pays for lazy set-up
    view = dl.view(dl.generate(pair, prompt, tree_budget=TREE_BUDGET, record=True))
    for path, save in (
        (ASSETS / "figures/round.svg", view.save_svg),
        (ASSETS / "example-round.html", view.save_html),
    ):
        save(path)
        print(f"wrote {path}")


main()
