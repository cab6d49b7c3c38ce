"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import ddtree_lab

MODULES = [
    m.name for m in pkgutil.walk_packages(ddtree_lab.__path__, "ddtree_lab.") if "__main__" not in m.name
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples_to_run():
    finder = doctest.DocTestFinder()
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name))]
    assert sum(not example.options.get(doctest.SKIP) for test in found for example in test.examples) >= 5
