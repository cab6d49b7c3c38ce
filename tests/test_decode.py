"""Every method gives the text of plain decoding, whatever the drafter; counts say what they count."""

from __future__ import annotations

import models
import pytest
import torch
from pairs import BLOCK_SIZE, random_pair, scripted_draft

import ddtree_lab as dl
from ddtree_lab import pipeline

METHODS = {
    "chain": dict(method="dflash"),
    "tree-1": dict(tree_budget=1),
    "tree-16": dict(tree_budget=16),
    "scan": dict(tree_budget=7, verify_method="scan"),
    "paths": dict(tree_budget=7, verify_method="paths"),
}
TARGETS = {
    "hybrid": lambda: models.hybrid(num_layers=4),
    "moe": lambda: models.hybrid(family="qwen3_5_moe"),
    "next": lambda: models.hybrid(family="qwen3_next"),
    "dense": lambda: models.dense(),
    "sliding": lambda: models.dense(window=6),
}


@pytest.fixture(scope="module")
def pair() -> dl.Pair:
    return random_pair()


def plain(pair: dl.Pair, ids: list[int], **settings) -> dl.Generation:
    return dl.generate(pair, ids, "autoregressive", **settings)


@pytest.mark.parametrize("target", TARGETS)
def test_a_random_drafter_changes_nothing(target):
    pair = random_pair(TARGETS[target]())
    for temperature in (0.0, 1.0):
        for num_prompt_tokens in (1, 9):  # below and above the convolution's window
            ids = models.random_ids(num_prompt_tokens, seed=3)[0].tolist()
            settings = dict(max_new_tokens=10, temperature=temperature, seed=4)
            expected = plain(pair, ids, **settings).token_ids
            for name, method in METHODS.items():
                found = dl.generate(pair, ids, **method, **settings).token_ids
                assert found == expected, (name, temperature, num_prompt_tokens)


def test_plain_decoding_is_the_librarys_own(pair):
    ids = models.random_ids(7)
    theirs = pair.target.generate(ids, max_new_tokens=20, do_sample=False)[0, 7:].tolist()
    assert list(plain(pair, ids, max_new_tokens=20).token_ids) == theirs


@pytest.mark.parametrize("name", METHODS)
def test_a_drafter_that_is_always_right_is_kept_whole(pair, monkeypatch, name):
    ids = models.random_ids(5)[0].tolist()
    expected = plain(pair, ids, max_new_tokens=31).token_ids
    monkeypatch.setattr(pipeline, "draft_block", scripted_draft([*ids, *expected, *[0] * 9], right=True))
    found = dl.generate(pair, ids, max_new_tokens=31, **METHODS[name])
    assert found.token_ids == expected
    depth = 1 if name == "tree-1" else BLOCK_SIZE - 1
    assert found.rounds[0].num_accepted_drafts == depth
    assert found.mean_emitted_tokens == pytest.approx(30 / found.num_rounds)


@pytest.mark.parametrize("name", METHODS)
def test_a_drafter_that_is_always_wrong_costs_rounds_only(pair, monkeypatch, name):
    ids = models.random_ids(5)[0].tolist()
    expected = plain(pair, ids, max_new_tokens=12).token_ids
    monkeypatch.setattr(pipeline, "draft_block", scripted_draft([*ids, *expected, *[0] * 9], right=False))
    found = dl.generate(pair, ids, max_new_tokens=12, **METHODS[name])
    assert found.token_ids == expected
    assert found.mean_accepted_drafts == 0
    assert found.num_rounds == 11


def test_the_naive_port_gives_another_text(monkeypatch):
    """The suite can see the fault it exists for."""
    pair = random_pair()
    ids = models.random_ids(9, seed=2)[0].tolist()
    expected = plain(pair, ids, max_new_tokens=24).token_ids
    assert dl.generate(pair, ids, max_new_tokens=24, verify_method="flattened").token_ids != expected


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 6, 7, 8])
@pytest.mark.parametrize("right", [True, False])
def test_max_new_tokens_is_exact(pair, monkeypatch, max_new_tokens, right):
    ids = models.random_ids(4)[0].tolist()
    expected = plain(pair, ids, max_new_tokens=20).token_ids
    monkeypatch.setattr(pipeline, "draft_block", scripted_draft([*ids, *expected], right))
    for method in (dict(method="dflash"), dict(tree_budget=40)):
        found = dl.generate(pair, ids, max_new_tokens=max_new_tokens, **method)
        assert found.token_ids == expected[:max_new_tokens]
        assert found.finish_reason == "length"


@pytest.mark.parametrize("index", range(8))
def test_an_end_of_sequence_token_ends_the_text_wherever_it_falls(pair, monkeypatch, index):
    ids = models.random_ids(6, seed=1)[0].tolist()
    expected = plain(pair, ids, max_new_tokens=20).token_ids
    eos = expected[index]
    cut = expected[: expected.index(eos) + 1]
    monkeypatch.setattr(dl.Pair, "eos_token_ids", frozenset({eos, models.VOCAB + 5}))
    monkeypatch.setattr(pipeline, "draft_block", scripted_draft([*ids, *expected, *[0] * 9], right=True))
    for method in (dict(method="autoregressive"), dict(method="dflash"), dict(tree_budget=16)):
        found = dl.generate(pair, ids, max_new_tokens=20, **method)
        assert (found.token_ids, found.finish_reason) == (cut, "eos")


