"""Threads for a model: one for a small one, unless it was said otherwise; as many as before afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddtree_lab import threads


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inside(model: nn.Module) -> int:
    with threads.fitting_threads(model):
        return torch.get_num_threads()


@pytest.mark.usefixtures("two_threads")
def test_a_small_model_gets_one_and_gives_back_what_there_was():
    assert inside(nn.Linear(4, 4)) == 1
    with pytest.raises(KeyError), threads.fitting_threads(nn.Linear(4, 4)):
        raise KeyError
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_large_model_an_accelerators_and_the_environments_word_change_nothing(monkeypatch):
    assert inside(nn.Linear(4, 4, device="meta")) == 2
    with monkeypatch.context() as context:
        context.setattr(threads, "SMALL_MODEL", 10)
        assert inside(nn.Linear(4, 4)) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert inside(nn.Linear(4, 4)) == 2
