"""Pictures in notebooks: a figure or a tree with its description, light on its own ground, the same each time."""

from __future__ import annotations

import base64
import re

import pytest
from matplotlib import pyplot as plt

import ddtree_lab as dl


def line():
    figure, axes = plt.subplots(figsize=(2, 2))
    axes.plot([0, 1], [1, 0], label="a line")
    axes.legend()
    return figure


def test_a_chart_says_what_it_shows_and_is_the_same_file_each_time():
    charts = [dl.chart(line(), 'one line & "falling"') for _ in range(2)]
    assert charts[0].svg == charts[1].svg
    bundle = charts[0]._repr_mimebundle_()
    assert bundle["text/plain"] == 'one line & "falling"'
    assert 'alt="one line &amp; &quot;falling&quot;"' in bundle["text/html"]
    (data,) = re.findall(r"base64,([^\"]+)", bundle["text/html"])
    picture = base64.b64decode(data).decode()
    assert "a line" in picture and "#ffffff" in picture and "http://www.w3.org" in picture
    assert not plt.get_fignums(), "a figure left open would be shown twice"


def test_a_chart_without_a_description_is_refused():
    with pytest.raises(ValueError, match="say in a sentence"):
        dl.chart(line(), " ")


def test_the_picture_of_a_tree_runs_nothing_and_keeps_its_text():
    tree = dl.DraftTree.from_parents([5, 7, 8], [-1, 0, 0])
    bundle = dl.view(tree).picture()._repr_mimebundle_()
    assert bundle["text/plain"] == dl.view(tree).to_text()
    assert "<svg" in bundle["text/html"] and "As text" in bundle["text/html"]
    assert "<script" not in bundle["text/html"] and "prefers-color-scheme" not in bundle["text/html"]
