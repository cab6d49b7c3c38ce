"""Ctrl-C at any moment of any stage: the model, the session and the user's cache are as they were."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
from checks import check_same_model, check_untouched, snapshot, state_of
from models import dense, hybrid, random_ids
from pairs import random_pair

import ddtree_lab as dl
from ddtree_lab.compat import cache_keyword
from ddtree_lab.pipeline import STAGES

OURS = str(Path(dl.__file__).parent)
MOMENTS = 40  # spread over all calls of a stage
NUM_TOKENS = 16


class CtrlC:
    """Raise KeyboardInterrupt at the start of one call of all those made in a block; count them.

    Args:
        at: number of the call, of functions of this package and of the library; None to count only.
    """

    def __init__(self, at=None):
        self.at, self.calls, self.was_pressed = at, 0, False

    def __enter__(self):
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def _seen(self, frame, event, argument):
        file, is_generator = frame.f_code.co_filename, frame.f_code.co_flags & inspect.CO_GENERATOR
        # What is raised in a generator that is being thrown away goes nowhere.
        if event != "call" or is_generator or not (file.startswith(OURS) or "/transformers/" in file):
            return
        if self.calls == self.at:
            sys.setprofile(None)
            self.was_pressed = True
            raise KeyboardInterrupt
        self.calls += 1


def interrupted(run, undo=lambda: None, moments=MOMENTS):
    """Run again and again, interrupted at moments spread over it; yields after each.

    What is remembered from one run to the next makes the next shorter, so the last moments may never come.
    """
    with CtrlC() as counted:
        run()
    undo()
    reached = 0
    for at in sorted({round(i * (counted.calls - 1) / (moments - 1)) for i in range(moments)}):
        stopped = False
        with CtrlC(at) as pressed:
            try:
                run()
            except KeyboardInterrupt:
                stopped = True
        assert stopped == pressed.was_pressed, f"call {at} kept the interrupt to itself"
        if stopped:
            reached += 1
            yield
        else:
            undo()
    assert reached > 0


def session_before(stage, pair, **settings):
    session = dl.Session(pair, random_ids(7), tree_budget=9, max_new_tokens=NUM_TOKENS, **settings)
    session.run(rounds=1)
    while session.next_stage != stage:
        session.step()
    return session


@pytest.fixture(scope="module", params=["hybrid", "window"])
def pair(request):
    made = random_pair(hybrid() if request.param == "hybrid" else dense(window=5))
    dl.generate(made, random_ids(7), max_new_tokens=4)  # the trial passes are behind us
    return made


CASES = [(stage, "tree") for stage in STAGES]
CASES += [(stage, method) for stage in ("verify", "commit") for method in ("paths", "flattened")]


@pytest.mark.parametrize(("stage", "verify_method"), CASES)
def test_a_stage_interrupted_anywhere_leaves_everything_as_it_was(stage, verify_method, pair):
    session = session_before(stage, pair, verify_method=verify_method)
    model, drafter = state_of(pair.target), state_of_module(pair.drafter)
    cache, state, text = session.state.cache, session.state, session.token_ids
    before = snapshot(cache)
    trial = session.fork()
    for _ in interrupted(trial.step, trial.back):
        check_same_model(pair.target, dict(model))
        assert state_of_module(pair.drafter) == drafter
        assert trial.state is state and trial.next_stage == stage and trial.token_ids == text
        check_untouched(cache, before)
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    if verify_method != "flattened":
        plain = dl.generate(pair, random_ids(7), "autoregressive", max_new_tokens=NUM_TOKENS)
        assert trial.run().token_ids == plain.token_ids


def state_of_module(module):
    return [
        (name, type(m), {key: id(value) for key, value in vars(m).items()})
        for name, m in module.named_modules()
    ]


@pytest.mark.parametrize("method", ["autoregressive", "dflash", "ddtree"])
def test_a_decode_interrupted_anywhere_leaves_the_model_as_it_was(method, pair):
    def decode():
        return dl.generate(pair, random_ids(7), method, tree_budget=9, max_new_tokens=6).token_ids

    whole, model = decode(), state_of(pair.target)
    for _ in interrupted(decode, moments=15):
        check_same_model(pair.target, dict(model))
    assert decode() == whole


def test_the_librarys_generate_interrupted_anywhere_leaves_model_and_cache_as_they_were(pair):
    hook, ids = dl.DDTree(pair.drafter, tree_budget=9), random_ids(7)

    def decode(cache):
        return pair.target.generate(
            ids,
            **{cache_keyword(pair.target): cache},
            max_new_tokens=6,
            do_sample=False,
            custom_generate=hook,
        )

    cache, model = dl.make_cache(pair.target), state_of(pair.target)
    whole, before, layers = decode(dl.make_cache(pair.target)), snapshot(cache), cache.layers
    for _ in interrupted(lambda: decode(cache), lambda: setattr(cache, "layers", layers), moments=15):
        check_same_model(pair.target, dict(model))
        check_untouched(cache, before)
    assert torch.equal(decode(cache), whole)


@pytest.mark.parametrize("where", ["target", "layer", "drafter"])
def test_a_forward_hook_of_the_user_that_is_interrupted_stays_and_nothing_else_does(where, pair):
    session = session_before("draft", pair)
    module = {"target": pair.target, "layer": pair.target.model.layers[2], "drafter": pair.drafter.fc}[where]

    def press(*args):
        raise KeyboardInterrupt

    handle = module.register_forward_hook(press)
    model, state = state_of(pair.target), session.state
    with pytest.raises(KeyboardInterrupt):
        session.run(rounds=1)
    check_same_model(pair.target, model)
    assert session.state.token_ids == state.token_ids
    handle.remove()
    plain = dl.generate(pair, random_ids(7), "autoregressive", max_new_tokens=NUM_TOKENS)
    assert session.run().token_ids == plain.token_ids
