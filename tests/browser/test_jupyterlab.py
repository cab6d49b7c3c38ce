"""A real JupyterLab on loopback, with the built wheel first on the path: what a notebook's reader sees."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from watching import PROMPT, ROOT, Watch, focused, violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SESSION = "window.jupyterapp?.shell?.currentWidget?.sessionContext"
FRAME = "iframe.ddtree-lab-frame"
CELLS = [
    "import ddtree_lab as dl\nprint(dl.__file__)\na, b = dl.Trace.load('a.json'), dl.Trace.load('b.json')",
    "dl.view(a)",
    "dl.view((a, b))",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The wheel, unpacked as pip installs it; the editable checkout comes after it on the path."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(folder / "site"), str(wheel)], check=True, capture_output=True)
    return folder / "site"


@pytest.fixture(scope="module")
def lab(site, tmp_path_factory, trace, other_trace):
    """The server: its address and its folder, which holds two traces and notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    trace.save(folder / "a.json")
    other_trace.save(folder / "b.json")
    write_notebook(folder / "views.ipynb", CELLS)
    private = {
        name: str(folder / f".{name}") for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
    }
    settings = dict(
        ip="127.0.0.1", port="0", token="", password="", open_browser="False", allow_root="True",
        root_dir=str(folder), disable_check_xsrf="True",
    )  # fmt: skip
    options = [f"--ServerApp.{key}={value}" for key, value in settings.items()]
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--LabApp.expose_app_in_browser=True",
        "--no-browser",
        *options,
    ]
    environment = {
        **os.environ,
        **private,
        "PYTHONPATH": str(site),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield address(folder / "log", server), folder
    finally:
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()


def address(log: Path, server: subprocess.Popen) -> str:
    for _ in range(300):
        found = re.search(r"http://127\.0\.0\.1:\d+/", log.read_text())
        if found:
            return found.group(0)
        assert server.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def write_notebook(path: Path, cells: list[str]) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)


class Lab:
    """A JupyterLab page with one notebook open."""

    def __init__(self, browser, base: str, notebook: str, **context) -> None:
        self.base = base
        self.context = browser.new_context(viewport={"width": 1400, "height": 1000}, **context)
        self.page = self.context.new_page()
        self.watch = Watch(self.page, allowed=base)
        self.notebook = notebook

    def open(self) -> Lab:
        self.page.goto(f"{self.base}lab/tree/{self.notebook}?reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60000)
        return self

    def command(self, name: str, **arguments) -> None:
        execute = "([name, args]) => window.jupyterapp.commands.execute(name, args).then(() => null)"
        self.page.evaluate(execute, [name, arguments])

    def ready(self) -> None:
        """Wait until the kernel answers; what is run before that is lost."""
        self.page.wait_for_function(
            f"{SESSION}?.session?.kernel?.connectionStatus === 'connected'", timeout=60000
        )
        self.page.evaluate(f"{SESSION}.session.kernel.info.then(() => null)")
        self.page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=60000)

    def shut_down_kernel(self) -> None:
        self.page.evaluate(f"{SESSION}.shutdown().then(() => null)")

    def run_all(self) -> Lab:
        self.ready()
        self.command("notebook:run-all-cells")
        return self

    def view(self, index: int):
        """The frame of the view with that number, drawn."""
        frame = self.page.locator(FRAME).nth(index)
        frame.wait_for(timeout=60000)
        inner = frame.element_handle().content_frame()
        inner.wait_for_selector(".ddt-header", timeout=30000)
        return inner

    def close(self) -> None:
        self.context.close()


@pytest.fixture(scope="module")
def shown(browser, lab):
    """The notebook, run from top to bottom and saved."""
    base, _ = lab
    page = Lab(browser, base, "views.ipynb").open().run_all()
    page.view(1)
    page.command("docmanager:save")
    yield page
    page.close()


