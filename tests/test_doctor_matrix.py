"""The doctor's proof: every known bug is found, located and named, and what is right raises no alarm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddtree_lab.doctor.bugs import BUGS, BuggyPort
from ddtree_lab.doctor.checks import CHECKS
from ddtree_lab.doctor.diagnose import examine
from ddtree_lab.doctor.material import Material
from ddtree_lab.doctor.matrix import (
    CLEAN,
    DECISIVE,
    PAIRS_OF_BUGS,
    PROMPT,
    Matrix,
    Row,
    diagnose_clean,
    diagnose_embedded,
)
from ddtree_lab.doctor.targets import small_pair

DOCUMENT = Path(__file__).parent.parent / "docs" / "doctor.md"
PRECISIONS = [torch.float32, torch.bfloat16]


def named(value: object) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value).removeprefix("torch.")


@pytest.fixture(scope="module")
def matrix():
    return Matrix()


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found_located_and_named(matrix, name):
    row = matrix.diagnose(name)
    assert row.is_named, row.report.to_text()
    assert row.is_located, row.report.to_text()
    assert len(row.report.problems) == 1  # whatever else is wrong follows from it
    assert name in row.report.verdict
    assert row.report.problems[0].references or not BUGS[name].references


@pytest.mark.slow
@pytest.mark.parametrize("names", PAIRS_OF_BUGS, ids=named)
def test_two_bugs_at_once_are_both_named(matrix, names):
    row = matrix.diagnose(*names)
    assert row.is_named, row.report.to_text()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), CLEAN, ids=named)
def test_a_clean_port_has_no_problem(kind, dtype):
    report = diagnose_clean(kind, dtype).report
    assert report.ok, report.to_text()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PRECISIONS, ids=named)
def test_the_embedded_pair_has_no_problem(dtype):
    report = diagnose_embedded(dtype).report
    assert report.ok, report.to_text()
    assert report.verdict.startswith("Neither")
    skipped = {finding.check for finding in report.findings if finding.status == "skipped"}
    assert skipped == {"window_boundary", "distribution"}


SENSITIVE = ["Qwen3-Next", "hybrid, mixture of experts", "hybrid in a multimodal wrapper"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SENSITIVE)
def test_bugs_are_named_in_half_precision_on_targets_that_rounding_moves_far(kind):
    pair = small_pair(kind, torch.bfloat16)
    material = Material(pair, PROMPT)
    # Rounding alone may move these targets' logits by a good part of their size.
    assert float(material.known_text.slack.median()) > 5
    for name in (
        "flattened_recurrence", "state_not_rolled_back", "siblings_visible", "positions_by_index", "conv_by_index",
    ):  # fmt: skip
        row = Row((BUGS[name],), pair.name, examine(material, BuggyPort(pair, [BUGS[name]]), DECISIVE))
        assert row.ok, row.report.to_text()


def test_the_published_matrix_has_a_row_for_each_bug_and_check_and_no_miss():
    text = DOCUMENT.read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")}

    def first_column(section: str) -> list[str]:
        rows = [line for line in sections[section].splitlines() if line.startswith("| `")]
        return [row.split("|")[1].strip(" `") for row in rows]

    assert first_column("Checks") == list(CHECKS)
    assert first_column("Bugs") == list(BUGS)
    assert [
        tuple(c.strip(" `") for c in cell.split(" and ")) for cell in first_column("Two bugs at once")
    ] == [*PAIRS_OF_BUGS]
    assert "**no**" not in text
    assert f"{len(BUGS)} of {len(BUGS)} are found" in text
