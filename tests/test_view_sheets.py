"""Records that are no tree: each face says what the record holds, and the same as the other faces."""

from __future__ import annotations

import gc
import json
import math
import weakref
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from goldens import check_golden
from rounds import example_round, example_trace

import ddtree_lab as dl
from ddtree_lab.pipeline import Commit
from ddtree_lab.stages.cache import LayerReport
from ddtree_lab.view import sheets

torch = pytest.importorskip("torch")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def pair() -> dl.Pair:
    return dl.load_pair()


@pytest.fixture(scope="module")
def records(pair) -> dict:
    """The records of a round that keeps some drafts and drops others, and of the set-up stages."""
    session = dl.Session(pair, dl.bundled_prompts()[0], tree_budget=12, max_new_tokens=40)
    session.run(rounds=1)
    return {**session.records, "cache": dl.describe_cache(session.state.cache), "embedding": pair.embeddings}


def rows_of(view: dl.View, part: int = 0) -> list[list[dict]]:
    return [row["cells"] for row in view.payload["parts"][part]["rows"]]


@pytest.mark.parametrize("stage", ["draft", "mask", "commit", "cache", "embedding"])
def test_every_record_has_every_face_and_they_say_the_same(records, pair, stage):
    view = dl.view(records[stage], pair)
    assert view.payload["kind"] == "sheet"
    assert json.loads(json.dumps(view.payload, allow_nan=False)) == view.payload
    drawn = "".join(ET.fromstring(view.to_svg()).itertext())
    text = view.to_text()
    for row in (row for part in view.payload["parts"] for row in part["rows"]):
        for words in (row["head"], *(cell["text"] for cell in row["cells"])):
            assert words in text
            assert words in drawn
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", "image/svg+xml"}
    assert view.to_text(ascii=True).isascii()
    with pytest.raises(ValueError, match="Graphviz"):
        view.to_dot()


def test_a_draft_shows_the_drafters_favourites_with_their_log_probabilities(records, pair):
    draft = records["draft"]
    rows = rows_of(dl.view(draft, pair))
    log_probs = draft.logits.float().log_softmax(-1)
    assert len(rows) == draft.depth
    for depth, cells in enumerate(rows):
        order = log_probs[depth].argsort(descending=True)[: sheets.MAX_RANKS]
        for cell, token in zip(cells, order.tolist(), strict=False):
            assert cell["text"].replace("␣", " ").replace("↵", "\n") == pair.decode([token])
            assert float(cell["number"].replace("−", "-")) == pytest.approx(
                log_probs[depth, token].item(), abs=0.006
            )
            assert cell["share"] == pytest.approx(log_probs[depth, token].exp().item(), abs=1e-5)
    entropy = torch.distributions.Categorical(logits=draft.logits.float()).entropy()
    assert [float(cells[-1]["text"]) for cells in rows] == pytest.approx(entropy.tolist(), abs=0.006)


def test_tokens_that_cannot_be_and_drafts_of_nothing(pair):
    logits = torch.full((2, 40), -math.inf)
    logits[:, 3] = 0.0
    rows = rows_of(dl.view(dl.Draft(logits, 7, 4)))
    assert [cell["text"] for cell in rows[0]] == ["<3>", *["–"] * 5, "0.00"]
    even = dl.Draft(torch.zeros(1, pair.embeddings.vocab_size, dtype=torch.bfloat16), 7, 4)
    (cells,) = rows_of(dl.view(even, pair))
    assert not any(cell["text"].startswith("<") and cell["text"][1:-1].isdigit() for cell in cells), "no text"
    nothing = dl.view(dl.Draft(logits[:0], 7, 4), pair)
    assert "Nothing was drafted" in nothing.to_text()
    ET.fromstring(nothing.to_svg())


