"""show, export and diff: saved traces on the command line, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from goldens import check_golden
from rounds import ended_round, example_round, example_trace, large_round

from ddtree_lab.cli import main


@pytest.fixture
def trace(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    example_trace(example_round(), large_round(33)).save("trace.json")
    return "trace.json"


def test_show_is_one_screen(trace, capsys):
    assert main(["show", trace]) == 0
    out = capsys.readouterr().out
    check_golden("show.txt", out)
    assert len(out.splitlines()) < 60


def test_show_one_round(trace, capsys):
    assert main(["show", trace, "--round", "1", "--ascii"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert "round 1 of 2" in out
    assert "`-- * _ran" in out
    assert "round 2" not in out


def test_show_json_is_what_the_viewer_is_given(trace, capsys):
    assert main(["show", trace, "--json", "--round", "2"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["round_numbers"] == [1]
    assert len(payload["rounds"][0]["ids"]) == 33


def test_export_writes_what_is_asked_for(trace, capsys):
    faces = [("--html", "a.html"), ("--svg", "a.svg"), ("--dot", "a.dot")]
    assert main(["export", trace, *(word for face in faces for word in face), "--round", "1"]) == 0
    assert capsys.readouterr().out.split() == ["wrote", "a.html", "wrote", "a.svg", "wrote", "a.dot"]
    assert "round 1 of 2" in ET.parse("a.svg").getroot()[0].text
    assert Path("a.dot").read_text().startswith("digraph")
    assert "<!doctype html>" in Path("a.html").read_text()


def test_diff_says_the_same_and_exits_0(trace, capsys):
    assert main(["diff", trace, trace]) == 0
    assert "both runs say the same" in capsys.readouterr().out


def test_diff_stops_at_the_first_difference_and_exits_1(trace, capsys):
    other = replace(example_round(), emitted_token_ids=(1, 3, 6), target_token_ids=(1, 3, 0, 6, 0, 0))
    example_trace(other).save("other.json")
    assert main(["diff", trace, "other.json", "--html", "diff.html"]) == 1
    out = capsys.readouterr().out
    assert "new token 3 differs: A says ␣ran, B says é" in out
    assert "gap of the first two choices: 0.693 nats" in out
    assert '"kind":"diff"' in Path("diff.html").read_text()
    assert main(["diff", trace, "other.json", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["divergence"]["index"] == 3
    example_trace(ended_round()).save("short.json")
    assert main(["diff", trace, "short.json"]) == 1
    assert "B ends before new token 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "missing.json"],
        ["show", "."],
        ["show", "bad.json"],
        ["show", "trace.json", "--round", "0"],
        ["show", "trace.json", "--round", "9"],
        ["export", "trace.json"],
        ["export", "trace.json", "--svg", "no/such/folder.svg"],
        ["export", "trace.json", "--svg", "."],
        ["export", "trace.json", "--svg", "a.svg", "--round", "3"],
        ["diff", "trace.json"],
        ["diff", "trace.json", "bad.json"],
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_2(trace, capsys, arguments):
    Path("bad.json").write_text("{")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert not list(Path().glob("*.svg"))


@pytest.mark.parametrize(
    "command",
    [
        "show trace.json",
        "export trace.json --svg a.svg --html a.html --dot a.dot",
        "diff trace.json trace.json",
    ],
)
def test_no_command_needs_torch(trace, command):
    script = (
        "import sys; from ddtree_lab.cli import main; status = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'anywidget', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_ends_quietly(trace):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ddtree_lab", "show", trace]
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert process.stderr == ""
