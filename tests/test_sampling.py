"""Noise belongs to a position, not to a method."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddtree_lab.sampling import Sampler, gumbel_noise


def test_noise_depends_on_seed_and_position_only():
    first = gumbel_noise(3, 7, 50)
    gumbel_noise.cache_clear()
    torch.manual_seed(123)
    torch.rand(10)
    assert torch.equal(gumbel_noise(3, 7, 50), first)
    assert not torch.equal(gumbel_noise(3, 8, 50), first)
    assert not torch.equal(gumbel_noise(4, 7, 50), first)


def test_drawing_noise_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    gumbel_noise(1, 2, 10)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_are_chosen_independently_of_their_neighbours():
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    sampler = Sampler.from_settings(temperature=0.9, top_k=20, top_p=0.95, seed=5)
    together = sampler.choose(logits, [3, 4, 4, 5, 6, 6])
    alone = [sampler.choose(logits[i : i + 1], [p])[0] for i, p in enumerate([3, 4, 4, 5, 6, 6])]
    assert together == alone


def test_samples_follow_the_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    sampler = Sampler.from_settings(temperature=1.5, seed=11)
    num_draws = 4000
    draws = [sampler.choose(logits, [position])[0] for position in range(num_draws)]
    observed = np.bincount(draws, minlength=4)
    expected = (logits / 1.5).softmax(-1)[0].numpy() * num_draws
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001; the seed is fixed


def test_top_k_and_top_p_cut_the_tail():
    logits = torch.tensor([[5.0, 4.0, 0.0, -2.0]])
    for settings in (dict(top_k=2), dict(top_p=0.8)):
        sampler = Sampler.from_settings(temperature=3.0, seed=1, **settings)
        assert {sampler.choose(logits, [p])[0] for p in range(300)} == {0, 1}


def test_greedy_takes_the_argmax_and_ignores_the_seed():
    logits = torch.randn(5, 30)
    assert Sampler.from_settings(seed=9).choose(logits, [0] * 5) == logits.argmax(-1).tolist()


def test_processors_are_given_each_rows_own_prefix():
    seen = []

    def forbid_last(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        scores[0, ids[0, -1]] = -torch.inf
        return scores

    from transformers import LogitsProcessorList

    logits = torch.tensor([[0.0, 3.0, 2.0], [0.0, 3.0, 2.0]])
    sampler = Sampler(processors=LogitsProcessorList([forbid_last]))
    assert sampler.choose(logits, [2, 2], lambda row: [[0, 1], [0, 2]][row]) == [2, 1]
    assert seen == [[0, 1], [0, 2]]
    assert logits[0, 1] == 3.0, "the caller's logits must not be written"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (dict(temperature=-1.0), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(temperature=1.0, top_k=0), "top_k"),
        (dict(temperature=1.0, top_p=0.0), "top_p"),
        (dict(seed=-1), "seed"),
    ],
)
def test_a_setting_out_of_range_is_named(settings, named):
    with pytest.raises(ValueError, match=named):
        Sampler.from_settings(**settings)
