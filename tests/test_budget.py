"""`tree_budget="auto"`: what it chooses, and that no choice changes a token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from checks import check_same_cache, check_untouched, snapshot
from models import dense, hybrid, random_ids
from pairs import random_pair

import ddtree_lab as dl
from ddtree_lab.budget import LONGEST_REST, Pace
from ddtree_lab.costs import ROWS, RoundCosts, measure_costs
from ddtree_lab.pipeline import run_round, settings_for, start
from ddtree_lab.plain import rest
from ddtree_lab.stages.tree import build_tree

FLAT = RoundCosts((1, 257), (1.0, 1.0), 0.1, 1.0)  # rows cost nothing
STEEP = RoundCosts((1, 257), (1.0, 1025.0), 0.1, 1.0)  # four tokens a row
GENTLE = RoundCosts((1, 257), (1.0, 6.0), 0.1, 1.0)


def some_tree(budget=64, scale=3.0):
    return build_tree(torch.randn(7, 97, generator=torch.Generator().manual_seed(0)) * scale, budget)


def speed(costs, tree, budget, trust=1.0):
    gain = 1 + trust * float(np.exp(tree.log_probs[1 : budget + 1]).sum())
    return gain / (costs.draft_seconds + float(costs.of(budget + 1)))


@pytest.mark.parametrize(("costs", "expected"), [(FLAT, 64), (STEEP, 0)])
def test_free_rows_are_all_taken_and_dear_ones_none(costs, expected):
    assert Pace(costs).best_prefix(some_tree()).num_drafted == expected


def test_the_choice_is_the_best_of_all_budgets():
    tree = some_tree()
    found = Pace(GENTLE).best_prefix(tree).num_drafted
    assert 0 < found < 64
    assert speed(GENTLE, tree, found) == max(speed(GENTLE, tree, budget) for budget in range(65))


def test_a_drafter_that_is_never_right_is_trusted_less_and_then_rests():
    pace, tree = Pace(replace(GENTLE, draft_seconds=0.3)), some_tree()
    sizes, drafted = [], 0
    for _ in range(60):
        verified = pace.best_prefix(tree) if pace.drafts else tree.prefix(0)
        sizes.append(verified.num_drafted)
        drafted += pace.drafts
        pace = pace.after(verified, 0, 1)
    assert pace.trust < 0.3
    assert pace.rest == LONGEST_REST and drafted < 20
    assert sizes[-1] < sizes[0]


def test_a_few_bad_rounds_do_not_end_drafting():
    pace, tree = Pace(GENTLE), some_tree()
    for _ in range(4):
        pace = pace.after(pace.best_prefix(tree), 0, 1)
        assert pace.drafts


def test_a_drafter_that_is_right_is_asked_in_every_round_and_may_have_more():
    pace, tree = Pace(FLAT), some_tree(256)
    for _ in range(6):
        verified = pace.best_prefix(tree.prefix(pace.limit))
        pace = pace.after(verified, 6, 7)
        assert pace.drafts
    assert pace.trust > 1 and pace.limit == 256


def test_costs_are_between_what_was_measured():
    assert GENTLE.of([1, 129, 257]).tolist() == [1.0, 3.5, 6.0]
    assert GENTLE.by_rows.tolist() == [float(GENTLE.of(rows)) for rows in range(1, 258)]
    assert GENTLE.largest_budget == 256


def test_a_tree_larger_than_what_was_measured_is_cut_to_it():
    small = RoundCosts((1, 9), (1.0, 1.0), 0.1, 1.0)
    pace, tree = Pace(small), some_tree(64)
    assert pace.best_prefix(tree).num_drafted == 8
    assert pace.after(tree, 2, 3).seconds == pytest.approx(1.1)


def test_measured_costs_rise_and_stop_where_nothing_could_pay():
    costs = measure_costs(random_pair(), repeats=1, num_prompt_tokens=8)
    assert list(costs.seconds) == sorted(costs.seconds)
    assert len(costs.rows) == len(costs.seconds) >= 1
    assert costs.draft_seconds > 0 and costs.plain_seconds > 0


@pytest.mark.parametrize("late", [2, 5])
def test_a_hiccup_of_the_machine_does_not_end_the_curve(late, monkeypatch):
    """Times by a clock of its own: the first calls are plain decoding and the draft, then come sizes."""
    calls = iter(range(1_000))
    monkeypatch.setattr("ddtree_lab.costs._seconds", lambda run: 100.0 if next(calls) == late else 1.0)
    costs = measure_costs(random_pair(), repeats=3, num_prompt_tokens=8)
    assert costs.rows == ROWS and set(costs.seconds) == {1.0}


def test_a_size_that_is_too_dear_each_time_ends_the_curve(monkeypatch):
    calls = iter(range(1_000))
    monkeypatch.setattr("ddtree_lab.costs._seconds", lambda run: 1.0 if next(calls) < 5 else 100.0)
    assert measure_costs(random_pair(), repeats=3, num_prompt_tokens=8).rows == ROWS[:4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", [hybrid, dense])
@pytest.mark.parametrize("costs", [FLAT, GENTLE, STEEP], ids=["flat", "gentle", "steep"])
def test_auto_writes_plain_decodings_tokens_whatever_it_chooses(make, costs, temperature, monkeypatch):
    monkeypatch.setattr("ddtree_lab.pipeline.costs_of", lambda pair: costs)
    pair = random_pair(make())
    settings = dict(temperature=temperature, seed=3, max_new_tokens=30)
    plain = dl.generate(pair, random_ids(7), "autoregressive", **settings)
    made = dl.generate(pair, random_ids(7), tree_budget="auto", record=True, **settings)
    assert made.token_ids == plain.token_ids
    assert made.tree_budget == "auto" and made.trace.settings["tree_budget"] == "auto"
    sizes = {r.num_drafted for r in made.rounds}
    assert sizes != {0} if costs is FLAT else costs is not STEEP or sizes == {0}


DEAR = RoundCosts((1, 257), (3.0, 30.0), 0.5, 1.0)  # nothing pays


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rest_is_as_many_rounds_without_a_draft(temperature, monkeypatch):
    monkeypatch.setattr("ddtree_lab.pipeline.costs_of", lambda pair: DEAR)
    pair, told = random_pair(), []
    settings = settings_for(
        pair, method="ddtree", tree_budget="auto", max_new_tokens=60, temperature=temperature,
        top_k=None, top_p=None, seed=3, verify_method="auto",
    )  # fmt: skip
    state = start(pair, random_ids(7), settings)
    while not state.pace.resting:
        state = run_round(pair, settings, state)
    before = snapshot(state.cache)
    rested, by_rounds = rest(pair, settings, state, told.append), state
    check_untouched(state.cache, before)
    for _ in range(state.pace.resting):
        by_rounds = run_round(pair, settings, by_rounds)
    assert tuple(told) == rested.token_ids[len(state.token_ids) :] and len(told) == state.pace.resting
    for name in ("token_ids", "num_rounds", "pace", "finish_reason", "next_stage", "num_prompt_tokens"):
        assert getattr(rested, name) == getattr(by_rounds, name)
    check_same_cache(rested.cache, by_rounds.cache, "after a rest")
    assert rested.context.num_rows == by_rounds.context.num_rows
    torch.testing.assert_close(rested.context.keys, by_rounds.context.keys, rtol=0, atol=1e-5)
    torch.testing.assert_close(rested.context.values, by_rounds.context.values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_pays_most_tokens_are_plain_decodings(temperature, monkeypatch):
    monkeypatch.setattr("ddtree_lab.pipeline.costs_of", lambda pair: DEAR)
    pair, told = random_pair(), []
    settings = dict(temperature=temperature, seed=3, max_new_tokens=100)
    plain = dl.generate(pair, random_ids(7), "autoregressive", **settings)
    made = dl.generate(pair, random_ids(7), tree_budget="auto", on_tokens=told.extend, **settings)
    assert made.token_ids == plain.token_ids == tuple(told)
    assert sum(r.num_emitted_tokens for r in made.rounds) == len(made.token_ids) - 1
    assert sum(r.stage_seconds.keys() == {"verify"} for r in made.rounds) > 70
    recorded = dl.generate(pair, random_ids(7), tree_budget="auto", record=True, **settings)
    assert [r.num_emitted_tokens for r in recorded.trace.rounds] == [
        r.num_emitted_tokens for r in made.rounds
    ]


def test_a_drafter_without_taps_may_rest_too(monkeypatch):
    monkeypatch.setattr("ddtree_lab.pipeline.costs_of", lambda pair: DEAR)
    pair = replace(random_pair(), drafter=dl.NgramDrafter())
    plain = dl.generate(pair, random_ids(7), "autoregressive", max_new_tokens=60)
    made = dl.generate(pair, random_ids(7), tree_budget="auto", max_new_tokens=60)
    assert made.token_ids == plain.token_ids
    assert any(r.stage_seconds.keys() == {"verify"} for r in made.rounds)


def test_a_text_may_end_in_a_rest(monkeypatch):
    monkeypatch.setattr("ddtree_lab.pipeline.costs_of", lambda pair: DEAR)
    pair = random_pair()
    plain = dl.generate(pair, random_ids(7), "autoregressive", max_new_tokens=60)
    end = plain.token_ids[40]
    monkeypatch.setattr(type(pair), "eos_token_ids", frozenset({end}))
    made = dl.generate(pair, random_ids(7), tree_budget="auto", max_new_tokens=60)
    assert made.finish_reason == "eos"
    assert made.token_ids == plain.token_ids[: plain.token_ids.index(end) + 1]


def test_auto_in_a_session_goes_back_with_its_pace(monkeypatch):
    monkeypatch.setattr("ddtree_lab.pipeline.costs_of", lambda pair: GENTLE)
    session = dl.Session(random_pair(), random_ids(7), tree_budget="auto", max_new_tokens=20)
    session.run(rounds=1)
    pace = session.state.pace
    session.run(rounds=1)
    assert session.state.pace is not pace
    while session.state.num_rounds > 1:
        session.back()
    assert session.state.pace is pace
    plain = dl.generate(session.pair, random_ids(7), "autoregressive", max_new_tokens=20)
    assert session.run().token_ids == plain.token_ids


def test_auto_behind_the_librarys_generate(monkeypatch):
    monkeypatch.setattr("ddtree_lab.pipeline.costs_of", lambda pair: GENTLE)
    pair, ids = random_pair(), random_ids(7)
    plain = pair.target.generate(ids, max_new_tokens=20, do_sample=False)
    hook = dl.DDTree(pair.drafter, tree_budget="auto")
    assert torch.equal(
        pair.target.generate(ids, max_new_tokens=20, do_sample=False, custom_generate=hook), plain
    )


@pytest.mark.parametrize("budget", ["large", -1, True])
def test_other_budgets_are_refused(budget):
    with pytest.raises(ValueError, match=r"tree_budget is .* or 'auto'"):
        dl.generate(random_pair(), random_ids(5), tree_budget=budget)
