"""Behind the ordinary `generate`: same tokens, and the call's own settings honoured."""

from __future__ import annotations

import models
import pytest
import torch
from pairs import random_pair
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import ddtree_lab as dl
from ddtree_lab.compat import cache_keyword


@pytest.fixture(scope="module")
def pair() -> dl.Pair:
    return random_pair()


IDS = torch.tensor([[5, 9, 2, 2, 7]])


def both(pair: dl.Pair, method: str = "ddtree", **settings):
    settings = {"max_new_tokens": 18, "do_sample": False, **settings}
    theirs = pair.target.generate(IDS, **settings)
    ours = pair.target.generate(IDS, custom_generate=dl.DDTree(pair.drafter, 8, method=method), **settings)
    return theirs, ours


@pytest.mark.parametrize("method", ["ddtree", "dflash"])
def test_greedy_equals_the_librarys(pair, method):
    theirs, ours = both(pair, method)
    assert torch.equal(theirs, ours)


class ForbidWhatCameTwice(LogitsProcessor):
    """Depends on the whole prefix, so a node with another prefix would give another token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0], minlength=scores.shape[-1])
        return scores.masked_fill(counts >= 2, -torch.inf)


def test_processors_see_each_nodes_own_prefix(pair):
    processors = LogitsProcessorList([ForbidWhatCameTwice()])
    theirs, ours = both(pair, logits_processor=processors, repetition_penalty=1.3, no_repeat_ngram_size=2)
    assert torch.equal(theirs, ours)
    unprocessed = pair.target.generate(IDS, max_new_tokens=18, do_sample=False)
    assert not torch.equal(theirs, unprocessed), "the processors must matter for this test to mean something"


class StopAfter(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_stopping_criteria_end_the_text_at_the_same_token(pair):
    theirs, ours = both(pair, stopping_criteria=[StopAfter(14)])
    assert torch.equal(theirs, ours)
    assert ours.shape[1] == 14


def test_end_of_sequence_ends_it(pair):
    full = pair.target.generate(IDS, max_new_tokens=18, do_sample=False)[0].tolist()
    theirs, ours = both(pair, eos_token_id=full[10], pad_token_id=0)
    assert torch.equal(theirs, ours)
    assert ours[0, -1] == full[10]


class Collect(BaseStreamer):
    def __init__(self) -> None:
        self.tokens, self.ended = [], False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_the_streamer_gets_every_token_once(pair):
    streamer = Collect()
    ours = pair.target.generate(
        IDS, max_new_tokens=12, do_sample=False, custom_generate=dl.DDTree(pair.drafter, 8), streamer=streamer
    )
    assert streamer.tokens == ours[0].tolist()
    assert streamer.ended


def test_scores_logits_and_cache_are_the_librarys(pair):
    wanted = dict(
        return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.2
    )
    theirs, ours = both(pair, **wanted)
    assert torch.equal(theirs.sequences, ours.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(getattr(theirs, name), getattr(ours, name), strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=0)
    cache = getattr(ours, "cache", None) or ours.past_key_values
    assert cache.get_seq_length() == ours.sequences.shape[1] - 1


def test_sampling_is_repeatable_and_does_not_depend_on_the_tree(pair):
    def sample(**method) -> list[int]:
        torch.manual_seed(3)
        hook = dl.DDTree(pair.drafter, **method)
        return pair.target.generate(
            IDS, max_new_tokens=18, do_sample=True, temperature=1.1, custom_generate=hook
        )[0].tolist()

    first = sample(tree_budget=8)
    assert first == sample(tree_budget=8) == sample(tree_budget=1) == sample(tree_budget=0, method="dflash")
    torch.manual_seed(4)
    other = pair.target.generate(
        IDS, max_new_tokens=18, do_sample=True, temperature=1.1, custom_generate=dl.DDTree(pair.drafter, 8)
    )
    assert other[0].tolist() != first


def test_the_callers_own_cache_is_filled(pair):
    cache = DynamicCache(config=pair.target.config)
    ours = pair.target.generate(
        IDS,
        max_new_tokens=9,
        do_sample=False,
        custom_generate=dl.DDTree(pair.drafter, 8),
        **{cache_keyword(pair.target): cache},
    )
    assert cache.get_seq_length() == ours.shape[1] - 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (dict(input_ids=IDS.repeat(2, 1)), "input_ids"),
        (dict(attention_mask=torch.tensor([[0, 1, 1, 1, 1]])), "attention_mask"),
        (dict(return_dict_in_generate=True, output_hidden_states=True), "output_hidden_states"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(pair, settings, named):
    settings = {"input_ids": IDS, **settings}
    with pytest.raises(ValueError, match=named):
        pair.target.generate(
            **settings, max_new_tokens=4, do_sample=False, custom_generate=dl.DDTree(pair.drafter, 8)
        )


def test_a_cache_the_drafter_has_not_seen_is_refused(pair):
    cache = dl.make_cache(pair.target)
    dl.prefill(pair.target, IDS[:, :3], cache)
    hook = dl.DDTree(pair.drafter, 8)
    with pytest.raises(ValueError, match="already holds 3 tokens"):
        pair.target.generate(
            IDS,
            max_new_tokens=4,
            do_sample=False,
            custom_generate=hook,
            **{cache_keyword(pair.target): cache},
        )
    static = StaticCache(config=models.dense().config, max_cache_len=64)
    dense = random_pair(models.dense())
    with pytest.raises(ValueError, match="StaticCache"):
        dense.target.generate(
            IDS,
            max_new_tokens=4,
            do_sample=False,
            custom_generate=dl.DDTree(dense.drafter),
            **{cache_keyword(dense.target): static},
        )
