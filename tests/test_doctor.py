"""The doctor on ports of strangers, what it leaves behind, and what it prints; its proof is in test_doctor_matrix."""

from __future__ import annotations

import json
import time

import models
import pairs
import pytest
import torch

import ddtree_lab as dl
from ddtree_lab.cli import main
from ddtree_lab.doctor.bugs import BUGS, BuggyPort
from ddtree_lab.doctor.checks import CHECKS
from ddtree_lab.doctor.checks.looping import chi_square
from examples.my_port import MyPort

PROMPT = models.random_ids(20, seed=3)


@pytest.fixture(scope="module")
def pair():
    return dl.load_pair()


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
    assert {"first_draft", "greedy_text"} <= skipped
    # It drafts nothing itself; with the drafter's drafts on clean states it still loses most of them.
    assert report.acceptance["port_interval"][1] < report.acceptance["drafter_interval"][0]
    assert "emitted tokens a round, where the drafter on clean states gives" in report.verdict


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
    report = dl.diagnose(
        pair, Broken(pair, verify), ["masks", "node_against_path", "rollback"], prompt=PROMPT
    )
    assert not report.ok
    assert said in report.problems[0].symptom


class Hanging(dl.TransformersPort):
    """The built-in port, but a tree of more than four nodes never ends."""

    def verify(self, state, tree):
        while tree.num_nodes > 4:
            time.sleep(0.01)
        return super().verify(state, tree)


def test_a_port_that_hangs_on_a_shape_is_stopped_and_named():
    began = time.perf_counter()
    report = dl.diagnose(
        pairs.random_pair(), Hanging(pairs.random_pair()), prompt=PROMPT, seconds_per_call=0.5
    )
    assert not report.ok
    assert "verify did not return within 0.5 s" in report.problems[0].symptom
    assert "a tree of 9 nodes" in report.problems[0].symptom
    assert time.perf_counter() - began < 30  # stopped once, and not called again


@pytest.mark.parametrize("method", ["prefill", "commit", "draft", "cache", "generate"])
def test_any_method_that_raises_is_a_finding(method):
    class Failing(dl.TransformersPort):
        pass

    def fails(*args, **kwargs):
        raise RuntimeError("the sizes do not match")

    setattr(Failing, method, fails)
    pair = pairs.random_pair()
    report = dl.diagnose(pair, Failing(pair), ["chain", "kv_rows", "first_draft", "length"], prompt=PROMPT)
    assert f"the port's {method} raised RuntimeError: the sizes do not match" in report.problems[0].symptom


class PathsPort(dl.TransformersPort):
    """Right, but no hook sees the tree's nodes as rows of one pass."""

    def __init__(self, pair):
        super().__init__(pair, verify_method="paths")


def test_a_right_port_that_works_in_another_way_is_clean_and_what_was_not_seen_is_said():
    pair = pairs.random_pair()
    report = dl.diagnose(pair, PathsPort(pair), [n for n in CHECKS if n != "tap_offsets"], prompt=PROMPT)
    assert report.ok, report.to_text()
    skipped = {f.check: f.symptom for f in report.findings if f.status == "skipped"}
    for check in ("masks", "positions", "layer_by_layer", "layer_attribution"):
        assert "one pass through" in skipped[check]


class Weak(dl.TransformersPort):
    """Exact, with a drafter that knows nothing."""


def test_the_verdict_tells_the_drafter_from_the_port_and_from_both():
    pair = pairs.random_pair()  # a random drafter
    weak = dl.diagnose(pair, Weak(pair), ["node_against_path", "acceptance"], prompt=PROMPT)
    assert weak.verdict.startswith("The drafter: the port is exact, and the drafter can do no more: 1.")
    both = dl.diagnose(
        pair, BuggyPort(pair, [BUGS["siblings_visible"]]), ["node_against_path", "acceptance"], prompt=PROMPT
    )
    assert both.verdict.startswith("Both, the port and a weak drafter: mask in full_attention layers 3")
    assert "emitted tokens a round, where the drafter on clean states gives" in both.verdict


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--inject", "siblings_visible"], 1)])
def test_the_exit_status_tells_a_clean_port_from_one_with_a_bug(arguments, status, capsys):
    checks = ["--check", "masks", "--check", "node_against_path", "--json"]
    assert main(["doctor", *arguments, *checks]) == status
    assert json.loads(capsys.readouterr().out)["ok"] is (status == 0)


def test_the_lists_of_bugs_and_checks_fit_eighty_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for option, names in (("--list-bugs", BUGS), ("--list-checks", CHECKS)):
        assert main(["doctor", option]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(names)


def test_a_report_is_readable_at_eighty_columns(pair):
    bug = BUGS["conv_by_index"]
    report = dl.diagnose(pair, BuggyPort(pair, [bug]), ["layer_by_layer", "node_against_path"])
    lines = report.to_text(width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("0 linear_attention" in line and "█" in line for line in lines)  # the heat map


def test_no_check_costs_more_forwards_than_it_says():
    """Counted at the target's decoder, on a port without a bug and material that is new."""
    pair = pairs.random_pair()
    calls = []
    handle = pair.target.get_decoder().register_forward_pre_hook(lambda *args: calls.append(1))
    counts, names = [], []
    try:
        dl.diagnose(
            pair, prompt=PROMPT, on_check=lambda name: (names.append(name), counts.append(len(calls)))
        )
    finally:
        handle.remove()
    spent = dict(
        zip(names, [b - a for a, b in zip(counts, [*counts[1:], len(calls)], strict=True)], strict=True)
    )
    too_dear = {name: (n, CHECKS[name].cost) for name, n in spent.items() if n > CHECKS[name].cost}
    assert not too_dear


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