def test_both_views_render_and_nothing_is_asked_of_the_network(shown, site, screenshots):
    first, second = shown.view(0), shown.view(1)
    assert first.locator("[role=tree]").count() == 1
    assert second.locator("mark").count() == 2
    assert str(site) in shown.page.locator(".jp-OutputArea-output").first.inner_text(), "not the wheel"
    assert shown.watch.external == []
    frame = shown.page.locator(FRAME).first
    assert frame.get_attribute("sandbox") == "allow-scripts"
    # The frame takes the height of what is in it, so that it has no scroll bar of its own.
    first.wait_for_function("document.documentElement.scrollHeight <= innerHeight + 1")
    frame.scroll_into_view_if_needed()
    shown.page.screenshot(path=screenshots / "lab-light.png")


def test_two_views_do_not_disturb_each_other(shown):
    first, second = shown.view(0), shown.view(1)
    before = second.locator(".ddt-verdict").inner_text()
    first.locator("input[type=range]").fill("2")
    assert first.locator(".ddt-budget output").inner_text() == "2 of 32"
    assert second.locator(".ddt-verdict").inner_text() == before
    first.locator("input[type=range]").fill("32")


def test_by_keyboard_into_the_view_through_a_round_and_out_again(shown):
    page, frame = shown.page, shown.view(0)
    page.locator(".jp-Cell").nth(1).click()
    page.keyboard.press("Escape")
    in_frame = "document.activeElement?.matches('iframe.ddtree-lab-frame')"
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate(in_frame) and focused(frame).lstrip("-").isdigit():
            break
    assert focused(frame).lstrip("-").isdigit()
    for stage in ("walk", "verify"):
        page.keyboard.press("[")
        assert frame.locator("[aria-current=step]").inner_text() == stage
    for _ in range(2):
        page.keyboard.press("]")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert focused(frame) != "0"
    assert page.locator(".jp-Notebook .jp-Cell").count() == len(CELLS), "no key reached the notebook"
    for _ in range(40):
        page.keyboard.press("Tab")
        if not page.evaluate(in_frame):
            break
    assert not page.evaluate(in_frame)
    # Escape is the short way out.
    frame.locator("[role=treeitem][tabindex='0']").focus()
    page.keyboard.press("Escape")
    page.wait_for_function(f"!({in_frame})")


def test_the_notebooks_theme_reaches_into_the_frame(shown, screenshots):
    frame = shown.view(0)
    colour = "getComputedStyle(document.querySelector('.ddt')).backgroundColor"
    light = frame.evaluate(colour)
    shown.command("apputils:change-theme", theme="JupyterLab Dark")
    frame.wait_for_function("document.querySelector('.ddt').style.colorScheme === 'dark'", timeout=15000)
    assert frame.evaluate(colour) != light
    outside = "getComputedStyle(document.body).getPropertyValue('--jp-layout-color0').trim()"
    inside = "getComputedStyle(document.documentElement).getPropertyValue('--jp-layout-color0').trim()"
    assert frame.evaluate(inside) == shown.page.evaluate(outside)
    assert violations(frame) == []
    shown.page.screenshot(path=screenshots / "lab-dark.png")
    shown.command("apputils:change-theme", theme="JupyterLab Light")
    frame.wait_for_function("document.querySelector('.ddt').style.colorScheme === 'light'", timeout=15000)
    assert violations(frame) == []


def test_a_view_stays_when_it_is_scrolled_away_and_back(shown):
    shown.command("notebook:move-cursor-up")
    area = shown.page.locator(".jp-WindowedPanel-outer").first
    area.evaluate("e => e.scrollTop = e.scrollHeight")
    shown.page.wait_for_timeout(300)
    area.evaluate("e => e.scrollTop = 0")
    assert shown.view(0).locator("[role=treeitem]").count() > 3


