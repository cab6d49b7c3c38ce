"""Where nodes are drawn: no two on one place, best path straight, and the same as the slow definition."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_lab.view.layout import tidy_rows, tidy_rows_naive


@st.composite
def trees(draw, most: int = 40) -> list[int]:
    n = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, i - 1)) for i in range(1, n))]


def depths_of(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


@given(trees())
@settings(max_examples=200, deadline=None)
def test_rows_are_those_of_the_definition(parents):
    assert tidy_rows(parents).tolist() == tidy_rows_naive(parents).tolist()


@given(trees(), st.data())
@settings(max_examples=100, deadline=None)
def test_no_two_nodes_share_a_place_and_first_children_stand_in_their_parents_row(parents, data):
    bonus = data.draw(st.none() | st.integers(0, len(parents) - 1))
    rows, depths = tidy_rows(parents, bonus).tolist(), depths_of(parents)
    places = list(zip(depths, rows, strict=True))
    if bonus is not None:  # it stands beside its parent
        places.append((depths[bonus] + 1, rows[bonus]))
    assert len(set(places)) == len(places)
    assert min(rows) == rows[0] == 0
    for node in range(len(parents)):
        children = [child for child in range(len(parents)) if parents[child] == node]
        assert sorted(rows[child] for child in children) == [rows[child] for child in children]
        if children and node != bonus:
            assert rows[children[0]] == rows[node]


SHAPES = {
    "chain": lambda i: i - 1,
    "fan": lambda i: 0,
    "binary": lambda i: (i - 1) // 2,
    "caterpillar": lambda i: max(0, i - 2 + i % 2),
}


def lines_run(function, *args) -> int:
    """How many lines of Python a call runs: its work, on any machine."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("shape", SHAPES)
def test_work_grows_with_the_nodes_and_no_faster(shape):
    small, large = ([-1, *map(SHAPES[shape], range(1, n))] for n in (500, 4000))
    assert lines_run(tidy_rows, large) < 9 * lines_run(tidy_rows, small)  # eight times the nodes


def test_a_chain_deeper_than_the_recursion_limit_is_one_row():
    assert not tidy_rows(list(range(-1, 20_000))).any()
