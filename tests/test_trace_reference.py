"""Runs of the published code are read from what they kept; what they do not say stays unknown."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest
from rounds import example_round, example_trace

import ddtree_lab as dl
from ddtree_lab.cli import main
from ddtree_lab.trace import UNKNOWN, Trace

PROMPT = [11, 12, 13]
MASK = 99


def saved_run(**changes) -> dict:
    """Two rounds as the published code keeps them, on the tree of the example: the text is 0 1 3 5 | 7 8 6 4."""
    tree = example_round().tree
    first = {
        "node_token_ids": tree.token_ids[1:].tolist(),
        "node_depths": tree.depths[1:].tolist(),
        "parents": tree.parents.tolist(),
    }
    second = {"node_token_ids": [7, 8, 2], "node_depths": [1, 2, 1], "parents": [-1, 0, 1, 0]}
    return {
        "output_ids": [[*PROMPT, 0, 1, 3, 5, 7, 8, 6]],
        "num_input_tokens": len(PROMPT),
        "num_output_tokens": 7,
        "acceptance_lengths": [3, 3],
        "stage_times": {"draft": 0.1},
        "round_trees": [
            {"accepted_indices": [0, 1, 3], "tree": first},
            {"accepted_indices": [0, 1, 2], "tree": second},
        ],
        **changes,
    }


@pytest.mark.parametrize(
    "wrap", [lambda run: run, lambda run: {"responses": [{"dflash": {}, "ddtree_tb5": run}]}]
)
def test_a_run_as_json_is_read(tmp_path, wrap):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(wrap(saved_run())))
    trace = Trace.load(path)
    assert trace.prompt_token_ids == tuple(PROMPT)
    assert trace.token_ids == (0, 1, 3, 5, 7, 8, 6)
    assert [r.past_length for r in trace.rounds] == [3, 6]
    assert [r.num_accepted_drafts for r in trace.rounds] == [2, 2]
    assert [r.bonus_token_id for r in trace.rounds] == [5, 6]
    assert trace.rounds[0].target_token_ids == (1, 3, UNKNOWN, 5, UNKNOWN, UNKNOWN)
    assert all(map(math.isnan, trace.rounds[0].tree.log_probs))
    assert trace.settings["tree_budget"] == 5


def test_what_torch_saved_is_read_without_running_it(tmp_path):
    import torch

    run = saved_run()
    run["output_ids"] = torch.tensor(run["output_ids"])
    path = tmp_path / "run.pt"
    torch.save({"responses": [{"ddtree_tb5": SimpleNamespace(**run)}], "args": {"dataset": "math500"}}, path)
    assert Trace.load(path).token_ids == (0, 1, 3, 5, 7, 8, 6)


def three_runs() -> dict:
    """Two prompts, the first one with two budgets."""
    small, other = saved_run(), saved_run(output_ids=[[*PROMPT, 0, 1, 3, 5]])
    small["round_trees"] = small["round_trees"][:1]
    return {"responses": [{"ddtree_tb2": small, "ddtree_tb5": saved_run()}, {"ddtree_tb5": other}]}


def test_of_several_runs_the_first_prompts_largest_budget_comes_first_and_each_can_be_had(tmp_path):
    trace = Trace.from_dict(three_runs())
    assert len(trace.rounds) == 2
    assert trace.settings["source"] == "liranringel/ddtree, run 1 of 3, responses 0 ddtree_tb5"
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(three_runs()))
    sources = [one.settings["source"].split(", ")[-1] for one in Trace.load_all(path)]
    assert sources == ["responses 0 ddtree_tb5", "responses 0 ddtree_tb2", "responses 1 ddtree_tb5"]
    assert [len(Trace.load(path, run).rounds) for run in range(3)] == [2, 1, 1]
    for run in (-1, 3):
        with pytest.raises(ValueError, match=rf"runs\.json: run is {run}; the file holds runs 0 to 2"):
            Trace.load(path, run)
    example_trace().save(path)
    assert [one.to_dict() for one in Trace.load_all(path)] == [example_trace().to_dict()]
    with pytest.raises(ValueError, match="runs 0 to 0"):
        Trace.load(path, 1)


def test_the_command_line_opens_each_run_and_compares_two_of_one_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs.json").write_text(json.dumps(three_runs()))
    for run, where in ((1, "ddtree_tb5"), (2, "ddtree_tb2"), (3, "responses 1")):
        assert main(["show", "runs.json", "--run", str(run)]) == 0
        assert where in capsys.readouterr().out
    assert main(["export", "runs.json", "--run", "3", "--html", "a.html"]) == 0
    assert "run 3 of 3" in (tmp_path / "a.html").read_text()
    assert main(["diff", "runs.json", "runs.json", "--run-b", "3"]) == 1
    assert "B ends before new token 4" in capsys.readouterr().out
    assert main(["show", "runs.json", "--run", "4"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


class Exploit:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_a_file_that_would_run_something_is_refused(tmp_path, capsys):
    import torch

    torch.save({"round_trees": [Exploit()]}, tmp_path / "run.pt")
    with pytest.raises(ValueError, match=r"run\.pt: torch's weights-only reader"):
        Trace.load(tmp_path / "run.pt")
    (tmp_path / "not.pt").write_bytes(b"PK\x03\x04 and nothing more")
    with pytest.raises(ValueError, match=r"not\.pt"):
        Trace.load(tmp_path / "not.pt")
    assert capsys.readouterr().out == ""


def test_a_text_that_ends_inside_a_path_and_rounds_after_it(tmp_path):
    run = saved_run(output_ids=[[*PROMPT, 0, 1, 3]])
    trace = Trace.from_dict(run)
    (round_,) = trace.rounds  # the second one was run for nothing
    assert round_.path == (0, 1)
    assert round_.emitted_token_ids == (1, 3)
    assert round_.ended_early


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"output_ids": [[*PROMPT, 0, 1, 5, 7, 8, 6]]}, "round_trees 0: its accepted tokens"),
        ({"num_input_tokens": 0}, "num_input_tokens is 0"),
        ({"num_input_tokens": 50}, "num_input_tokens is 50"),
        ({"output_ids": None}, "output_ids is null"),
        ({"round_trees": [{"accepted_indices": [0]}]}, "round_trees 0: tree is missing"),
        (
            {"round_trees": [{"accepted_indices": [0, 9], "tree": saved_run()["round_trees"][0]["tree"]}]},
            "no nodes",
        ),
        ({"round_trees": [3]}, "not an object"),
    ],
)
def test_a_run_that_does_not_fit_its_text_says_where(change, words):
    with pytest.raises(ValueError, match=words):
        Trace.from_dict(saved_run(**change))


def test_unknown_numbers_are_shown_as_unknown():
    trace = Trace.from_dict(saved_run())
    view = dl.view(trace)
    text = view.to_text()
    assert "✓ <3>\n" in text
    assert "nan" not in text
    assert "nan" not in view.to_html()
    assert view.payload["rounds"][0]["log_probs"] == [None] * 6
    ET.fromstring(view.to_svg())
    saved = Trace.from_dict(json.loads(json.dumps(trace.to_dict())))
    assert saved.to_dict() == trace.to_dict()
