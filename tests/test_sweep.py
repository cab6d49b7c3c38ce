"""Sweeps on more than one process, and whatever may end one: nothing written is lost, nothing is done twice."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_lab.bench.papers import PUBLISHED, paper_table, published
from ddtree_lab.bench.processes import Processes
from ddtree_lab.bench.prompts import DATA_SETS, read_prompts
from ddtree_lab.bench.rows import read_rows
from ddtree_lab.cli import main

ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
SWEEP = ["--prompts", "chat", "--limit", "3", "--methods", "autoregressive,ddtree", "--tree-budgets", "8,16"]
SWEEP += ["--max-new-tokens", "12", "--json"]
NUM_ROWS = 3 * 3
TIMED = {
    "seconds",
    "prefill_seconds",
    "stage_seconds",
    "tokens_per_second",
    "speedup",
    "ceiling",
    "environment",
}


def arguments(folder):
    return ["bench", *SWEEP, "--out", str(folder)]


def launched(folder):
    """Two processes of `accelerate launch`, which on a CPU starts several only if told that they are GPUs."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [*launch, "--main_process_port", "0", "-m", "ddtree_lab", *arguments(folder)]


def alone(folder):
    return [sys.executable, "-m", "ddtree_lab", *arguments(folder)]


def untimed(rows):
    return [{name: value for name, value in row.items() if name not in TIMED} for row in rows]


def printed(text):
    return untimed(json.loads(line) for line in text.splitlines())


def written(folder):
    return read_rows(*sorted(Path(folder).glob("rows-*.jsonl")))


def start(command, **options):
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": ONE_THREAD,
        **options,
    }
    return subprocess.Popen(command, **options)


def wait_for_rows(process, folder, name="rows-0.jsonl", count=2):
    file = Path(folder) / name
    while process.poll() is None and not (file.exists() and file.read_bytes().count(b"\n") >= count):
        pass
    assert process.poll() is None, "it was done before it could be ended"


