"""Every notebook in a real JupyterLab: all cells run, nothing fails, nothing leaves, and a picture for each theme."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from lab import PANEL, Lab, serving
from watching import ROOT

pytestmark = [pytest.mark.browser, pytest.mark.slow]

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
CELLS = f"{PANEL}.content.model.toJSON().cells.filter(cell => cell.cell_type === 'code')"
ERROR = "output => output.output_type === 'error'"
CONTENT = ".jp-WindowedPanel-outer"
WIDTH, TALLEST = 1150, 16_000  # pixels; a taller picture does not fit into a texture of the browser
SETTINGS = {
    # Every cell is on the page, so that one picture shows all of them.
    "notebook-extension/tracker": {"windowingMode": "none", "scrollPastEnd": False},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


@pytest.fixture(scope="module")
def lab(site, tmp_path_factory) -> Iterator[str]:
    """A server over a copy of the repository's notebooks, without their outputs."""
    folder = tmp_path_factory.mktemp("notebooks")
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "notebooks").mkdir()
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, 4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, folder / "notebooks" / path.name)
    for name, values in SETTINGS.items():
        place = folder / f".JUPYTER_CONFIG_DIR/lab/user-settings/@jupyterlab/{name}.jupyterlab-settings"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(values))
    with serving(folder, site) as base:
        yield base


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_a_notebook_runs_from_top_to_bottom_in_both_themes(browser, lab, screenshots, path):
    committed = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    lesson = Lab(browser, lab, f"notebooks/{path.name}").open().run_all()
    failed = f"{CELLS}.some(cell => cell.outputs.some(output => output.output_type === 'error'))"
    lesson.page.wait_for_function(f"{CELLS}.every(cell => cell.execution_count) || {failed}", timeout=30_000)
    ran = lesson.page.evaluate(CELLS)
    assert [cell["execution_count"] for cell in ran] == [*range(1, len(ran) + 1)]
    for cell, known in zip(ran, committed, strict=True):
        kinds = [output.get("name", output["output_type"]) for output in cell["outputs"]]
        assert not {"error", "stderr"} & {*kinds}, cell["outputs"]
        assert bool(kinds) == bool(known.outputs), cell["source"]
    take_pictures(lesson, screenshots, path.stem[:2])
    assert lesson.watch.external == []
    assert lesson.watch.errors == []
    lesson.shut_down_kernel()
    lesson.close()


def take_pictures(lesson: Lab, folder: Path, number: str) -> None:
    """The whole notebook, once in each theme."""
    page = lesson.page
    lesson.command("application:set-mode", mode="single-document")
    lesson.command("application:toggle-left-area")
    content, height, missing = page.locator(CONTENT).first, 1000, 0
    for _ in range(10):  # a view in a frame grows when it is seen
        height = min(height + missing, TALLEST)
        page.set_viewport_size({"width": WIDTH, "height": height})
        page.wait_for_timeout(300)
        missing = content.evaluate("e => e.scrollHeight - e.clientHeight")
        if missing <= 0:
            break
    for theme in ("Dark", "Light"):
        lesson.theme(theme)
        page.wait_for_timeout(500)  # the views in frames follow
        page.screenshot(path=folder / f"notebook-{number}-{theme.lower()}.png")
