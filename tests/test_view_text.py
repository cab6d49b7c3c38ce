"""The drawing of a round in the terminal, line by line."""

from __future__ import annotations

import pytest
from goldens import check_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import TEXTS, ended_round, example_round, example_trace, large_round

import ddtree_lab as dl
from ddtree_lab.records import plain_mark
from ddtree_lab.view.numbers import title
from ddtree_lab.view.payload import round_payload
from ddtree_lab.view.tokens import line_texts, path_texts, visible_text


def lines_of(round_: dl.Round, texts: dict[int, str] | None = None, **options) -> list[str]:
    return dl.view(example_trace(round_, texts=texts)).to_text(round_index=0, **options).splitlines()[7:]


def test_a_round_reads_as_what_happened():
    assert lines_of(example_round())[:7] == [
        "◆ the  anchor, position 41",
        "├── ✓ ␣cat  p 0.50  target 0.90",
        "│   ├── ✓ ␣sat  p 0.80  target 0.80",
        "│   │   ├── × é  p 0.60  target 0.30",
        "│   │   └── ★ ␣ran  bonus, target 0.60",
        "│   └── × ↵  p 0.10  target 0.10",
        "└── × ␣dog  p 0.30  target 0.05",
    ]


@pytest.mark.parametrize(
    ("name", "view"),
    {
        "round": lambda: dl.view(example_trace()),
        "round-ended-early": lambda: dl.view(example_trace(ended_round())),
        "round-33": lambda: dl.view(example_trace(large_round(33))),
        "tree": lambda: dl.view(example_round().tree),
        "diff": lambda: dl.view((example_trace(), example_trace(ended_round()))),
    }.items(),
)
@pytest.mark.parametrize("ascii", [False, True], ids=["unicode", "ascii"])
def test_each_view_prints_as_it_was_found_good(name, view, ascii):  # noqa: A002
    text = view().to_text(ascii=ascii)
    assert not ascii or text.isascii()
    check_golden(f"{name}{'-ascii' if ascii else ''}.txt", text)


def test_an_end_inside_the_path_shows_no_bonus():
    lines = lines_of(ended_round())
    assert not any("★" in line for line in lines)
    assert sum("✓" in line for line in lines) == 2


@pytest.mark.parametrize("n", [1, 9, 65, 1024])
def test_large_trees_fold_what_was_unlikely_and_not_kept(n):
    big = large_round(n)
    lines = lines_of(big)
    shown = sum("✓" in line or "×" in line for line in lines)
    folded = sum(int(line.split("…")[1].split()[0]) for line in lines if "unlikely" in line)
    assert folded + shown == n - 1
    assert sum("✓" in line for line in lines) == len(big.path) - 1
    assert len(lines) < 120
    assert sum("×" in line or "✓" in line for line in lines_of(big, max_nodes=None)) == n - 1


def test_a_chain_of_a_thousand_nodes_is_drawn_in_whole():
    lines = lines_of(large_round(1000, chain=True))
    assert sum("✓" in line for line in lines) == 999


def test_tokens_are_shown_and_never_taken_as_markup():
    assert visible_text(" \t[bold]") == "␣⇥[bold]"
    assert visible_text("\x07\x7f") == "␇‹U+007F›"
    assert visible_text("\u202e\ud800") == "‹U+202E›‹U+D800›"
    assert visible_text("\u0301") == "◌\u0301"
    assert visible_text("") == "∅"
    assert "[red]x[/red]" in lines_of(example_round(), {0: "[red]x[/red]"})[0]


@given(st.text())
@settings(max_examples=200)
def test_a_visible_text_is_printable_and_has_no_blank(text):
    shown = visible_text(text)
    assert shown.isprintable()
    assert not any(character.isspace() for character in shown)


def test_a_character_split_over_tokens_stands_at_its_last_one():
    pieces = dict(enumerate(bytes([byte]) for byte in "é✓🙂".encode()))
    parents = list(range(-1, len(pieces) - 1))
    assert path_texts(list(pieces), parents, TEXTS.get, pieces.get) == [
        *("‹c3›", "é", "‹e2›", "‹9c›", "✓", "‹f0›", "‹9f›", "‹99›", "🙂")
    ]


def test_siblings_end_a_character_each_in_its_own_way():
    pieces = {1: b"\xe2\x9c", 2: b"\x93", 3: b"\x97"}
    assert path_texts([1, 2, 3], [-1, 0, 0], TEXTS.get, pieces.get) == ["‹e2 9c›", "✓", "✗"]
    assert line_texts([2], TEXTS.get, pieces.get) == ["\ufffd"]  # no token before it began a character


@given(st.binary(max_size=12))
def test_bytes_cut_anywhere_give_a_text_a_token(raw):
    pieces = dict(enumerate(bytes([byte]) for byte in raw))
    assert all(line_texts(list(pieces), TEXTS.get, pieces.get))


def test_the_title_counts_what_it_says():
    row = round_payload(example_round(), example_trace())
    assert title(row, 3, 9) == "round 3 of 9: 5 drafted, 2 accepted drafts, 3 emitted tokens, draft mass 1.5"


def test_every_mark_has_an_ascii_stand_in_of_one_column():
    assert all(len(plain_mark(mark)) == 1 for mark in "◆○✓×★…␣↵⇥∅–")
    assert plain_mark("é") == "\\xe9"