def test_a_mask_shows_who_sees_whom_in_every_kind_of_layer():
    tree = example_round().tree
    mask = dl.build_mask(tree, 5, windows=[4])
    view = dl.view(mask)
    assert [part["title"] for part in view.payload["parts"]] == [
        "What each row may look at",
        "In layers with a sliding window of 4",
    ]
    for part, visible in enumerate((mask.visible, mask.windowed[4][0, 0] == 0)):
        past = visible.shape[1] - tree.num_nodes
        for node, cells in enumerate(rows_of(view, part)):
            assert cells[0]["text"] == str(5 + tree.depths[node])
            assert cells[1]["text"] == f"{int(visible[node, :past].sum())} of {past}"
            assert [c["seen"] != "hidden" for c in cells[2:]] == visible[node, past:].tolist()
            assert [i for i, c in enumerate(cells[2:]) if c["seen"] == "self"] == [node]


def test_a_window_that_a_node_has_left_does_not_show_the_node_in_it():
    deep = dl.DraftTree.from_parents([1, 2, 3, 4], [-1, 0, 1, 2])
    cells = rows_of(dl.view(dl.build_mask(deep, 0, windows=[2])), 1)[3]
    assert [cell["seen"] for cell in cells[2:]] == ["hidden", "hidden", "ancestor", "self"]


def test_a_large_mask_counts_what_it_leaves_out():
    n = sheets.MAX_ROWS + 40
    tree = dl.DraftTree.from_parents([0] * n, [-1, *range(n - 1)])
    part = dl.view(dl.build_mask(tree, 3)).payload["parts"][0]
    assert len(part["rows"]) == sheets.MAX_ROWS
    assert "40 further nodes not shown" in part["note"]


def test_a_walk_is_drawn_on_its_tree(records, pair):
    walk = records["walk"]
    view = dl.view(walk, pair)
    assert view.payload["kind"] == "trace"
    (round_,) = view.payload["rounds"]
    assert round_["path"] == list(walk.path)
    assert round_["bonus"]["id"] == walk.bonus_token_id
    assert round_["texts"] == dl.view(records["tree"], pair).payload["rounds"][0]["texts"]
    assert "★" in view.to_text()
    ET.fromstring(view.to_svg())


def test_a_walk_without_its_tree_says_why_each_step_went_on_or_stopped():
    view = dl.view(dl.Walk((0, 2), (5, 6, 7)))
    assert view.payload["kind"] == "sheet"
    assert [[cell["text"] for cell in cells] for cells in rows_of(view)] == [
        ["<5>", "goes on: this is child node 2"],
        ["<7>", "stops: no child has this token"],
    ]


def test_two_walks_are_the_same_if_they_keep_the_same_whatever_tree_they_know():
    tree = example_round().tree
    walk = dl.walk_tree(tree, [1, 3, 0, 5, 0, 0])
    assert walk.tree is tree
    assert walk == replace(walk, tree=None)
    assert hash(walk) == hash(replace(walk, tree=None))
    assert "tree" not in repr(walk)


def test_a_commit_shows_where_each_row_goes_and_what_each_kind_of_layer_keeps(records, pair):
    commit, tree = records["commit"], records["tree"]
    view = dl.view(commit, pair)
    past = records["mask"].past_length
    for node, cells in enumerate(rows_of(view)):
        is_kept = node in commit.path
        assert cells[0]["state"] == ("root" if node == 0 else "accepted" if is_kept else "rejected")
        assert cells[1]["text"] == str(past + node)
        assert cells[2]["text"] == (str(past + commit.path.index(node)) if is_kept else "dropped")
    assert len(rows_of(view)) == tree.num_nodes
    kinds = {row["head"]: row["cells"] for row in view.payload["parts"][1]["rows"]}
    assert kinds["full attention"][0]["rollback"] == "crop"
    assert kinds["linear attention"][0]["rollback"] == "snapshot"
    assert f"after node {commit.path[-1]}" in kinds["linear attention"][2]["text"]
    assert str(commit.cache_length) in view.payload["lead"]


def test_a_commit_that_knows_no_tree_shows_what_it_knows():
    view = dl.view(Commit((0, 2), (5, 6), 9, 8, "eos"))
    assert [[cell["text"] for cell in cells] for cells in rows_of(view)] == [
        ["", "7", "7"],
        ["", "8", "dropped"],
        ["", "9", "8"],
    ]
    assert "The text ends (eos)." in view.to_text(width=200)
    ET.fromstring(view.to_svg())


