"""The notebooks: pairs in step, outputs clean, and a fresh run gives what was committed."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="needs a checkout")
pytest.importorskip("jupytext")
pytest.importorskip("nbmake")

_spec = importlib.util.spec_from_file_location("notebooks_build", FOLDER / "build.py")
assert _spec is not None and _spec.loader is not None
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)

SOURCES = build.sources()
PLACE = "/home/someone"


def committed(source: Path) -> nbformat.NotebookNode:
    return nbformat.read(source.with_suffix(".ipynb"), 4)


def with_answers(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy with the code of the folded answers behind it, as a reader would try it."""
    copied = copy.deepcopy(notebook)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for answer in re.findall(r"<details>.*?</details>", text, re.DOTALL):
        for code in re.findall(r"```python\n(.*?)```", answer, re.DOTALL):
            copied.cells.append(nbformat.v4.new_code_cell(code))
    return copied


@pytest.fixture(params=SOURCES, ids=lambda path: path.stem[:2])
def source(request) -> Path:
    return request.param


def test_source_and_notebook_are_in_step_and_its_outputs_are_clean(source):
    assert build.check(source) == []


@pytest.mark.slow
def test_nbmake_runs_it_and_a_fresh_run_gives_what_was_committed(source, tmp_path):
    path = tmp_path / "notebooks" / f"{source.stem}.ipynb"
    path.parent.mkdir()
    old = committed(source)
    nbformat.write(with_answers(old), path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    nbmake = [sys.executable, "-m", "pytest", "-q", "--nbmake", "--overwrite"]
    environment = {**os.environ, **build.ENVIRONMENT, "IPYTHONDIR": str(tmp_path)}
    where = [f"--rootdir={tmp_path}", str(path)]
    ran = subprocess.run([*nbmake, *where], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-5000:]
    fresh = build.tidy(nbformat.read(path, 4))
    fresh.cells = fresh.cells[: len(old.cells)]  # without the answers
    assert build.faults(fresh) == []
    for new_cell, old_cell in zip(fresh.cells, old.cells, strict=True):
        if new_cell.cell_type == "code":
            assert build.comparable(new_cell) == build.comparable(old_cell), new_cell.source


def test_it_opens_with_what_it_teaches_how_long_it_takes_and_what_it_needs(source):
    first = committed(source).cells[0].source
    assert re.match(r"# \d · ", first)
    for promise in ("**At the end you will know**", "**Time:**", "**Needs:**", "glossary.md"):
        assert promise in first


def test_it_can_be_switched_to_a_real_pair_and_has_exercises(source):
    text = "\n".join(cell.source for cell in committed(source).cells)
    assert "Qwen/Qwen3.6-27B" in text
    assert text.count("<details>") == text.count("</details>") > 0


def test_its_links_lead_somewhere(source):
    for cell in committed(source).cells:
        if cell.cell_type != "markdown":
            continue
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", cell.source):
            assert link.startswith("https://") or (FOLDER / link).exists(), link


def test_every_notebook_is_in_the_table_of_contents_in_order():
    listed = re.findall(r"\]\((\d\d_\w+)\.ipynb\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert listed == [source.stem for source in SOURCES]
    assert [int(name[:2]) for name in listed] == [*range(1, len(listed) + 1)]


def test_words_in_the_glossary_stand_in_alphabetical_order_once():
    words = re.findall(r"^\*\*(.+?)\*\*", (FOLDER / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(words) > 40
    assert [word.lower() for word in words] == sorted({word.lower() for word in words})


@pytest.mark.parametrize(
    ("output", "fault"),
    [
        ({"output_type": "stream", "name": "stdout", "text": f"{PLACE}/model"}, "a place of this machine"),
        ({"output_type": "stream", "name": "stdout", "text": "Traceback (most recent"}, "a traceback"),
        ({"output_type": "stream", "name": "stderr", "text": "warning"}, "stderr"),
        ({"output_type": "stream", "name": "stdout", "text": "word " * 30}, "a line of 150 characters"),
        ({"output_type": "display_data", "metadata": {}, "data": {"image/png": ""}}, "without a description"),
        (
            {
                "output_type": "display_data",
                "metadata": {},
                "data": {"application/vnd.jupyter.widget-view+json": {}},
            },
            "a widget",
        ),
    ],
)
def test_what_a_committed_notebook_must_not_have_is_found(output, fault):
    cell = nbformat.v4.new_code_cell("1", execution_count=1, outputs=[nbformat.from_dict(output)])
    (found,) = build.faults(nbformat.v4.new_notebook(cells=[cell]))
    assert fault in found


def test_a_changed_source_is_noticed(tmp_path):
    source = tmp_path / "01_x.py"
    source.write_text("# %%\n1\n")
    notebook = build.read_source(source)
    nbformat.write(notebook, source.with_suffix(".ipynb"))
    assert build.in_step(source)
    source.write_text("# %%\n2\n")
    assert not build.in_step(source)


def test_durations_are_not_compared_and_everything_else_is():
    text = "ms: draft 1.2, verify 3\n35 tokens/s\nkept 3"
    cell = nbformat.v4.new_code_cell("1", outputs=[nbformat.v4.new_output("stream", text=text)])
    slower, other, varies = copy.deepcopy(cell), copy.deepcopy(cell), copy.deepcopy(cell)
    slower.outputs[0].text = "ms: draft 9, verify 12.5\n3.1 tokens/s\nkept 3"
    other.outputs[0].text = text.replace("kept 3", "kept 4")
    assert build.comparable(cell) == build.comparable(slower) != build.comparable(other)
    varies.metadata["tags"] = ["varies"]
    assert build.comparable(varies) == []
