"""Views and the widget in a real JupyterLab: what a notebook's reader sees and can do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import nbformat
import pytest
from lab import FRAME, Lab, serving, write_notebook
from watching import PROMPT, focused, violations

pytestmark = [pytest.mark.browser, pytest.mark.slow]

CELLS = [
    "import ddtree_lab as dl\nprint(dl.__file__)\na, b = dl.Trace.load('a.json'), dl.Trace.load('b.json')",
    "dl.view(a)",
    "dl.view((a, b))",
    "dl.view(dl.build_mask(a.rounds[0].tree, a.rounds[0].past_length))",
]


@pytest.fixture(scope="module")
def lab(site, tmp_path_factory, trace, other_trace):
    """The server: its address and its folder, which holds two traces and notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    trace.save(folder / "a.json")
    other_trace.save(folder / "b.json")
    write_notebook(folder / "views.ipynb", CELLS)
    with serving(folder, site) as base:
        yield base, folder


@pytest.fixture(scope="module")
def shown(browser, lab):
    """The notebook, run from top to bottom and saved."""
    base, _ = lab
    page = Lab(browser, base, "views.ipynb").open().run_all()
    page.view(2)
    page.command("docmanager:save")
    yield page
    page.close()


def test_both_views_render_and_nothing_is_asked_of_the_network(shown, site, screenshots):
    first, second, mask = (shown.view(index) for index in range(3))
    assert first.locator("[role=tree]").count() == 1
    assert mask.locator("td[data-seen=self]").count() > 5
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
    status = page.locator(".ddt-status").inner_text()
    assert re.search(r"keeps \d+ drafts? instead of \d+; the text stays the same", status), status
    page.screenshot(path=screenshots / "lab-live.png")
    assert violations(page.locator(".ddt").element_handle().owner_frame(), ".ddt") == []
    live.command("notebook:move-cursor-down")  # a click into the widget made its cell the current one
    live.command("notebook:run-cell")
    page.get_by_text(re.compile(r"chosen \d+ rounds \d+")).wait_for(timeout=30000, state="attached")
    assert live.watch.external == []


def test_a_path_is_forced_through_the_widget_and_the_target_goes_on_from_there(live, screenshots):
    page = live.page
    leaf = page.locator(".ddt-node[data-state=rejected]").last
    node, text = leaf.get_attribute("data-node"), leaf.locator(".ddt-token").text_content()
    leaf.click()
    page.get_by_role("button", name="Force this path").click()
    forced = page.locator(f".ddt-node[data-node='{node}'][data-state=accepted]")
    forced.wait_for(timeout=60000)
    assert page.locator(".ddt-alarm").inner_text() == ""
    assert "the text is another one from new token" in page.locator(".ddt-status").inner_text()
    assert "because the path was forced" in page.locator(".ddt-verdict").inner_text()
    assert page.locator(".ddt-node[data-state=bonus]").count() == 1, "the target goes on after the path"
    here = page.locator(".ddt-words [data-here=yes]").all_inner_texts()
    assert text in here, "the text so far is the forced one"
    reasons = []
    for kept in page.locator(".ddt-node[data-state=accepted]").all():
        kept.click()
        reasons.append(page.locator(".ddt-why").inner_text())
    assert any(
        "only because the path was forced: after its parent the target chose" in one for one in reasons
    )
    page.screenshot(path=screenshots / "lab-forced.png")


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