def finish(folder, capsys):
    """Start the sweep again: its rows, and those found in the folder."""
    capsys.readouterr()
    assert main(arguments(folder)) == 0
    return printed(capsys.readouterr().out), written(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder and the rows of a sweep that nothing ended."""
    folder = tmp_path_factory.mktemp("whole")
    done = subprocess.run(alone(folder), env=ONE_THREAD, capture_output=True, text=True, check=True)
    rows = printed(done.stdout)
    assert len(rows) == NUM_ROWS and all(row["lossless"] for row in rows)
    return folder, rows


def check_nothing_lost(folder, before, rows, found, whole):
    assert rows == whole[1]
    assert len(found) == NUM_ROWS and all(row in found for row in before)


@pytest.mark.slow
def test_two_processes_of_accelerate_have_the_rows_of_one(tmp_path, whole):
    done = subprocess.run(launched(tmp_path), env=ONE_THREAD, capture_output=True, text=True, check=True)
    assert printed(done.stdout) == whole[1]
    counts = [len(read_rows(tmp_path / f"rows-{rank}.jsonl")) for rank in (0, 1)]
    assert counts == [6, 3]


@pytest.mark.slow
def test_one_of_two_processes_is_killed_and_nothing_written_is_lost(tmp_path, whole, capsys):
    launcher = start(launched(tmp_path))
    wait_for_rows(launcher, tmp_path, "rows-1.jsonl", count=1)
    os.kill(_process_of_rank(launcher.pid, 1), signal.SIGKILL)
    launcher.communicate()
    assert launcher.returncode != 0
    before = written(tmp_path)
    assert 0 < len(before) < NUM_ROWS
    check_nothing_lost(tmp_path, before, *finish(tmp_path, capsys), whole)


def _process_of_rank(launcher, rank):
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            environment = (status.parent / "environ").read_bytes().split(b"\0") if parent == launcher else []
        except OSError:  # it has ended meanwhile
            continue
        if f"RANK={rank}".encode() in environment:
            return int(status.parent.name)
    raise AssertionError(f"the launcher has no process of rank {rank}")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_sweep_that_is_killed_or_interrupted_goes_on(number, status, tmp_path, whole, capsys):
    process = start(alone(tmp_path))
    wait_for_rows(process, tmp_path)
    process.send_signal(number)
    out, error = process.communicate()
    assert (process.returncode, out) == (status, "")
    assert error == ("ddtree-lab bench: error: interrupted\n" if number == signal.SIGINT else "")
    before = written(tmp_path)
    assert len(before) < NUM_ROWS
    check_nothing_lost(tmp_path, before, *finish(tmp_path, capsys), whole)


@pytest.mark.slow
def test_a_disk_that_is_full_is_named_in_one_line_and_holds_whole_rows(tmp_path, whole, capsys):
    size = len((whole[0] / "rows-0.jsonl").read_bytes()) // 2
    process = start(
        alone(tmp_path), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    )
    out, error = process.communicate()
    assert (process.returncode, out, error.count("\n")) == (2, "", 1)
    assert "File too large" in error and "rows-0.jsonl" in error
    file = tmp_path / "rows-0.jsonl"
    assert file.read_bytes().endswith(b"}\n") and not list(tmp_path.glob(".*"))
    before = written(tmp_path)
    assert 0 < len(before) < NUM_ROWS
    check_nothing_lost(tmp_path, before, *finish(tmp_path, capsys), whole)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_onto_a_full_disk_is_one_line(whole):
    with Path("/dev/full").open("w") as full:
        process = start(alone(whole[0]), stdout=full)
        _, error = process.communicate()
    assert process.returncode == 2 and error.count("\n") == 1
    assert "No space left" in error
    assert len(written(whole[0])) == NUM_ROWS


@pytest.mark.slow
def test_a_reader_that_goes_away_gets_no_traceback(whole):
    process = start(alone(whole[0]))
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1
    assert len(written(whole[0])) == NUM_ROWS


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_prompts_are_dealt_in_turns_and_each_once(count, monkeypatch):
    from accelerate import PartialState

    shares = []
    for index in range(count):
        state = object.__new__(PartialState)
        monkeypatch.setattr(
            PartialState,
            "_shared_state",
            dict(num_processes=count, process_index=index, distributed_type="X"),
        )
        state.__dict__ = PartialState._shared_state
        processes = Processes()
        processes._state, processes.index, processes.count = state, index, count
        shares.append(processes.share(range(7)))
    assert shares == [list(range(7))[index::count] for index in range(count)]


def test_processes_that_hold_one_model_have_all_prompts_and_one_writes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        processes = Processes(are_one=True)
        assert processes.share("abc") == ["a", "b", "c"] == processes.gather("abc")
        assert processes.writes == processes.is_first == (rank == "0")


ENTRIES = {
    "humaneval": [{"task_id": "HumanEval/0", "prompt": "def f():\n    {}"}],
    "gsm8k": [{"question": "How many?", "answer": "#### 2"}],
}
MESSAGES = {
    "humaneval": "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\ndef f():\n    {}\n```",
    "gsm8k": "How many?\nPlease reason step by step, and put your final answer within \\boxed{}.",
}


class Datasets:
    """In place of the package `datasets`."""

    def __init__(self, error=None):
        self.asked, self.error = [], error

    def load_dataset(self, name, subset, split):
        self.asked.append((name, subset, split))
        if self.error:
            raise self.error
        return next(ENTRIES[key] for key, data_set in DATA_SETS.items() if data_set.hub_id == name)


@pytest.mark.parametrize("name", DATA_SETS)
def test_data_sets_of_the_papers_become_their_messages(name, monkeypatch):
    library = Datasets()
    monkeypatch.setitem(sys.modules, "datasets", library)
    (prompt,) = read_prompts(name)
    assert library.asked == [(DATA_SETS[name].hub_id, DATA_SETS[name].subset, "test")]
    assert (prompt.text, prompt.domain, prompt.is_raw) == (MESSAGES[name], name, False)


def test_without_the_library_or_the_hub_the_error_says_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["bench", "--prompts", "gsm8k", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "pip install 'ddtree-lab[datasets]'" in error and error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "datasets", Datasets(ConnectionError("no route\nto host")))
    assert main(["bench", "--prompts", "humaneval", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "openai/openai_humaneval could not be loaded (no route)" in error and error.count("\n") == 1


def test_the_real_library_reads_what_the_loader_asks_of_it(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    for name, entries in ENTRIES.items():
        folder = tmp_path / DATA_SETS[name].hub_id / (DATA_SETS[name].subset or "")
        folder.mkdir(parents=True)
        (folder / "test.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        if DATA_SETS[name].subset:
            (folder.parent / "README.md").write_text(
                "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: test\n    path: main/test.jsonl\n---\n"
            )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert {name: read_prompts(name)[0].text for name in DATA_SETS} == MESSAGES


def test_a_file_of_another_name_or_text_is_other_rows(tmp_path):
    for name, text in (("a", "Say yes."), ("b", "Say no.")):
        (tmp_path / f"{name}.txt").write_text(text + "\n")
    prompts = [read_prompts(str(tmp_path / f"{name}.txt"))[0] for name in "ab"]
    assert [(p.id, p.domain) for p in prompts] == [("0", "a"), ("0", "b")]
    (tmp_path / "docs.jsonl").write_text('{"question": "Why?"}\n')
    assert not read_prompts(str(tmp_path / "docs.jsonl"))[0].is_raw
    (tmp_path / "no.jsonl").write_text('["Why?"]\n')
    with pytest.raises(ValueError, match="give a text a line"):
        read_prompts(str(tmp_path / "no.jsonl"))


def row(label, speedup, emitted, **changes):
    method, _, budget = label.partition(" ")
    budget = None if not budget else budget if budget == "auto" else int(budget)
    named = dict(pair="Qwen/Qwen3-8B", drafter="z-lab/Qwen3-8B-DFlash-b16", domain="gsm8k", temperature=0.0)
    return {
        **named, "method": method, "tree_budget": budget, "speedup": speedup, "mean_emitted_tokens": emitted,
        "num_rounds": 9, **changes,
    }  # fmt: skip


def test_the_papers_figures_stand_beside_ours_where_the_pair_is_the_same():
    rows = [
        row("dflash", 2.0, 5.0),
        row("dflash", 4.0, 7.0),
        row("ddtree 16", 3.0, 7.5),
        row("ddtree 64", 4.5, 8.0),
    ]
    rows += [row("ddtree auto", 4.6, 7.9), row("library", 1.0, 1.0, num_rounds=None)]
    (line,) = paper_table(rows).lines
    assert line == (
        "gsm8k", "0", "3.00 / 6.00", "4.78 / 6.57", "4.50 / 8.00", "64", "6.75 / 9.54", "4.60 / 7.90",
    )  # fmt: skip
    for other in (
        dict(drafter="ngram"),
        dict(pair="Qwen/Qwen3-14B"),
        dict(temperature=1.0),
        dict(domain="docs"),
    ):
        assert published(row("dflash", 2.0, 5.0, **other)) is None
    (line,) = paper_table([row("dflash", 2.0, 5.0, drafter="ngram")]).lines
    assert line[3:] == ("–", "–", "–", "–", "–")


def test_the_published_figures_are_those_of_the_fact_sheet():
    assert PUBLISHED["Qwen3-4B"]["math500"] == ((5.54, 7.72), (7.50, 10.71))
    assert all(
        chain < tree
        for pair in PUBLISHED.values()
        for figures in pair.values()
        for chain, tree in zip(*figures, strict=True)
    )
