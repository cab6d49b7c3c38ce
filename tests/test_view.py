"""The faces of a view: each is self-contained, escaped, and of every kind of record."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from goldens import check_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import ended_round, example_round, example_trace, large_round

import ddtree_lab as dl
from ddtree_lab.view import dot, png
from ddtree_lab.view import html as pages
from ddtree_lab.view.marks import MARKS, outline
from ddtree_lab.view.payload import divergence, trace_payload
from ddtree_lab.view.subjects import MAX_NODES_EMBEDDED

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = {
    0: "</script>",
    1: "<script>alert(1)</script>",
    2: "]]>&\"'",
    3: "\u2028\x00\x1b[2J",
    5: "<!--",
    6: "\ufffe",
}


class Elements(HTMLParser):
    """Tags, and the text inside scripts, as a browser would tell them apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.scripts[-1] += data


def boxes(svg: str) -> list[ET.Element]:
    return [g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.find(f"{SVG}title") is not None]


@pytest.mark.parametrize(
    ("name", "view", "options"),
    [
        ("round.svg", lambda: dl.view(example_trace()), {}),
        ("round-dark.svg", lambda: dl.view(example_trace(ended_round())), {"theme": "dark"}),
        ("tree.svg", lambda: dl.view(example_round().tree), {}),
        ("diff.svg", lambda: dl.view((example_trace(), example_trace(ended_round()))), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_picture_is_drawn_as_it_was_found_good(name, view, options):
    svg = view().to_svg(**options)
    ET.fromstring(svg)
    check_golden(name, svg)


@pytest.mark.parametrize("n", [1, 9, 33, 65, 1024])
def test_every_node_is_drawn_once_or_counted(n):
    view = dl.view(example_trace(large_round(n)))
    assert len(boxes(view.to_svg(max_nodes=None))) == n + 1  # and the bonus token
    few = view.to_svg(max_nodes=20)
    hidden = re.search(r"(\d+) unlikely nodes not drawn", few)
    assert len(boxes(few)) - 1 + int(hidden[1] if hidden else 0) == n


def test_boxes_of_a_picture_do_not_overlap():
    svg = dl.view(example_trace(large_round(200))).to_svg(max_nodes=None)
    places = []
    for group in boxes(svg):
        x, y = map(float, re.findall(r"[\d.]+", group.get("transform")))
        width = max(float(number) for number in re.findall(r"[HL]([\d.]+)", group[1].get("d")) or ["60"])
        places.append((x, y, width))
    for i, (x, y, width) in enumerate(places):
        assert not any(abs(y - other) < 36 and x < left < x + width for left, other, _ in places[i + 1 :])


def test_a_thousand_nodes_make_a_picture_that_can_be_opened():
    svg = dl.view(example_trace(large_round(1024))).to_svg(max_nodes=None)
    assert len(svg) < 1_000_000


def test_states_differ_without_colour():
    paths = {state: outline(state, 60.0, 36.0) for state in MARKS}
    marks = {mark.path for mark in MARKS.values()}
    assert len(marks) == len({mark.glyph for mark in MARKS.values()}) == len(MARKS)
    assert len(set(paths.values())) == len(MARKS)


def test_the_browser_draws_the_same_marks():
    script = pages.asset("marks.js")
    for state, mark in MARKS.items():
        assert f'"{mark.path}"' in script, state
        assert f'"{mark.word}"' in script, state


def test_a_picture_says_what_it_shows_and_follows_the_theme():
    svg = dl.view(example_trace()).to_svg()
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert "2 accepted drafts" in root.find(f"{SVG}title").text
    assert root.find(f"{SVG}desc").text == "Kept below the: ␣cat ␣sat. Bonus: ␣ran."
    assert "prefers-color-scheme" in svg
    for theme in ("light", "dark"):
        assert "var(" not in dl.view(example_trace()).to_svg(theme=theme)
    with pytest.raises(ValueError, match="theme is 'blue'"):
        dl.view(example_trace()).to_svg(theme="blue")


def test_hostile_texts_stay_texts():
    trace = replace(example_trace(texts=HOSTILE), pair="</title><script>x</script>")
    view = dl.view(trace)
    svg, page = view.to_svg(), view.to_html()
    assert all(element.tag != f"{SVG}script" for element in ET.fromstring(svg).iter())
    elements = Elements(page)
    assert [attrs.get("type") for tag, attrs in elements.tags if tag == "script"] == [
        "application/json",
        "module",
    ]
    assert json.loads(elements.scripts[0]) == view.payload
    assert "alert(1)" not in elements.scripts[1]
    assert not any(name.startswith("on") for _, attrs in elements.tags for name in attrs)


@given(st.text(max_size=20), st.text(max_size=20))
@settings(max_examples=60, deadline=None)
def test_any_text_gives_a_picture_that_parses_and_data_that_ends_no_script(token, name):
    trace = replace(example_trace(texts={1: token, 3: name}), pair=name)
    view = dl.view(trace)
    ET.fromstring(view.to_svg())
    (data,) = Elements(f"<script>{pages.json_for_script(view.payload)}</script>").scripts
    assert json.loads(data) == json.loads(json.dumps(view.payload))
    assert dot.to_dot(view.payload["rounds"][0]).count("\n") == 18


def test_a_page_fetches_nothing():
    page = dl.view(example_trace()).to_html()
    allowed = {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) <= allowed
    assert not re.search(r"\bimport\s*[({\"']|@import|url\((?!#)", page)
    for _, attrs in Elements(page).tags:
        assert not {"src", "href", "srcset", "data"} & {name for name in attrs if name}


def test_a_page_without_scripts_has_the_picture_and_the_text():
    page = dl.view(example_trace()).to_html()
    assert "<noscript><figure" in page
    assert html.escape("├── ✓ ␣cat") in page


def test_hosts_that_take_frames_and_scripts_out_still_have_picture_and_text():
    output = dl.view(example_trace())._repr_mimebundle_()["text/html"]
    left = re.sub(r"<(iframe|script).*?</\1>", "", output, flags=re.DOTALL)
    assert left.startswith('<details class="ddtree-lab-still" open>')
    assert '<figure role="img" aria-label="example: 1 round"' in left
    assert html.escape("├── ✓ ␣cat") in left


def test_a_notebook_gets_a_sandboxed_frame_a_picture_and_text():
    view = dl.view(example_trace())
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "image/svg+xml"}
    (frame,) = (attrs for tag, attrs in Elements(bundle["text/html"]).tags if tag == "iframe")
    assert frame["sandbox"] == "allow-scripts"  # and not allow-same-origin: a trace is somebody else's data
    assert frame["srcdoc"] == view.to_html()
    assert bundle["text/plain"] == view.to_text() == str(view)
    assert len(repr(view)) < 150


def test_a_notebook_keeps_only_the_first_rounds_of_a_long_trace(tmp_path):
    rounds = (large_round(257),) * (MAX_NODES_EMBEDDED // 257 + 20)
    view = dl.view(example_trace(*rounds))
    (frame,) = (a for t, a in Elements(view._repr_mimebundle_()["text/html"]).tags if t == "iframe")
    embedded = json.loads(Elements(frame["srcdoc"]).scripts[0])
    assert len(embedded["rounds"]) == MAX_NODES_EMBEDDED // 257
    assert embedded["num_rounds"] == len(view.payload["rounds"]) == len(rounds)


def test_repr_is_cheap_and_nothing_is_displayed(capsys, monkeypatch):
    view = dl.view(example_trace())
    monkeypatch.setattr(type(view), "to_html", lambda self: 1 / 0)
    monkeypatch.setattr(type(view), "to_svg", lambda self: 1 / 0)
    assert repr(view) == "View(Trace(example, ddtree, 1 rounds, 4 new tokens))"
    assert capsys.readouterr().out == ""


def test_saving_writes_whole_files(tmp_path):
    view = dl.view(example_trace())
    for name in ("html", "svg", "dot"):
        getattr(view, f"save_{name}")(tmp_path / f"a.{name}")
        assert (tmp_path / f"a.{name}").read_text(encoding="utf-8") == getattr(view, f"to_{name}")()
    assert len(list(tmp_path.iterdir())) == 3


def test_png_has_the_size_of_the_picture(tmp_path):
    pytest.importorskip("resvg_py")
    view = dl.view(example_trace())
    view.save_png(tmp_path / "a.png", scale=2)
    head = (tmp_path / "a.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width = float(re.search(r'width="([\d.]+)"', view.to_svg())[1])
    assert int.from_bytes(head[16:20], "big") == pytest.approx(2 * width, abs=2)


def test_without_a_converter_png_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(png.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(png.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install resvg-py"):
        dl.view(example_trace()).save_png(tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_dot_is_drawn_by_whoever_is_there(monkeypatch):
    view = dl.view(example_trace(texts=HOSTILE))
    if dot.find_renderer():
        name, svg = view.draw_dot()
        assert name in ("dot", "graphviz-pure")
        assert ET.fromstring(svg).tag == f"{SVG}svg"
        assert svg.count('class="node"') == 7
    monkeypatch.setattr(dot, "find_renderer", lambda: None)
    assert view.draw_dot() == ("ddtree-lab", view.to_svg())


def test_where_two_runs_part_is_found_with_what_the_target_thought():
    a = example_trace()
    assert divergence(a, a) is None
    other = replace(example_round(), emitted_token_ids=(1, 3, 6), target_token_ids=(1, 3, 0, 6, 0, 0))
    found = divergence(a, example_trace(other))
    assert (found["index"], found["round_a"], found["round_b"]) == (3, 0, 0)
    assert (found["a"]["text"], found["b"]["text"]) == ("␣ran", "é")
    assert found["a"]["top"] == [[5, "␣ran", -0.5108], [6, "é", -1.204]]
    assert found["gap"] == pytest.approx(np.log(2), abs=1e-3)
    shorter = divergence(a, example_trace(ended_round()))
    assert (shorter["index"], shorter["b"]["id"]) == (3, None)
    prefill = divergence(a, replace(a, first_token_id=9))
    assert (prefill["index"], prefill["round_a"]) == (0, None)


def test_what_a_node_is_does_not_depend_on_which_rounds_are_handed_over():
    trace = example_trace(example_round(), ended_round())
    assert trace_payload(trace, rounds=[1])["rounds"] == trace_payload(trace)["rounds"][1:]


@pytest.mark.parametrize("x", [None, 3, "trace.json", [example_round()], {"rounds": []}, object(), dl.view])
def test_what_cannot_be_viewed_is_refused_in_a_sentence(x):
    with pytest.raises(TypeError, match="cannot be viewed; give") as caught:
        dl.view(x)
    assert "\n" not in str(caught.value)


def test_a_trace_without_rounds_has_every_face_that_it_can_have():
    view = dl.view(replace(example_trace(), rounds=()))
    assert "0 rounds" in view.to_text()
    ET.fromstring(view.to_svg())
    assert view.to_html()
    with pytest.raises(ValueError, match="no round"):
        view.to_dot()


def test_view_is_there_whatever_was_imported_before():
    script = "import ddtree_lab.view.text, ddtree_lab as dl; dl.view(dl.build_chain).to_text()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "TypeError: x is a function" in done.stderr


@pytest.fixture(scope="module")
def session() -> dl.Session:
    return dl.Session(dl.load_pair(), dl.bundled_prompts()[0], tree_budget=8, max_new_tokens=20)


class TestRecordsOfARun:
    """Every record of a session, as it comes."""

    def test_each_stage_can_be_viewed_after_it_ran(self, session):
        for _ in range(8):
            record = session.step()
            view = dl.view(record)
            assert view.to_text()
            assert view.to_html()
            assert view._repr_mimebundle_()["text/plain"] == view.to_text()
            ET.fromstring(view.to_svg())
        assert session.state.num_rounds == 1

    def test_a_session_shows_the_round_it_is_in(self, session):
        payload = dl.view(session).payload
        assert payload["num_rounds"] == 2
        assert payload["rounds"][1]["target_ids"] is None  # its tree is drafted, nothing is verified
        assert (
            payload["rounds"][1]["past_length"]
            == session.state.records["tree"].num_nodes * 0 + len(session.state.token_ids) - 1
        )
        session.run(rounds=0)
        while session.next_stage != "walk":
            session.step()
        assert dl.view(session).payload["rounds"][1]["target_top"] is not None
        session.run(rounds=1)
        assert dl.view(session).payload["rounds"] == dl.view(session.trace).payload["rounds"]

    def test_a_view_stays_what_it_was_when_the_session_goes_on(self):
        session = dl.Session(dl.load_pair(), dl.bundled_prompts()[0], tree_budget=4, max_new_tokens=9).run(
            rounds=1
        )
        view = dl.view(session)
        before = view._repr_mimebundle_()
        session.run()
        assert view._repr_mimebundle_() == before

    def test_a_generation_shows_its_trace_or_says_how_to_record_one(self, session):
        with pytest.raises(ValueError, match="record=True"):
            dl.view(dl.generate(session.pair, "Count from 3 to 8.", max_new_tokens=4))
        generation = dl.generate(session.pair, "Count from 3 to 8.", max_new_tokens=4, record=True)
        assert dl.view(generation).payload == dl.view(generation.trace).payload

    def test_split_characters_are_whole_again(self, session):
        generation = dl.generate(session.pair, "Say: ✓🙂é 日本", max_new_tokens=1, record=True)
        shown = "".join(trace_payload(generation.trace)["prompt"]["texts"])
        assert all(character in shown for character in "✓🙂é日本")
        assert generation.trace.token_bytes


def test_a_report_shows_its_leaks_as_a_heat_map():
    from ddtree_lab.doctor.report import Finding, Report

    matrix = {
        "layers": [0, 1],
        "kinds": ["linear_attention", "full_attention"],
        "moved": [[0.0, 0.2, 0.1], [0.0, 0.3, 0.0]],
        "caption": "how far each node's row moves when node 1's token is changed",
    }
    finding = Finding("siblings", "problem", "verify", evidence={"matrix": matrix})
    view = dl.view(Report("a port", "something leaks", (finding,)))
    assert view.payload["kind"] == "leaks"
    svg = view.to_svg()
    heat = [g for g in ET.fromstring(svg).iter(f"{SVG}rect") if g.get("class") == "heat"]
    assert len(heat) == 3
    width = float(ET.fromstring(svg).get("viewBox").split()[2])
    assert width > 9 * len(view.payload["title"]), "the title is cut off"
    check_golden("leaks.svg", svg)
    assert view.payload["lead"] == "something leaks"
    assert [part["title"] for part in view.payload["parts"]] == ["Problems", "What was checked"]
    fine = Finding("mask_bits", "ok", "mask", symptom="every bit is the tree's")
    clean = dl.view(Report("a port", "all is well", (fine,)))
    assert clean.payload["kind"] == "sheet"
    assert clean.payload["lead"] == "all is well"
    assert [part["title"] for part in clean.payload["parts"]] == ["What was checked"]
    assert "✓ ok" in clean.to_svg()
    assert "all is well" in clean.to_text()


def test_the_package_brings_the_browser_code():
    assert "render" in pages.script_text()
    assert Path(pages.__file__).with_name("static").joinpath("viewer.css").exists()


def test_the_example_page_is_made_by_the_code_as_it_is():
    """After a change to the browser code: `python -m assets.figures`."""
    page = Path(__file__).parent.parent / "assets" / "example-round.html"
    if not page.exists():
        pytest.skip("needs a checkout")
    text = page.read_text(encoding="utf-8")
    assert pages.script_text() in text
    assert pages.asset("viewer.css") in text
    payload = json.loads(Elements(text).scripts[0])
    assert payload["definitions"] == dl.view(example_trace()).payload["definitions"]
