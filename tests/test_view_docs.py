"""docs/viewer.md says what is tested; each test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import ddtree_lab as dl

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "viewer.md").read_text(encoding="utf-8")


def test_every_test_it_names_exists():
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 20
    assert {name for name in named if f"def {name}(" not in tests} == set()


def test_its_numbers_are_those_of_the_code():
    from ddtree_lab.view.sheets import MAX_ROWS
    from ddtree_lab.view.subjects import MAX_NODES_EMBEDDED

    assert f"{MAX_NODES_EMBEDDED:,} nodes" in PAGE
    assert f"More than {MAX_ROWS} rows" in PAGE


def test_every_class_it_names_can_be_had():
    classes = set(re.findall(r"`([A-Z]\w+)`", PAGE)) - {"View"}
    internal = {"Commit", "CacheReport", "EmbeddingPath"}  # are returned, not made by users
    assert all(hasattr(dl, name) for name in classes - internal)
