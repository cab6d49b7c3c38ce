"""The doctor: sees every known bug, names it, and is silent on what is right."""

from __future__ import annotations

import json

import models
import pairs
import pytest
import torch

import ddtree_lab as dl
from ddtree_lab.doctor.bugs import BUGS, BuggyPort
from ddtree_lab.doctor.checks import CHECKS
from ddtree_lab.doctor.checks.looping import chi_square
from examples.my_port import MyPort

PROMPT = models.random_ids(20, seed=3)
# What only measures the drafter says nothing about a bug; without it the matrix takes half the time.
DECISIVE = [name for name in CHECKS if name not in ("acceptance", "tap_offsets")]


@pytest.fixture(scope="module")
def pair():
    return dl.load_pair()


def sliding_drafter_pair() -> dl.Pair:
    """A random pair whose drafter has a sliding layer, with a window shorter than the prompt, and a head of its own."""
    pair = pairs.random_pair()
    config = {**pair.drafter.config.to_dict(), "layer_types": ["sliding_attention", "full_attention"]}
    config |= {"sliding_window": 8, "use_sliding_window": True}
    torch.manual_seed(5)
    drafter = dl.DFlashDrafter(dl.DFlashConfig.from_dict(config)).eval().requires_grad_(False)
    return dl.Pair(pair.target, drafter, name="random, sliding drafter")


def overflowing_pair() -> dl.Pair:
    """A random pair whose tap fusion is too large for half precision; its norm makes up for the size."""
    pair = pairs.random_pair()
    with torch.no_grad():
        pair.drafter.fc.weight.mul_(1e6)
    return pair


# Bugs that the embedded pair cannot have, and a pair that can.
ELSEWHERE = {
    "embedding_as_head": sliding_drafter_pair,
    "window_ignored": sliding_drafter_pair,
    "window_not_causal": sliding_drafter_pair,
    "half_precision_fusion": overflowing_pair,
}


