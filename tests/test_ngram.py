"""The n-gram drafter: counts that can be checked by hand, and exact on every target that has no other."""

from __future__ import annotations

import models
import numpy as np
import pytest
import torch
from checks import check_same_cache
from hypothesis import given
from hypothesis import strategies as st

import ddtree_lab as dl
from ddtree_lab.ngram import NgramContext, shares_naive
from ddtree_lab.stages.draft import Context, Drafter

TARGETS = {
    "hybrid": models.hybrid,
    "wrapped": models.wrapped_hybrid,
    "dense": models.dense,
    "sliding": lambda: models.dense(window=6),
    "gpt2": lambda: models.causal_lm("gpt2"),
    "hybrid without a port": lambda: models.causal_lm("bamba"),
}
METHODS = (dict(method="dflash"), dict(tree_budget=1), dict(tree_budget=24))
REPETITIVE = [5, 6, 7, 8, 9] * 4


@pytest.fixture(scope="module")
def pair() -> dl.Pair:
    return ngram_pair(models.hybrid())


def ngram_pair(target: torch.nn.Module, **settings) -> dl.Pair:
    return dl.Pair(target, dl.NgramDrafter(**settings), name="ngram")


def shares(text: str, depth: int = 1, max_suffix: int = 3) -> list[dict[str, float]]:
    """The drafter's shares for letters instead of tokens."""
    found = dl.NgramDrafter(depth, max_suffix).shares([ord(letter) for letter in text])
    return [{chr(token): share for token, share in row.items()} for row in found]


def test_what_followed_the_same_tokens_is_drafted():
    assert shares("abcdabcd.ab", depth=3) == [{"c": 1.0}, {"d": 1.0}, {"a": 0.5, ".": 0.5}]


def test_a_longer_suffix_outweighs_shorter_ones():
    # "xa" was followed by 1; "a" alone by 1 and twice by 2. One step down costs a factor of 0.4.
    (found,) = shares("xa1ya2za2xa", max_suffix=2)
    assert found == pytest.approx({"1": 1 / (1 + 0.4 * 2 / 3), "2": 0.4 * 2 / 3 / (1 + 0.4 * 2 / 3)})


def test_a_length_that_never_matched_takes_nothing_away():
    assert shares("a1ba2ca1da", max_suffix=9) == [pytest.approx({"1": 2 / 3, "2": 1 / 3})]


def test_occurrences_may_overlap_the_end():
    assert shares("aaa", depth=9) == [{"a": 1.0}, {"a": 1.0}]


@pytest.mark.parametrize("text", ["", "a", "abc"])
def test_nothing_is_drafted_after_a_token_that_is_new(text):
    assert shares(text) == []


