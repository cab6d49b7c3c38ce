"""The live view: edits are verified by the model, and whatever goes wrong comes back as a sentence."""

from __future__ import annotations

import pytest

import ddtree_lab as dl

anywidget = pytest.importorskip("anywidget")


@pytest.fixture(scope="module")
def session() -> dl.Session:
    pair = dl.load_pair()
    return dl.Session(pair, dl.bundled_prompts()[0], tree_budget=12, max_new_tokens=60).run(rounds=2)


class Browser:
    """What the browser would have seen."""

    def __init__(self, session: dl.Session) -> None:
        self.live = dl.view(session).live()
        self.answers: list[dict] = []
        self.live.send = self.answers.append

    def ask(self, **message) -> dict:
        self.live._answer(self.live, {"id": len(self.answers) + 1, **message}, None)
        return self.answers[-1]

    def tree(self, index: int = 0) -> dict:
        round_ = self.live.payload["rounds"][index]
        return {name: list(round_[name]) for name in ("ids", "texts", "parents", "ranks", "log_probs")}


def with_child(tree: dict, parent: int, text: str) -> dict:
    added = {"ids": None, "texts": text, "parents": parent, "ranks": -1, "log_probs": None}
    return {name: [*column, added[name]] for name, column in tree.items()}


def test_the_same_tree_verifies_to_the_same_rounds(session):
    browser = Browser(session)
    answer = browser.ask(kind="verify", round=0, tree=browser.tree(), force=None)
    assert answer["id"] == 1
    for found, known in zip(answer["payload"]["rounds"], browser.live.payload["rounds"], strict=True):
        drop = ("stage_seconds",)
        assert {k: v for k, v in found.items() if k not in drop} == {
            k: v for k, v in known.items() if k not in drop
        }


def test_a_child_added_by_its_text_is_verified_by_the_model(session):
    browser = Browser(session)
    answer = browser.ask(kind="verify", round=0, tree=with_child(browser.tree(), 0, " two"), force=None)
    round_ = answer["payload"]["rounds"][0]
    assert round_["texts"][-1] == "␣two"
    assert round_["states"][-1] == "rejected"
    assert round_["token_target_log_probs"][-1] < 0
    assert (
        round_["emitted"] == browser.live.payload["rounds"][0]["emitted"]
    )  # the text stays the target's own


def test_a_cut_branch_leaves_the_text_and_takes_more_rounds(session):
    browser = Browser(session)
    alone = {name: column[:1] for name, column in browser.tree().items()}
    answer = browser.ask(kind="verify", round=0, tree=alone, force=None)
    assert len(answer["payload"]["rounds"][0]["emitted"]) == 1
    fork = browser.live.changed
    assert fork.token_ids == session.token_ids[: len(fork.token_ids)]


def test_a_forced_path_changes_the_text_and_not_the_session(session):
    browser = Browser(session)
    before = session.token_ids
    tree = with_child(browser.tree(), 0, " two")
    node = len(tree["ids"]) - 1
    round_ = browser.ask(kind="verify", round=0, tree=tree, force=node)["payload"]["rounds"][0]
    assert round_["path"][:2] == [0, node]
    assert round_["emitted_texts"][0] == "␣two"
    assert session.token_ids == before
    assert browser.live.changed.token_ids[:2] != before[:2]
    # What the target said there stays on record, and the picture says that it was not asked.
    assert round_["target_ids"][0] == browser.live.payload["rounds"][0]["target_ids"][0]
    assert "two  " in (text := dl.view(browser.live.changed).to_text()) and "forced" in text
    assert "forced" not in dl.view(session).to_text()


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (dict(kind="verify", round=9, force=None), "round 10"),
        (dict(kind="verify", round="x", force=None), "round is 'x'"),
        (dict(kind="verify", round=0, force=10**6), "node is"),
        (dict(kind="reboot", round=0, force=None), "'reboot'"),
    ],
)
def test_what_cannot_be_done_comes_back_with_the_id(session, message, sentence):
    browser = Browser(session)
    answer = browser.ask(tree=browser.tree(), **message)
    assert answer["id"] == 1
    assert sentence in answer["error"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tree: with_child(tree, 0, " an unlikely thing"), "exactly one token"),
        (lambda tree: with_child(tree, 99, " two"), "parents"),
        (lambda tree: {**tree, "ids": [7, *tree["ids"][1:]]}, "anchor"),
        (lambda tree: {**tree, "parents": "none"}, "not a list"),
        (lambda tree: {"ids": [None], "texts": [3]}, "not a text"),
        (lambda tree: None, "not an object"),
    ],
)
def test_a_tree_that_is_none_comes_back_as_a_sentence(session, change, sentence):
    browser = Browser(session)
    answer = browser.ask(kind="verify", round=0, force=None, tree=change(browser.tree()))
    assert sentence in answer["error"]


def test_a_selection_is_kept(session):
    browser = Browser(session)
    browser.live._answer(browser.live, {"kind": "select", "round": 1, "node": 4}, None)
    assert browser.live.selection == {"round": 1, "node": 4}


def test_only_a_session_can_be_live(session):
    with pytest.raises(TypeError, match="Session"):
        dl.view(session.trace).live()