def test_a_cache_shows_each_layer_with_its_badge(records):
    report = records["cache"]
    rows = rows_of(dl.view(report))
    for layer, cells in zip(report.layers, rows, strict=True):
        assert cells[0]["text"] == layer.kind.replace("_", " ")
        assert cells[1]["rollback"] == layer.rollback
        assert cells[2]["text"] == layer.class_name
    assert {cells[1]["rollback"] for cells in rows} == {"crop", "snapshot"}
    assert max(cells[3]["share"] for cells in rows) == 1.0


def test_badges_and_squares_differ_without_colour(records):
    drawn = ET.fromstring(dl.view(records["cache"]).to_svg())
    radii = {g.get("class"): g.get("rx") for g in drawn.iter(f"{SVG}rect") if "badge" in g.get("class", "")}
    assert radii["badge crop"] != radii["badge snapshot"]
    mask = ET.fromstring(dl.view(records["mask"]).to_svg())
    sizes = {g.get("class"): g.get("r") for g in mask.iter(f"{SVG}circle")}
    assert len(sizes) == len(set(sizes.values())) == 3


@pytest.mark.parametrize("stage", ["draft", "mask", "verify", "walk", "commit"])
def test_a_view_keeps_no_tensor_of_what_it_shows(pair, stage):
    session = dl.Session(pair, dl.bundled_prompts()[0], tree_budget=4, max_new_tokens=8).run(rounds=1)
    record = session.records[stage]
    held = weakref.ref(record)
    view = dl.view(record, pair)
    del record, session
    gc.collect()
    assert held() is None
    assert view.to_text()


def test_every_column_with_a_definition_is_there(records, pair):
    for stage in ("draft", "mask", "commit", "cache"):
        payload = dl.view(records[stage], pair).payload
        columns = {name for part in payload["parts"] for name in part["columns"]}
        for name in payload["definitions"]:
            assert any(column.startswith(name) for column in columns) or name == "log-probability"


def test_the_texts_of_tokens_come_from_the_pair(records, pair):
    tree = records["tree"]
    assert dl.view(tree).payload["rounds"][0]["texts"][0] == f"<{tree.token_ids[0]}>"
    assert dl.view(tree, pair).payload["rounds"][0]["texts"][0] == pair.decode([int(tree.token_ids[0])])
    with pytest.raises(TypeError, match="pair is a str"):
        dl.view(tree, "embedded")


def test_hostile_tokens_stay_texts_in_a_sheet():
    known = example_trace(texts={7: "</script>", 3: "<script>x</script>\x00"})
    sheet = sheets.draft_sheet(dl.Draft(torch.eye(2, 8), 7, 0), known)
    from ddtree_lab.view import html, sheet_svg

    drawn = sheet_svg.draw_sheet(sheet).to_svg()
    assert all(element.tag != f"{SVG}script" for element in ET.fromstring(drawn).iter())
    assert html.page("x", "x", drawn, sheet).count("</script>") == 2  # those of the page itself


def test_the_pictures_are_as_they_were_found_good():
    tree = example_round().tree
    check_golden("sheet-mask.svg", dl.view(dl.build_mask(tree, 5, windows=[4])).to_svg(theme="light"))
    check_golden("sheet-mask.txt", dl.view(dl.build_mask(tree, 5, windows=[4])).to_text())
    layers = tuple(
        LayerReport(i, kind, "Some", rollback, 0, {})
        for i, (kind, rollback) in enumerate(
            [("linear_attention", "snapshot"), ("full_attention", "crop"), ("odd", "none")]
        )
    )
    commit = Commit((0, 1, 3), (1, 3, 5), 44, 44, None, tree, layers)
    check_golden("sheet-commit.svg", dl.view(commit).to_svg())
    check_golden("sheet-commit.txt", dl.view(commit).to_text(ascii=True))
