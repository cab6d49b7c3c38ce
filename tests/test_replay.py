"""A recorded text knows the rounds of every way to decode it, and `auto` is held against all of them."""

from __future__ import annotations

import pytest
from models import random_ids
from pairs import random_pair

import ddtree_lab as dl
from ddtree_lab.bench.advisor import advise, advise_on, foresee
from ddtree_lab.bench.replay import Replayed, record_text, replayed
from ddtree_lab.costs import RoundCosts

ROWS = (1, 3, 5, 9, 17, 33, 65, 129, 257)
# Rounds of plain rounds' length and up, as on two cores; and where rows are dear, and where they are nearly free.
CURVES = {
    "two cores": RoundCosts(ROWS, (1.2, 1.22, 1.25, 1.32, 1.4, 1.5, 1.85, 2.6, 4.3), 0.2, 1.0),
    "dear rows": RoundCosts(ROWS, (1.2, 1.25, 1.33, 1.5, 1.7, 1.95, 2.8, 4.7, 9.0), 0.2, 1.0),
    "cheap rests": RoundCosts(ROWS, (1.03, 1.22, 1.25, 1.32, 1.4, 1.5, 1.85, 2.6, 4.3), 0.2, 1.0),
    "cheap rows": RoundCosts(ROWS, (1.2, 1.2, 1.21, 1.22, 1.24, 1.26, 1.33, 1.48, 1.8), 0.1, 1.0),
}
DOMAINS = {"docs": 0.7, "code": 0.7, "chat": 0.0}


def shape(rounds):
    return [(r.num_drafted, r.num_emitted) for r in rounds]


@pytest.fixture(scope="module")
def embedded():
    return dl.load_pair()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replay_has_the_rounds_of_the_decode(temperature, monkeypatch):
    pair, ids, said = random_pair(), random_ids(7), dict(temperature=temperature, seed=3, max_new_tokens=30)
    recording = record_text(pair, ids, budget=64, **said)
    for budget in (0, 5, 64):
        made = dl.generate(pair, ids, tree_budget=budget, **said)
        assert recording.token_ids == made.token_ids
        assert shape(recording.tree_rounds(budget)) == shape(replayed(made))
    chain = dl.generate(pair, ids, "dflash", **said)
    assert shape(recording.chain_rounds()) == shape(replayed(chain))
    for costs in CURVES.values():
        monkeypatch.setattr("ddtree_lab.pipeline.costs_of", lambda pair, costs=costs: costs)
        auto = dl.generate(pair, ids, tree_budget="auto", **said)
        assert shape(recording.adaptive_rounds(costs)) == shape(replayed(auto))


def test_a_replay_ends_where_the_text_ends(embedded):
    prompt = dl.bundled_prompts("chat")[0]
    recording = record_text(embedded, prompt)
    assert recording.token_ids[-1] in embedded.eos_token_ids
    for method, rounds in (("dflash", recording.chain_rounds()), ("ddtree", recording.tree_rounds(32))):
        assert shape(rounds) == shape(replayed(dl.generate(embedded, prompt, method, tree_budget=32)))
        assert sum(r.num_emitted for r in rounds) == len(recording.token_ids) - 1


@pytest.fixture(scope="module")
def recordings(embedded):
    return {
        domain: [record_text(embedded, p, temperature=t, max_new_tokens=100) for p in dl.bundled_prompts(domain)[:4]]
        for domain, t in DOMAINS.items()
    }  # fmt: skip


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("domain", DOMAINS)
def test_auto_is_within_three_per_cent_of_the_best_fixed_choice(domain, curve, recordings):
    """In foreseen seconds, so that no clock is asked: what is lost by choosing, not by measuring.

    The best of eleven budgets is known afterwards only, and the shorter the texts, the more of it is luck.
    """
    costs = CURVES[curve]
    ways = {("dflash", None): [r for one in recordings[domain] for r in one.chain_rounds()]}
    for budget in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128):
        ways["ddtree", budget] = [r for one in recordings[domain] for r in one.tree_rounds(budget)]
    best = max(c.speedup for c in foresee(ways, costs, 1).choices if c.method != "autoregressive")
    auto = {("ddtree", "auto"): [r for one in recordings[domain] for r in one.adaptive_rounds(costs)]}
    assert foresee(auto, costs, 1).choices[-1].speedup >= 0.97 * best


def test_what_is_foreseen_is_the_sum_of_its_rounds():
    costs = RoundCosts((1, 11), (1.0, 2.0), 0.5, 1.0)
    rounds = [Replayed(10, 4), Replayed(0, 1, has_draft=False)]
    (plain, choice) = foresee({("ddtree", 10): rounds}, costs, 2).choices
    assert (plain.speedup, choice.emitted) == (1.0, 2.5)
    assert choice.speedup == pytest.approx(5 / (2.0 + 0.5 + 1.0))


def test_the_chain_is_priced_by_its_own_rounds(embedded):
    """On hard text trees are shallow, while the chain drafts its whole block whatever it expects."""
    prompt, said = dl.bundled_prompts("docs")[0], dict(temperature=0.7, max_new_tokens=30)
    trace = dl.generate(embedded, prompt, tree_budget=4, record=True, **said).trace
    chain = replayed(dl.generate(embedded, prompt, "dflash", **said))
    steep = RoundCosts((1, 257), (1.0, 65.0), 0.1, 1.0)
    seen, taken = (
        next(c for c in advise(trace.rounds, steep, chain=given).choices if c.method == "dflash")
        for given in (chain, ())
    )
    assert seen.emitted == pytest.approx(sum(r.num_emitted for r in chain) / len(chain))
    assert max(r.tree.depth for r in trace.rounds) < 7 and seen.speedup != taken.speedup


def test_advice_on_prompts_is_foreseen_and_run(embedded, monkeypatch):
    monkeypatch.setattr("ddtree_lab.bench.advisor.BUDGETS", (4, 16))
    monkeypatch.setattr(
        "ddtree_lab.bench.advisor.costs_of", lambda pair: RoundCosts((1, 17), (1.0, 2.0), 0.5, 1.0)
    )
    advice = advise_on(embedded, dl.bundled_prompts("chat")[:1], max_new_tokens=16)
    labels = [choice.label for choice in advice.choices]
    assert labels == ["autoregressive", "dflash", "ddtree 4", "ddtree 16", "ddtree auto"]
    assert all(choice.measured and choice.measured > 0 for choice in advice.choices)
    made = dl.generate(embedded, dl.bundled_prompts("chat")[0], tree_budget=16, max_new_tokens=16)
    assert advice.choices[3].emitted == pytest.approx(made.mean_emitted_tokens)


def test_a_prompt_without_a_second_token_has_no_advice(embedded):
    with pytest.raises(ValueError, match="prompts: none gives"):
        advise_on(embedded, dl.bundled_prompts()[:1], max_new_tokens=1)
