"""The doctor's proof: every known bug is found, located and named, and what is right raises no alarm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from ddtree_lab.doctor.bugs import BUGS
from ddtree_lab.doctor.checks import CHECKS
from ddtree_lab.doctor.matrix import CLEAN, PAIRS_OF_BUGS, SENSITIVE, SENSITIVE_BUGS

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "doctor.md"
PRECISIONS = ("float32", "bfloat16")


def named(value: object) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """What docs/doctor.md is made of, by section; in a process of its own, where shapes are not checked at run time.

    It takes minutes, so the first worker of pytest-xdist that asks makes it and the others read it.
    """
    folder = tmp_path_factory.getbasetemp()
    made = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "doctor-matrix.json"
    with FileLock(f"{made}.lock"):
        if not made.exists():
            command = [sys.executable, "-m", "ddtree_lab.doctor.matrix", "--json"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
            assert done.returncode == 0, done.stderr
            made.write_text(done.stdout)
    return json.loads(made.read_text())


def one(rows: list[dict], **wanted: object) -> dict:
    (found,) = (row for row in rows if all(row[name] == value for name, value in wanted.items()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found_located_and_named(rows, name):
    row = one(rows["bugs"], bugs=[name])
    assert row["is_named"], row["text"]
    assert row["is_located"], row["text"]
    assert row["num_problems"] == 1  # whatever else is wrong follows from it
    assert row["verdict"].startswith("The port: ")
    assert name in row["verdict"]


@pytest.mark.slow
@pytest.mark.parametrize("names", PAIRS_OF_BUGS, ids=named)
def test_two_bugs_at_once_are_both_named(rows, names):
    row = one(rows["pairs"], bugs=list(names))
    assert row["is_named"], row["text"]


@pytest.mark.slow
def test_clean_ports_have_no_problem(rows):
    assert len(rows["clean"]) == len(CLEAN) + len(PRECISIONS)
    for row in rows["clean"]:
        assert row["num_problems"] == 0, row["text"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_on_the_embedded_pair_nothing_is_skipped_that_could_be_seen(rows, dtype):
    row = one(rows["clean"], pair=f"embedded, {dtype}")
    assert row["verdict"].startswith("Neither: the port is exact")
    assert row["skipped"] == ["window_boundary", "distribution"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SENSITIVE)
@pytest.mark.parametrize("name", SENSITIVE_BUGS)
def test_bugs_are_named_in_half_precision_on_targets_that_rounding_moves_far(rows, kind, name):
    row = one(rows["sensitive"], bugs=[name], pair=f"random {kind}, bfloat16")
    assert row["is_named"], row["text"]
    assert row["is_located"], row["text"]


def test_the_published_matrix_has_a_row_for_each_bug_and_check_and_no_miss():
    text = DOCUMENT.read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")}

    def first_column(section: str) -> list[str]:
        rows = [line for line in sections[section].splitlines() if line.startswith("| `")]
        return [row.split("|")[1].strip(" `") for row in rows]

    assert first_column("Checks") == list(CHECKS)
    assert first_column("Bugs") == list(BUGS)
    assert first_column("In bfloat16, on targets that rounding moves far") == list(SENSITIVE_BUGS) * len(
        SENSITIVE
    )
    assert [
        tuple(c.strip(" `") for c in cell.split(" and ")) for cell in first_column("Two bugs at once")
    ] == [*PAIRS_OF_BUGS]
    assert "**no**" not in text
    assert f"{len(BUGS)} of {len(BUGS)} are found" in text