def test_a_reopened_notebook_shows_it_without_a_kernel(shown, browser, lab):
    base, folder = lab
    for _ in range(50):
        if any(cell.outputs for cell in nbformat.read(folder / "views.ipynb", 4).cells[1:]):
            break
        time.sleep(0.1)
    again = Lab(browser, base, "views.ipynb")
    for path in ("kernels", "sessions"):  # nothing answers: the kernel is gone
        again.page.route(f"**/api/{path}**", lambda route: route.abort())
    again.open()
    frame = again.view(0)
    frame.locator("input[type=range]").fill("1")
    assert frame.locator(".ddt-budget output").inner_text() == "1 of 32"
    assert again.view(1).locator("mark").count() == 2
    assert again.watch.external == []
    again.close()


def test_an_untrusted_notebook_still_shows_something_to_read(shown, browser, lab):
    base, folder = lab
    notebook = json.loads((folder / "views.ipynb").read_text())
    for cell in notebook["cells"]:
        cell["source"] += "\n# another text, so another signature"
    (folder / "untrusted.ipynb").write_text(json.dumps(notebook))
    page = Lab(browser, base, "untrusted.ipynb").open()
    area = page.page.locator(".jp-OutputArea-child").nth(1)
    area.wait_for(timeout=30000)
    assert page.page.locator(FRAME).count() == 0, "the notebook is trusted after all"
    assert "accepted drafts" in area.inner_text()
    assert page.watch.external == []
    page.close()


def test_the_notebook_converts_to_a_page_that_asks_for_nothing(shown, browser, lab, tmp_path):
    _, folder = lab
    convert = [sys.executable, "-m", "jupyter", "nbconvert", "--to", "html", "--embed-images", "views.ipynb"]
    subprocess.run([*convert, "--output-dir", str(tmp_path)], cwd=folder, check=True, capture_output=True)
    page = browser.new_page()
    page.goto((tmp_path / "views.html").as_uri())
    frame = page.locator(FRAME).first.element_handle().content_frame()
    frame.wait_for_selector("[role=tree]", timeout=30000)
    page.close()


LIVE = [
    "import ddtree_lab as dl\npair = dl.load_pair()",
    f"session = dl.Session(pair, {PROMPT!r}, tree_budget=12).run(rounds=5)\nlive = dl.view(session).live()\nlive",
    "print('chosen', live.selection['node'], 'rounds', len(live.changed.rounds))",
]


@pytest.fixture(scope="module")
def live(browser, lab):
    """A notebook with the widget, up to the cell that reads it back."""
    base, folder = lab
    write_notebook(folder / "live.ipynb", LIVE)
    page = Lab(browser, base, "live.ipynb").open()
    page.ready()
    page.command("notebook:run-cell-and-select-next")
    page.command("notebook:run-cell-and-select-next")
    page.page.wait_for_selector(".ddt [role=tree]", timeout=90000)
    yield page
    page.close()


def test_the_tree_is_changed_and_verified_again_through_the_widget(live, screenshots):
    page = live.page
    drafted = page.locator(".ddt-figure-drafted dd").inner_text()
    kept = page.locator(".ddt-node[data-state=accepted]").first
    kept.click()
    node = kept.get_attribute("data-node")
    page.get_by_role("button", name="Cut this branch").click()
    assert page.locator(f".ddt-node[data-node='{node}']").get_attribute("data-state") == "pruned"
    assert "not known until it is verified again" in page.locator(".ddt-caption").inner_text()
    page.get_by_role("button", name="Undo edits").click()
    assert page.locator(f".ddt-node[data-node='{node}']").get_attribute("data-state") == "accepted"
    # A child that the drafter did not propose, with the target's own choice as its token: it is kept now.
    bonus = page.locator(".ddt-node[data-state=bonus]")
    page.locator(".ddt-node[data-state=accepted]").last.click()
    choice = page.locator(".ddt-facts dd code").nth(1).inner_text()
    page.get_by_label("child with token").fill(choice)
    page.get_by_role("button", name="Add", exact=True).click()
    assert page.locator(".ddt-node[data-state='what-if']").count() == 1
    before = page.locator(".ddt-node[data-state=accepted]").count() if bonus.count() else 0
    page.get_by_role("button", name="Verify again").click()
    page.get_by_text("Verified again by the model.").wait_for(timeout=60000)
    assert page.locator(".ddt-node[data-state=accepted]").count() > before
    assert int(page.locator(".ddt-figure-drafted dd").inner_text()) == int(drafted) + 1
    page.screenshot(path=screenshots / "lab-live.png")
    assert violations(page.locator(".ddt").element_handle().owner_frame(), ".ddt") == []
    live.command("notebook:move-cursor-down")  # a click into the widget made its cell the current one
    live.command("notebook:run-cell")
    page.get_by_text(re.compile(r"chosen \d+ rounds \d+")).wait_for(timeout=30000, state="attached")
    assert live.watch.external == []


