"""The drawing of a round, line by line."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
from rich.console import Console

import ddtree_lab as dl
from ddtree_lab.trace import Round
from ddtree_lab.view.text import draw_round, round_title, visible_text

TEXTS = {0: "the", 1: " cat", 2: " dog", 3: " sat", 4: "\n", 5: " ran", 6: "é"}


def example() -> Round:
    tree = dl.DraftTree.from_parents(
        [0, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 1, 3], log_probs=np.log([1, 0.5, 0.3, 0.4, 0.05, 0.24])
    )
    return Round(
        41, tree, (1, 3, 0, 5, 0, 0), tuple(np.log([0.9, 0.8, 0.1, 0.6, 0.1, 0.1])), (0, 1, 3), (1, 3, 5)
    )


def text_of(drawing, encoding: str = "utf-8") -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=stream, width=80, color_system=None).print(drawing)
    stream.seek(0)
    return [line.rstrip() for line in stream.read().splitlines()]


def test_a_round_reads_as_what_happened():
    assert text_of(draw_round(example(), TEXTS.get)) == [
        "◆ the  anchor, position 41",
        "├── ✓ ␣cat  p 0.50",
        "│   ├── ✓ ␣sat  p 0.80",
        "│   │   ├── · é  p 0.60",
        "│   │   └── ★ ␣ran  bonus, target p 0.60",
        "│   └── · ⏎  p 0.10",
        "└── · ␣dog  p 0.30",
    ]


def test_ascii_has_its_own_marks():
    lines = text_of(
        draw_round(replace(example()), lambda token: TEXTS[token].replace("é", "e"), ascii=True), "ascii"
    )
    assert lines[0] == "@ the  anchor, position 41"
    assert lines[1] == "+-- + _cat  p 0.50"
    assert all(line.isascii() for line in lines)


def test_an_end_inside_the_path_shows_no_bonus():
    ended = replace(example(), path=(0, 1), emitted_token_ids=(1, 3))
    lines = text_of(draw_round(ended, TEXTS.get))
    assert not any("★" in line for line in lines)
    assert sum("✓" in line for line in lines) == 2


def test_large_trees_fold_what_was_unlikely_and_not_kept():
    n = 120
    tree = dl.DraftTree.from_parents([0] + [1] * (n - 1), [-1] + [0] * (n - 2) + [n - 2])
    big = Round(0, tree, (1,) * n, (0.0,) * n, (0, n - 2, n - 1), (1, 1, 1))
    lines = text_of(draw_round(big, TEXTS.get))
    assert len(lines) < 50
    assert sum("✓" in line for line in lines) == 2
    folded = next(line for line in lines if "unlikely" in line)
    shown = sum("p " in line for line in lines) - 1  # the bonus line has a p too
    assert int(folded.split("…")[1].split()[0]) + shown == n - 1


def test_tokens_are_shown_and_never_taken_as_markup():
    assert visible_text(" \t[bold]") == "␣\\t[bold]"
    assert visible_text("\x07") == "\\x07"
    assert visible_text("") == '""'
    lines = text_of(draw_round(example(), lambda token: "[red]x[/red]"))
    assert "[red]x[/red]" in lines[0]


def test_the_title_counts_what_it_says():
    title = round_title(2, 9, example())
    assert title == "round 3 of 9: 5 drafted, 2 accepted drafts, 3 emitted tokens, draft mass 1.5"