# One or two of each stage; the others differ from these by their switch only.
TRIED = (
    "flattened_recurrence", "siblings_visible", "conv_by_index", "state_not_rolled_back", "kv_not_compacted",
    "tap_off_by_plus_one", "rejected_taps_kept", "embedding_as_head", "window_ignored", "half_precision_fusion",
    "bonus_from_parent", "past_end_of_sequence", "temperature_lost", "states_leak_between_runs",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_a_bug_is_found_and_named(pair, name):
    bug = BUGS[name]
    prompt = None
    if name in ELSEWHERE:
        assert bug.hindrance(pair)
        pair, prompt = ELSEWHERE[name](), PROMPT
    report = dl.diagnose(pair, BuggyPort(pair, [bug]), DECISIVE, prompt=prompt)
    assert [(p.bugs, p.stage) for p in report.problems] == [((name,), bug.stage)]
    kinds = {report.kinds[i] for i in report.problems[0].layers}
    assert kinds == ({bug.layer_kind} if bug.layer_kind else kinds)
    assert report.problems[0].cause == bug.cause
    assert name in report.verdict
    assert report.verdict.startswith("The port")


def targets(dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    return {
        "hybrid": models.hybrid(dtype=dtype),
        "mixture of experts": models.hybrid(family="qwen3_5_moe", dtype=dtype),
        "qwen3-next": models.hybrid(family="qwen3_next", dtype=dtype),
        "dense": models.dense(dtype=dtype),
        "sliding": models.dense(dtype=dtype, window=12),
    }


# Not yet silent, and so not here: multimodal wrappers, and Qwen3-Next in bfloat16.
CLEAN = [
    *((kind, torch.float32) for kind in ("hybrid", "mixture of experts", "qwen3-next", "dense", "sliding")),
    *((kind, torch.bfloat16) for kind in ("hybrid", "dense", "sliding")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), CLEAN, ids=lambda value: str(value).removeprefix("torch."))
def test_clean_ports_have_no_problem(kind, dtype):
    pair = pairs.random_pair(targets(dtype)[kind])
    report = dl.diagnose(pair, prompt=PROMPT)
    assert report.ok, report.to_text()


def test_the_embedded_pair_is_clean(pair):
    report = dl.diagnose(pair)
    assert report.ok, report.to_text()
    assert report.verdict.startswith("Neither")
    assert not [f for f in report.findings if f.status == "skipped" and f.check != "distribution"]


def test_two_bugs_of_two_stages_are_both_named(pair):
    names = ("positions_by_index", "tap_off_by_plus_one")
    report = dl.diagnose(pair, BuggyPort(pair, [BUGS[name] for name in names]), DECISIVE)
    assert set(report.bugs) == set(names)


def test_the_story_of_the_three_patches(pair):
    """Config cache, resolved embeddings, sdpa: it runs, and the recurrent layers are to blame."""
    report = dl.diagnose(pair, BuggyPort(pair, [BUGS["flattened_recurrence"]]))
    assert report.verdict.startswith(
        "The port: verify in linear_attention layers 0–2, 4–6 (flattened_recurrence)"
    )
    acceptance = next(f for f in report.findings if f.check == "acceptance").evidence
    assert acceptance["port_interval"][1] < acceptance["drafter_interval"][0]


def test_a_strangers_port_is_examined(pair):
    report = dl.diagnose(pair, MyPort(pair))
    assert report.problems[0].bugs == ("flattened_recurrence",)
    assert report.problems[0].layers == (0, 1, 2, 4, 5, 6)
    skipped = {f.check for f in report.findings if f.status == "skipped"}
    assert {"first_draft", "greedy_text", "acceptance"} <= skipped


class Broken(dl.TransformersPort):
    """The built-in port, but its verify is somebody else's."""

    def __init__(self, pair, verify):
        super().__init__(pair)
        self.broken_verify = verify

    def verify(self, state, tree):
        return self.broken_verify(super().verify(state, tree))


def fail(logits):
    raise KeyError("past_key_values")


@pytest.mark.parametrize(
    ("verify", "said"),
    [
        (fail, "raised KeyError: 'past_key_values'"),
        (lambda logits: logits[1:], r"returned logits of shape"),
        (lambda logits: logits * float("nan"), "returned NaN in rows"),
        (lambda logits: logits.tolist(), "returned a list"),
        (lambda logits: None, "returned a NoneType"),
    ],
    ids=["raises", "too few rows", "NaN", "no tensor", "nothing"],
)
def test_a_broken_port_is_a_finding_and_no_crash(verify, said):
    pair = pairs.random_pair()
    report = dl.diagnose(pair, Broken(pair, verify), prompt=PROMPT)
    assert not report.ok
    assert said in report.problems[0].symptom


def test_an_unknown_mistake_is_still_located():
    """Noise on the logits of one node is no known bug; the node is named all the same."""

    def disturb(logits):
        logits = logits.clone()
        if len(logits) > 5:
            logits[5] += torch.linspace(0, 3, logits.shape[1])
        return logits

    pair = pairs.random_pair()
    report = dl.diagnose(pair, Broken(pair, disturb), ["node_against_path"], prompt=PROMPT)
    assert "the first is node 5" in report.problems[0].symptom
    assert report.problems[0].bugs == ()


def test_chi_square_has_the_right_size():
    torch.manual_seed(0)
    p = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05])
    values = [chi_square(torch.multinomial(p, 200, replacement=True).tolist(), p) for _ in range(300)]
    assert sum(v < 0.1 for v in values) / 300 == pytest.approx(0.1, abs=0.06)
    assert chi_square([0] * 200, p) < 1e-6


def test_nothing_is_left_behind(pair):
    before = {name: id(module.forward.__func__) for name, module in pair.target.named_modules()}
    for name in ("flattened_recurrence", "rope_theta_wrong", "past_end_of_sequence", "embedding_scaled"):
        dl.diagnose(
            pair, BuggyPort(pair, [BUGS[name]]), ["node_against_path", "first_draft", "end_of_sequence"]
        )
    assert before == {name: id(module.forward.__func__) for name, module in pair.target.named_modules()}
    modules = [*pair.target.modules(), *pair.drafter.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    assert dl.diagnose(pair, checks=["node_against_path", "first_draft", "greedy_text"]).ok


def test_reports_are_json_and_a_page_without_network(pair, tmp_path):
    report = dl.diagnose(
        pair, BuggyPort(pair, [BUGS["siblings_visible"]]), ["node_against_path", "layer_attribution"]
    )
    data = json.loads(report.to_json())
    assert data["ok"] is False
    assert data["findings"][0]["bugs"] == ["siblings_visible"]
    report.save_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert report.verdict in page
    assert "<script" not in page
    assert "src=" not in page
    assert page.count("href=") == page.count('rel="noreferrer" href=')


def test_bad_arguments_are_named(pair):
    with pytest.raises(ValueError, match="no checks; choose from"):
        dl.diagnose(pair, checks=["nodes"])
    with pytest.raises(TypeError, match="without verify, commit"):
        dl.diagnose(pair, type("Half", (), {"prefill": lambda self, ids: None})())
    with pytest.raises(ValueError, match="one token"):
        dl.diagnose(pair, prompt=[5])
