"""The command line as a user meets it: tables, JSON, exit codes, one-line errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ddtree_lab as dl
from ddtree_lab.cli import main
from ddtree_lab.commands import run as run_command

FAST = ["--max-new-tokens", "12", "--tree-budget", "4,8"]


def run_json(capsys, *arguments: str) -> tuple[int, dict]:
    status = main(["run", "--json", *FAST, *arguments])
    return status, json.loads(capsys.readouterr().out)


def test_run_json_has_the_documented_keys(capsys):
    status, report = run_json(capsys)
    assert status == 0
    assert list(report) == ["pair", "prompt", "results", "environment"]
    assert report["pair"] == "embedded"
    methods = [(r["method"], r["tree_budget"]) for r in report["results"]]
    assert methods == [("autoregressive", None), ("dflash", None), ("ddtree", 4), ("ddtree", 8)]
    assert set(report["results"][0]) == {
        "method", "tree_budget", "text", "token_ids", "num_emitted_tokens", "num_rounds", "mean_emitted_tokens",
        "mean_accepted_drafts", "tokens_per_second", "speedup", "lossless",
    }  # fmt: skip
    assert all(
        r["lossless"] and r["token_ids"] == report["results"][0]["token_ids"] for r in report["results"]
    )
    assert report["results"][0]["speedup"] == 1.0
    assert report["environment"]["torch"]


def test_run_shows_text_tree_and_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["run", *FAST]) == 0
    out = capsys.readouterr().out
    for expected in (
        "plain decoding says",
        "anchor, position",
        "accepted drafts",
        "lossless",
        "✓",
        "ddtree 8",
    ):
        assert expected in out


def test_a_result_that_differs_is_told_and_exits_1(capsys, monkeypatch):
    """The lossless column can say no."""
    real = dl.generate

    def contaminated(*args, **kwargs):
        return real(*args, **{**kwargs, "verify_method": "flattened"})

    monkeypatch.setattr("ddtree_lab.decode.generate", contaminated)
    status, report = run_json(capsys, "--max-new-tokens", "60")
    assert status == 1
    assert not all(r["lossless"] for r in report["results"])


def test_sampling_options_reach_the_decoder(capsys):
    texts = set()
    for seed in ("1", "2"):
        options = (
            "--bundled",
            "hard-docs-1",
            "--temperature",
            "1.5",
            "--seed",
            seed,
        )  # a text that is never certain
        status, report = run_json(capsys, *options, "--method", "dflash")
        assert status == 0
        assert [r["method"] for r in report["results"]] == ["autoregressive", "dflash"]
        texts.add(report["results"][0]["text"])
    assert len(texts) == 2


def test_prompts_from_everywhere(capsys, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("Name three colours.")
    _, given = run_json(capsys, "--prompt", "Name three colours.", "--method", "dflash")
    _, read = run_json(capsys, "--prompt-file", str(tmp_path / "prompt.txt"), "--method", "dflash")
    assert given["results"][0]["token_ids"] == read["results"][0]["token_ids"]
    _, raw = run_json(capsys, "--prompt", "Name three colours.", "--raw", "--method", "dflash")
    assert raw["results"][0]["token_ids"] != given["results"][0]["token_ids"]
    hard = next(prompt for prompt in dl.bundled_prompts() if prompt.is_raw)
    _, bundled = run_json(capsys, "--bundled", hard.id, "--method", "dflash")
    assert bundled["prompt"] == hard.text


def test_the_trace_is_saved_whole(capsys, tmp_path):
    path = tmp_path / "trace.json"
    _, report = run_json(capsys, "--trace", str(path))
    trace = dl.Trace.load(path)
    assert list(trace.token_ids) == report["results"][-1]["token_ids"]
    assert trace.settings["tree_budget"] == 8
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_list_prompts(capsys):
    assert main(["run", "--list-prompts", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) >= 12


def test_env(capsys):
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["torch"]["value"]
    assert main(["env"]) == 0
    assert "implies" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required"),
        (["fly"], "invalid choice"),
        (["run", "--tree-budget", "0"], "--tree-budget"),
        (["run", "--tree-budget", "32,x"], "--tree-budget"),
        (["run", "--max-new-tokens", "-1"], "--max-new-tokens"),
        (["run", "--method", "eagle"], "--method"),
        (["run", "--prompt", "a", "--prompt-file", "b"], "--prompt-file"),
        (["run", "--prompt-file", "no/such/file"], "no/such/file"),
        (["run", "--prompt", ""], "prompt"),
        (["run", "--bundled", "nothing"], "--list-prompts"),
        (["run", "--temperature", "-1"], "temperature"),
        (["run", "--target", "no/such/folder/at/all"], "drafter"),
        (["run", "--target", "./nothing", "--drafter", "./nothing"], "nothing"),
        (["run", "--trace", "no/such/folder/t.json"], "--trace"),
        (["run", "--method", "autoregressive", "--trace", "t.json", "--max-new-tokens", "2"], "--trace"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line_and_exit_2(capsys, arguments, said, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err
    assert not list(tmp_path.iterdir())


def test_help_exits_0(capsys):
    assert main(["--help"]) == 0
    assert main(["run", "--help"]) == 0
    assert "--tree-budget" in capsys.readouterr().out


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(run_command, "_load", lambda *a: {}["missing"])
    with pytest.raises(KeyError):
        main(["run"])


def test_ctrl_c_is_one_line(tmp_path):
    command = [
        sys.executable,
        "-m",
        "ddtree_lab",
        "run",
        "--max-new-tokens",
        "3000",
        "--raw",
        "--prompt",
        "a",
    ]
    process = subprocess.Popen(
        [*command, "--trace", str(tmp_path / "t.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, and what it starts, ignores the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        time.sleep(8)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, (out, err)
    assert err == "ddtree-lab run: error: interrupted\n"
    assert not list(tmp_path.iterdir())


def test_a_closed_pipe_is_quiet():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ddtree_lab", "env"]
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert process.returncode == 1
    assert process.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [["env"], ["env", "--json"]])
def test_output_that_finds_no_room_is_one_line(arguments):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "ddtree_lab", *arguments]
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 2
    assert process.stderr == "ddtree-lab env: error: [Errno 28] No space left on device\n"


def test_narrow_and_ascii_terminals_get_what_they_can_show(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["run", *FAST]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    header = next(line for line in lines if "method" in line)
    assert all(name in header for name in ("rounds", "tokens/s", "speed-up", "lossless"))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    command = [sys.executable, "-m", "ddtree_lab", "run", *FAST]
    process = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert process.stdout.isascii()
    assert b"yes" in process.stdout