@given(
    st.lists(st.integers(0, 3), min_size=0, max_size=40),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_shares_are_those_of_the_naive_twin(text, num_draft_positions, max_suffix):
    found = dl.NgramDrafter(num_draft_positions, max_suffix).shares(text)
    expected = shares_naive(text, num_draft_positions, max_suffix)
    assert found == [pytest.approx(row) for row in expected]
    assert [sum(row.values()) for row in found] == pytest.approx([1.0] * len(found))


def test_a_draft_holds_log_probabilities_and_impossible_tokens(pair):
    context = pair.drafter.remember([1, 2, 1, 3])
    draft = dl.draft_block(pair.drafter, pair.embeddings, context, 1)
    assert draft.logits.shape == (4, models.VOCAB)
    assert draft.num_context_rows == 4
    assert draft.logits[0].exp().nonzero().flatten().tolist() == [2, 3]
    torch.testing.assert_close(draft.logits.exp().sum(-1), torch.ones(4))
    text = draft.to_text()
    assert "2 (0.50)" in text and "(0.00)" not in text and "nan" not in text


def test_a_tree_is_no_larger_than_what_is_possible(pair):
    session = dl.Session(pair, [1, 2, 1, 2, 1], tree_budget=64, max_new_tokens=5)
    draft, tree = session.step(), session.step()
    seen = draft.logits.isfinite().sum(-1).tolist()
    possible = sum(int(np.prod(seen[: depth + 1])) for depth in range(min(len(seen), 3)))
    assert tree.num_drafted == possible
    assert np.isfinite(tree.log_probs).all()


def test_contexts_are_values():
    drafter = dl.NgramDrafter()
    first = drafter.remember([1, 2])
    one, two = drafter.remember([3], None, first), drafter.remember([4, 5], None, first)
    assert [c.token_ids.tolist() for c in (first, one, two)] == [[1, 2], [1, 2, 3], [1, 2, 4, 5]]
    assert [c.num_rows for c in (first, one, two)] == [2, 3, 4]


def test_both_drafters_are_what_the_pipeline_asks_for():
    dflash = dl.DFlashDrafter(models.small_drafter_config())
    for drafter, context in (
        (dl.NgramDrafter(), NgramContext(np.zeros(0, dtype=np.int64))),
        (dflash, dl.extend_context(dflash, torch.zeros(3, 64))),
    ):
        assert isinstance(drafter, Drafter)
        assert isinstance(context, Context)
    assert (dl.NgramDrafter().tap_layer_ids, dflash.tap_layer_ids) == ((), (1, 3))
    with pytest.raises(ValueError, match=r"taps are missing.*\[1, 3\]"):
        dl.extend_context(dflash, None, token_ids=[1])


@pytest.mark.parametrize("name", TARGETS)
def test_every_method_gives_plain_decodings_text(name):
    target = TARGETS[name]()
    if models.has_its_own_cache(target):
        pytest.skip("this version of the library gives the architecture a cache of its own")
    pair = ngram_pair(target)
    for temperature in (0.0, 1.0):
        settings = dict(max_new_tokens=12, temperature=temperature, seed=4)
        expected = dl.generate(pair, REPETITIVE, "autoregressive", **settings).token_ids
        for method in (dict(method="dflash"), dict(tree_budget=24)):
            assert dl.generate(pair, REPETITIVE, **method, **settings).token_ids == expected, (
                method,
                temperature,
            )


def test_a_prompt_of_one_token_has_nothing_to_look_up(pair):
    expected = dl.generate(pair, [3], "autoregressive", max_new_tokens=12)
    found = dl.generate(pair, [3], max_new_tokens=12)
    assert found.token_ids == expected.token_ids
    assert found.rounds[0].num_drafted == 0


def test_repetition_is_drafted_and_kept():
    """A greedy random target runs into a loop, and from there on the drafter is right."""
    pair = ngram_pair(models.dense())
    plain = dl.generate(pair, REPETITIVE, "autoregressive", max_new_tokens=80)
    assert len(set(plain.token_ids[-40:])) <= 10, "the target has to loop for this test to mean something"
    for method in METHODS:
        found = dl.generate(pair, REPETITIVE, max_new_tokens=80, **method)
        assert found.token_ids == plain.token_ids
        assert found.mean_accepted_drafts > (0.4 if method.get("tree_budget") == 1 else 1)


def test_a_session_goes_back_and_forks(pair):
    session = dl.Session(pair, REPETITIVE, tree_budget=8, max_new_tokens=20)
    session.run(rounds=2)
    before = session.state
    context = before.context.token_ids.copy()
    twin = session.fork()
    twin.run()
    assert session.state is before
    assert before.context.token_ids.tolist() == context.tolist()
    assert list(before.token_ids[:-1]) == context.tolist()
    session.run(rounds=1)
    for _ in range(6):
        session.back()
    assert session.state is before
    assert session.run().token_ids == twin.token_ids
    check_same_cache(session.state.cache, twin.state.cache)


def test_records_and_trace_are_the_usual_ones(pair, tmp_path):
    found = dl.generate(pair, REPETITIVE, tree_budget=8, max_new_tokens=20, record=True)
    found.trace.save(tmp_path / "trace.json")
    assert dl.Trace.load(tmp_path / "trace.json").token_ids == found.token_ids


@pytest.mark.parametrize("method", ["ddtree", "dflash"])
def test_behind_the_librarys_generate(pair, method):
    ids = torch.tensor([REPETITIVE])
    settings = dict(max_new_tokens=24, do_sample=False)
    ours = pair.target.generate(
        ids, custom_generate=dl.DDTree(dl.NgramDrafter(), 8, method=method), **settings
    )
    assert torch.equal(ours, pair.target.generate(ids, **settings))


def test_it_is_loaded_by_name_for_any_target():
    target = models.dense()
    for drafter in ("ngram", dl.NgramDrafter(max_suffix=2)):
        pair = dl.load_pair(target, drafter)
        assert pair.target is target
        assert isinstance(pair.drafter, dl.NgramDrafter)
    assert pair.drafter.max_suffix == 2
    embedded = dl.load_pair(drafter="ngram")
    assert type(embedded.target).__name__ == "Qwen3_5ForCausalLM"
    assert embedded.tokenizer is not None


def test_a_target_alone_is_told_about_it():
    with pytest.raises(ValueError, match='"ngram", which drafts for any target'):
        dl.load_pair(models.dense())


@pytest.mark.parametrize("name", ["num_draft_positions", "max_suffix"])
def test_bad_settings_are_named(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        dl.NgramDrafter(**{name: 0})