def test_counts_agree_when_the_text_ends_inside_a_path(pair, monkeypatch):
    ids = models.random_ids(6, seed=1)[0].tolist()
    expected = plain(pair, ids, max_new_tokens=20).token_ids
    eos = next(token for token in expected[2:5] if token not in expected[:2])
    monkeypatch.setattr(dl.Pair, "eos_token_ids", frozenset({eos}))
    monkeypatch.setattr(pipeline, "draft_block", scripted_draft([*ids, *expected, *[0] * 9], right=True))
    found = dl.generate(pair, ids, max_new_tokens=20, method="dflash", record=True)
    (only,) = found.rounds
    assert only.num_emitted_tokens == only.num_accepted_drafts == found.num_emitted_tokens - 1
    assert found.trace.token_ids == found.token_ids


def test_no_token_is_dropped_for_its_value(pair, monkeypatch):
    """A target may say the mask token; the reference deletes it from the output."""
    mask = pair.drafter.config.mask_token_id
    from ddtree_lab.sampling import Sampler

    monkeypatch.setattr(
        Sampler, "choose", lambda self, logits, positions, prefix=None: [mask] * len(positions)
    )
    for method in ("autoregressive", "dflash", "ddtree"):
        assert dl.generate(pair, [1, 2], method, max_new_tokens=9).token_ids == (mask,) * 9


def test_counts_add_up(pair):
    found = dl.generate(pair, models.random_ids(5), tree_budget=12, max_new_tokens=20, record=True)
    assert found.num_emitted_tokens == 1 + sum(r.num_emitted_tokens for r in found.rounds) == 20
    assert all(r.num_emitted_tokens == r.num_accepted_drafts + 1 for r in found.rounds)
    assert found.mean_emitted_tokens == pytest.approx(found.mean_accepted_drafts + 1)
    assert found.prefill_seconds < found.seconds


def test_tokens_are_told_as_they_come(pair):
    told = []
    found = dl.generate(pair, [3, 4], max_new_tokens=10, on_tokens=lambda tokens: told.extend(tokens))
    assert tuple(told) == found.token_ids


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (dict(method="eagle"), "method"),
        (dict(tree_budget=-1), "tree_budget"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(temperature=-0.1), "temperature"),
        (dict(prompt_or_ids=[]), "prompt"),
        (dict(prompt_or_ids=torch.tensor([[1], [2]])), "prompt"),
        (dict(prompt_or_ids=[models.VOCAB]), "prompt"),
        (dict(prompt_or_ids="text without a tokenizer"), "tokenizer"),
        (dict(method="autoregressive", record=True), "record"),
    ],
)
def test_bad_arguments_are_named(pair, arguments, named):
    with pytest.raises(ValueError, match=named):
        dl.generate(pair, **{"prompt_or_ids": [1, 2], **arguments})


def test_an_interrupt_leaves_the_model_as_it_was(pair, monkeypatch):
    before = {name: dict(vars(module)) for name, module in pair.target.named_modules()}
    calls = []

    def interrupt(tokens):
        calls.append(tokens)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dl.generate(pair, [1, 2, 3], max_new_tokens=30, on_tokens=interrupt)
    after = {name: dict(vars(module)) for name, module in pair.target.named_modules()}
    assert {name: list(held) for name, held in before.items()} == {
        name: list(held) for name, held in after.items()
    }
    assert not any(module._forward_hooks for module in pair.target.modules())


def test_decoding_in_inference_mode_gives_the_same(pair):
    expected = dl.generate(pair, [5, 6, 7], max_new_tokens=12)
    with torch.inference_mode():
        assert dl.generate(pair, [5, 6, 7], max_new_tokens=12).token_ids == expected.token_ids


@pytest.mark.parametrize(
    "settings", [dict(method="autoregressive"), dict(temperature=1.0), dict(tree_budget="auto")]
)
def test_nothing_of_inference_mode_is_left_behind(pair, settings):
    told = []
    dl.generate(
        pair, [5, 6, 7], max_new_tokens=12, **settings,
        on_tokens=lambda tokens: told.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled())),
    )  # fmt: skip
    assert set(told) == {(False, True)}
    for model in (pair.target, pair.drafter):
        assert not any(t.is_inference() for t in (*model.parameters(), *model.buffers()))
    # A session continues from tensors that it may write, and a target can still be trained.
    session = dl.Session(pair, [5, 6, 7], temperature=settings.get("temperature", 0.0))
    session.run(rounds=1)
    assert not session.records["verify"].logits.is_inference()
    embedded = pair.target.get_input_embeddings()(torch.tensor([[5, 6, 7]])).requires_grad_()
    pair.target(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is not None and embedded.grad.abs().sum() > 0