def test_the_notebooks_styles_do_not_reach_into_the_widget(live, shown):
    """The widget stands in the notebook's own document; the frame does not, so the two are compared."""
    properties = [
        "float",
        "fontWeight",
        "fontSize",
        "margin",
        "padding",
        "display",
        "listStyleType",
        "whiteSpace",
    ]
    elements = [
        "h1",
        ".ddt-panels h2",
        "p",
        "dt",
        "dd",
        "code",
        "button",
        "input",
        "dfn",
        ".ddt-facts",
        ".ddt-figures",
        ".ddt-times",
        ".ddt-glossary>dl",
    ]
    elements += [".ddt-top ol", ".ddt-top li", "svg text", ".ddt-legend span"]
    looks = """([elements, names]) => Object.fromEntries(elements.map(one => {
        const style = getComputedStyle(document.querySelector('.ddt').querySelector(one));
        return [one, names.map(name => style[name]).join(' | ')]; }))"""
    asked = [elements, properties]
    inside, framed = live.page.evaluate(looks, asked), shown.view(0).evaluate(looks, asked)
    assert inside == framed


def test_an_error_in_the_kernel_comes_back_into_the_widget(live):
    page = live.page
    page.get_by_label("child with token").fill("several words at once")
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_role("button", name="Verify again").click()
    page.wait_for_selector(".ddt-alarm:not(:empty)", timeout=30000)
    assert "exactly one token" in page.locator(".ddt-alarm").inner_text()
    page.get_by_role("button", name="Undo edits").click()


def test_the_last_picture_stays_when_the_kernel_is_lost(live):
    page = live.page
    nodes = page.locator("[role=treeitem]").count()
    live.shut_down_kernel()
    page.locator("input[type=range]").fill("1")
    assert page.locator(".ddt-budget output").inner_text().startswith("1 of")
    assert page.locator("[role=treeitem]").count() >= nodes - 1


def test_the_first_notebook_runs_from_top_to_bottom_in_both_themes(browser, lab, screenshots):
    base, folder = lab
    notebook = nbformat.read(ROOT / "notebooks" / "01_one_round_by_hand.ipynb", 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, folder / "one_round.ipynb")
    lesson = Lab(browser, base, "one_round.ipynb").open().run_all()
    cells = "window.jupyterapp.shell.currentWidget.content.model.toJSON().cells.filter(c => c.cell_type === 'code')"
    lesson.page.wait_for_function(f"{cells}.every(c => c.execution_count)", timeout=120000)
    ran = lesson.page.evaluate(cells)
    assert [cell["execution_count"] for cell in ran] == [*range(1, len(ran) + 1)]
    assert [out for cell in ran for out in cell["outputs"] if out["output_type"] == "error"] == []
    area = lesson.page.locator(".jp-WindowedPanel-outer").first
    for theme in ("Dark", "Light"):
        lesson.command("apputils:change-theme", theme=f"JupyterLab {theme}")
        lesson.page.wait_for_function(f"document.body.dataset.jpThemeName === 'JupyterLab {theme}'")
        for place, name in ((0.0, "top"), (0.22, "tree"), (0.75, "round")):
            area.evaluate("(e, place) => e.scrollTop = place * e.scrollHeight", place)
            lesson.page.wait_for_timeout(500)
            lesson.page.screenshot(path=screenshots / f"notebook-1-{theme.lower()}-{name}.png")
    assert lesson.watch.external == []
    lesson.close()
