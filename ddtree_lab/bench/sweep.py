"""Whole decodes: prompts × methods × budgets × temperatures, a row each, in files that survive a killed run.

A row is keyed by what was asked for, so a run that is started again does what is missing and nothing twice. For
each prompt and temperature all methods run one after another, as often as asked for, each time beginning with another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddtree_lab.bench.processes import Processes
from ddtree_lab.bench.rows import Key, Row, RowFile, environment, keyed, method_label, read_rows
from ddtree_lab.costs import clock
from ddtree_lab.decode import AUTOREGRESSIVE, Generation, generate
from ddtree_lab.pair import Pair, Prompt
from ddtree_lab.pipeline import STAGES

LIBRARY = "library"  # the target's own `generate`
METHODS = (LIBRARY, AUTOREGRESSIVE, "dflash", "ddtree")
_TEXT = (
    "pair",
    "drafter",
    "setup",
    "domain",
    "prompt",
    "prompt_sha256",
    "temperature",
    "seed",
    "max_new_tokens",
    "repeat",
)
KEY = (*_TEXT, "method", "tree_budget")


@dataclass(frozen=True)
class Job:
    """One decode of a sweep."""

    method: str
    tree_budget: int | str | None
    temperature: float
    seed: int = 0
    max_new_tokens: int = 100
    repeat: int = 0

    @property
    def label(self) -> str:
        return method_label(self.method, self.tree_budget)


@dataclass(frozen=True)
class Sweep:
    """What to decode: every prompt with every job.

    Args:
        drafter: as it was asked for; rows of another drafter are other rows.
        setup: what else was asked for of the pair: quantisation, revision, ….
        repeats: how often each decode is timed; its tokens are the same every time.
    """

    methods: tuple[str, ...] = METHODS
    tree_budgets: tuple[int | str, ...] = (8, 16, 32, 64)
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    max_new_tokens: int = 100
    drafter: str = ""
    setup: str = ""
    repeats: int = 1

    def jobs(self, temperature: float, repeat: int = 0) -> list[Job]:
        return [
            Job(method, budget, temperature, self.seed, self.max_new_tokens, repeat)
            for method in self.methods
            for budget in (self.tree_budgets if method == "ddtree" else (None,))
        ]


def run_sweep(
    pair: Pair,
    prompts: Sequence[Prompt],
    sweep: Sweep,
    folder: str | Path,
    on_row: Callable[[Row], None] = lambda row: None,
    processes: Processes | None = None,
) -> list[Row]:
    """Do what is missing in a folder; all rows of this sweep, in order.

    Args:
        processes: each does its share of the prompts, writes a file of its own, and is given the rows of all.
    """
    folder, processes = Path(folder), processes or Processes()
    folder.mkdir(parents=True, exist_ok=True)
    done = keyed(read_sweep(folder), KEY)
    file = RowFile(folder / f"rows-{processes.index}.jsonl")
    share, is_warm = processes.share(range(len(prompts))), False
    for index in share:
        for temperature, repeat in _turns(sweep):
            jobs = sweep.jobs(temperature, repeat)
            missing = [job for job in jobs if key_of(pair, prompts[index], sweep, job) not in done]
            turn = (index + repeat) % max(1, len(missing))
            if missing and not is_warm:  # what happens once a process is nobody's time
                _warm_up(pair, prompts[index], jobs)
                is_warm = True
            for job in (*missing[turn:], *missing[:turn]):
                row = measured(pair, prompts[index], sweep, job)
                if processes.writes:
                    file.append(row)
                done[key_of(pair, prompts[index], sweep, job)] = row
                on_row(row)
    mine = _keys(pair, [prompts[index] for index in share], sweep)
    found = keyed(processes.gather([done[key] for key in mine]), KEY)
    return judged([found[key] for key in _keys(pair, prompts, sweep)])


def read_sweep(folder: Path) -> list[Row]:
    """The rows of a folder, of whichever process; those written before decodes could be repeated are the first."""
    return [{"repeat": 0, **row} for row in read_rows(*sorted(folder.glob("rows-*.jsonl")))]


def _turns(sweep: Sweep) -> list[tuple[float, int]]:
    return [(temperature, repeat) for temperature in sweep.temperatures for repeat in range(sweep.repeats)]


def _keys(pair: Pair, prompts: Sequence[Prompt], sweep: Sweep) -> list[Key]:
    """Of all decodes that are asked for, each once, in order."""
    jobs = [job for turn in _turns(sweep) for job in sweep.jobs(*turn)]
    return list(dict.fromkeys(key_of(pair, prompt, sweep, job) for prompt in prompts for job in jobs))


def key_of(pair: Pair, prompt: Prompt, sweep: Sweep, job: Job) -> Key:
    named = _named(pair, prompt, sweep, job)
    return tuple(named[name] for name in KEY)


def _named(pair: Pair, prompt: Prompt, sweep: Sweep, job: Job) -> Row:
    """What was asked for, as fields of a row."""
    return {
        "pair": pair.name, "drafter": sweep.drafter, "setup": sweep.setup,
        "prompt": prompt.id, "prompt_sha256": _digest(prompt.text), "domain": prompt.domain, "kind": prompt.kind,
        **asdict(job),
    }  # fmt: skip


def _warm_up(pair: Pair, prompt: Prompt, jobs: Sequence[Job]) -> None:
    for job in jobs:
        _decode(pair, prompt, job, max_new_tokens=8)


def measured(pair: Pair, prompt: Prompt, sweep: Sweep, job: Job) -> Row:
    """Decode once; what came of it as a row."""
    found = _decode(pair, prompt, job, job.max_new_tokens)
    row = _named(pair, prompt, sweep, job)
    row |= {"token_ids": list(found.token_ids), "text_sha256": _digest(",".join(map(str, found.token_ids)))}
    row |= {"num_emitted_tokens": len(found.token_ids), "seconds": found.seconds}
    if found.generation is not None:
        row |= _round_fields(found.generation)
    return {**row, "environment": environment()}


@dataclass(frozen=True)
class _Decoded:
    token_ids: tuple[int, ...]
    seconds: float
    generation: Generation | None


def _decode(pair: Pair, prompt: Prompt, job: Job, max_new_tokens: int) -> _Decoded:
    ids = pair.encode(prompt)
    if job.method != LIBRARY:
        budget: dict[str, Any] = {} if job.tree_budget is None else {"tree_budget": job.tree_budget}
        made = generate(
            pair, ids, job.method, temperature=job.temperature, seed=job.seed, max_new_tokens=max_new_tokens, **budget
        )  # fmt: skip
        return _Decoded(made.token_ids, made.seconds, made)
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": job.temperature, "top_k": 0} if job.temperature else {"do_sample": False}
    )  # fmt: skip
    ends = sorted(pair.eos_token_ids) or None
    torch.manual_seed(job.seed)
    began = clock()
    out = pair.target.generate(
        ids.to(pair.embeddings.device), attention_mask=torch.ones_like(ids).to(pair.embeddings.device),
        max_new_tokens=max_new_tokens, eos_token_id=ends, pad_token_id=(ends or [0])[0], **sampling,
    )  # fmt: skip
    return _Decoded(tuple(out[0, ids.shape[1] :].tolist()), clock() - began, None)


def _round_fields(made: Generation) -> Row:
    rounds = made.rounds
    deepest = max((r.num_accepted_drafts for r in rounds), default=0)
    return {
        "num_rounds": made.num_rounds,
        "mean_emitted_tokens": made.mean_emitted_tokens,
        "mean_accepted_drafts": made.mean_accepted_drafts,
        "accepted_by_depth": [sum(r.num_accepted_drafts >= d for r in rounds) for d in range(1, deepest + 1)],
        "mean_drafted": sum(r.num_drafted for r in rounds) / max(1, len(rounds)),
        "prefill_seconds": made.prefill_seconds,
        "stage_seconds": {stage: sum(r.stage_seconds.get(stage, 0.0) for r in rounds) for stage in STAGES},
    }  # fmt: skip


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def judged(rows: Sequence[Row]) -> list[Row]:
    """Rows with `lossless` (against plain decoding) and `speedup` (over the library's own `generate`, else over plain).

    The library samples with noise of its own, so its sampled text is not compared, and its speed is a token's.
    """

    def same(row: Row, method: str) -> Row | None:
        return found.get((*(row.get(name) for name in _TEXT), method))

    found = keyed(rows, (*_TEXT, "method"))
    out = []
    for row in rows:
        plain = same(row, AUTOREGRESSIVE)
        base = same(row, LIBRARY) or plain
        comparable = plain is not None and (row["method"] != LIBRARY or row["temperature"] == 0)
        speed = row["num_emitted_tokens"] / row["seconds"]
        out.append(
            {
                **row,
                "tokens_per_second": speed,
                "lossless": row["token_ids"] == plain["token_ids"] if comparable and plain else None,
                "speedup": speed * base["seconds"] / base["num_emitted_tokens"] if base else None,
                "ceiling": _ceiling(row, base) if base else None,
                "baseline": base["method"] if base else None,
            }
        )
    return out


def _ceiling(row: Row, base: Row) -> float | None:
    """The speed-up if a round took no longer than its draft and its verify pass, and the prefill no time at all."""
    busy = sum(row.get("stage_seconds", {}).get(stage, 0.0) for stage in ("draft", "verify"))
    return row["num_emitted_tokens"] / busy * base["seconds"] / base["num_emitted_tokens"] if busy else None


def by_prompt(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Of each prompt the median of a field over its repeats, where it has a value."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row[name] is not None:
            found.setdefault(f"{row['prompt']} {row['prompt_sha256']}", []).append(row[name])
    return {prompt: float(np.median(numbers)) for prompt, numbers in found.items()}


def over_prompts(rows: Sequence[Row], name: str) -> float | None:
    """The median of a field over prompts; None where it has no value."""
    values = by_prompt(rows, name)
    return float(np.median(list(values.values()))) if values else None


def grouped(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, float, str], list[Row]]]:
    """Rows by domain, temperature and label, in order."""
    groups: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        label = method_label(row["method"], row["tree_budget"])
        groups.setdefault((row["domain"], row["temperature"], label), []).append(row)
    yield from groups.items()


def by_text(rows: Sequence[Row]) -> dict[tuple[str, float], dict[str, list[Row]]]:
    """For each domain and temperature the rows of each label."""
    found: dict[tuple[str, float], dict[str, list[Row]]] = {}
    for (domain, temperature, label), group in grouped(rows):
        found.setdefault((domain, temperature), {})[label] = group
    return found
