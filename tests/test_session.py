"""A session is `generate` held still: forwards, backwards, forked, with another tree."""

from __future__ import annotations

import models
import pytest
import torch
from pairs import random_pair

import ddtree_lab as dl
from ddtree_lab import pipeline
from ddtree_lab.compat import layer_tensors
from ddtree_lab.pipeline import STAGES


@pytest.fixture(scope="module")
def pair() -> dl.Pair:
    return random_pair()


@pytest.fixture
def session(pair) -> dl.Session:
    return dl.Session(pair, [1, 2, 3, 4, 5], tree_budget=8, max_new_tokens=16)


def contents(session: dl.Session) -> list[torch.Tensor]:
    return [t.clone() for layer in session.state.cache.layers for t in layer_tensors(layer).values()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_stages_come_in_order_and_return_their_records(session):
    kinds = [type(session.step()).__name__ for _ in range(7)]
    assert kinds == ["Draft", "DraftTree", "TreeMask", "Verification", "Walk", "Commit", "Draft"]
    assert list(session.records) == ["draft"]


def test_run_to_the_end_equals_generate(pair, session):
    expected = dl.generate(pair, [1, 2, 3, 4, 5], tree_budget=8, max_new_tokens=16)
    assert session.run().token_ids == expected.token_ids
    assert session.next_stage is None
    with pytest.raises(ValueError, match="ended"):
        session.step()


def test_going_back_restores_every_tensor_and_computes_nothing(pair, session, monkeypatch):
    states = [contents(session)]
    texts = [session.token_ids]
    for _ in range(3 * len(STAGES)):
        session.step()
        states.append(contents(session))
        texts.append(session.token_ids)
    monkeypatch.setattr(type(pair.target), "forward", None)  # any pass would fail now
    for state, text in reversed(list(zip(states, texts, strict=True))[:-1]):
        session.back()
        assert session.token_ids == text
        assert_same(contents(session), state)
    with pytest.raises(ValueError, match="start"):
        session.back()


def test_forth_after_back_is_the_same_again(session):
    session.run(rounds=2)
    text, cache = session.token_ids, contents(session)
    for _ in range(len(STAGES) + 2):
        session.back()
    session.run(rounds=2)
    assert session.token_ids == text
    assert_same(contents(session), cache)


def test_forks_do_not_see_each_other(session):
    session.run(rounds=1)
    twin = session.fork()
    before = contents(session)
    twin.run()
    assert session.state.num_rounds == 1
    assert_same(contents(session), before)
    assert twin.token_ids == session.run().token_ids


def test_another_tree_gives_the_same_text(pair, session):
    """What is drafted may change, what the target says may not."""
    expected = dl.generate(pair, [1, 2, 3, 4, 5], max_new_tokens=16).token_ids
    while session.next_stage != "mask":
        session.step()
    anchor = session.state.anchor_token_id
    right = [anchor, *expected[1:4]]
    session.run(rounds=1)
    session.set_tree(dl.DraftTree.from_parents(right, [-1, 0, 1, 2]))
    assert session.next_stage == "mask"
    session.run(rounds=1)
    assert session.rounds[0].num_accepted_drafts == 3
    assert session.run().token_ids == expected


def test_a_tree_that_cannot_be_is_refused(session):
    with pytest.raises(ValueError, match="tree"):
        session.set_tree(dl.DraftTree.from_parents([0], [-1]))
    session.step()
    session.step()
    anchor = session.state.anchor_token_id
    with pytest.raises(ValueError, match="root token"):
        session.set_tree(dl.DraftTree.from_parents([anchor + 1], [-1]))
    with pytest.raises(ValueError, match="deep"):
        session.set_tree(dl.DraftTree.from_parents([anchor] * 30, range(-1, 29)))


def test_the_trace_is_the_one_of_generate(pair, session):
    session.run()
    expected = dl.generate(pair, [1, 2, 3, 4, 5], tree_budget=8, max_new_tokens=16, record=True).trace
    found, expected = session.trace.to_dict(), expected.to_dict()
    for trace in (found, expected):
        for recorded in trace["rounds"]:
            recorded.pop("stage_seconds")
    assert found == expected


def test_an_exception_in_a_stage_leaves_the_session_where_it_was(session, monkeypatch):
    session.step()
    before = contents(session)
    for stage in STAGES[1:]:
        with monkeypatch.context() as patch:
            patch.setitem(pipeline._RUN, stage, lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.step()
        assert session.next_stage == stage
        assert_same(contents(session), before)
        session.step()


def test_sampled_sessions_repeat(pair):
    one, two = (dl.Session(pair, [4, 4, 2], 6, 1.0, 7, max_new_tokens=12).run() for _ in range(2))
    plain = dl.generate(pair, [4, 4, 2], "autoregressive", max_new_tokens=12, temperature=1.0, seed=7)
    assert one.token_ids == two.token_ids == plain.token_ids


def test_it_prints_where_it_is(session):
    assert "next draft" in repr(session)
    session.step()
    assert "after draft, next tree" in str(session)
    assert max(session.token_ids) < models.VOCAB
