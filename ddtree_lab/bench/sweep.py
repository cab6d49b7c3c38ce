"""Whole decodes: prompts × methods × budgets × temperatures, a row each, in files that survive a killed run.

A row is keyed by what was asked for, so a run that is started again does what is missing and nothing twice. For
each prompt and temperature all methods run one after another, each prompt beginning with another method.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ddtree_lab.bench.rows import Row, RowFile, environment, keyed, method_label, read_rows
from ddtree_lab.costs import clock
from ddtree_lab.decode import AUTOREGRESSIVE, Generation, generate
from ddtree_lab.pair import Pair, Prompt, bundled_prompts
from ddtree_lab.pipeline import STAGES

LIBRARY = "library"  # the target's own `generate`
METHODS = (LIBRARY, AUTOREGRESSIVE, "dflash", "ddtree")
KEY = ("pair", "prompt", "method", "tree_budget", "temperature", "seed", "max_new_tokens")


@dataclass(frozen=True)
class Job:
    """One decode of a sweep."""

    method: str
    tree_budget: int | str | None
    temperature: float
    seed: int = 0
    max_new_tokens: int = 100

    @property
    def label(self) -> str:
        return method_label(self.method, self.tree_budget)


@dataclass(frozen=True)
class Sweep:
    """What to decode: every prompt with every job."""

    methods: tuple[str, ...] = METHODS
    tree_budgets: tuple[int | str, ...] = (8, 16, 32, 64)
    temperatures: tuple[float, ...] = (0.0,)
    seed: int = 0
    max_new_tokens: int = 100

    def jobs(self, temperature: float) -> list[Job]:
        return [
            Job(method, budget, temperature, self.seed, self.max_new_tokens)
            for method in self.methods
            for budget in (self.tree_budgets if method == "ddtree" else (None,))
        ]


def read_prompts(source: str) -> list[Prompt]:
    """The prompts of a sweep.

    Args:
        source: `"bundled"`, or `"chat"`, `"docs"`, `"code"` of them; a text file with a prompt a line; or JSON
            lines with `prompt` (or `question`) and, if there is one, `id`.

    Raises:
        ValueError: a file without prompts, or with lines of another kind.
    """
    if source in ("bundled", "chat", "docs", "code"):
        return bundled_prompts(None if source == "bundled" else source)
    path = Path(source)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix == ".jsonl":
        entries = [json.loads(line) for line in lines]
        texts = [entry.get("prompt") or entry.get("question") for entry in entries]
        names = [str(entry.get("id", entry.get("task_id", i))) for i, entry in enumerate(entries)]
    else:
        texts, names = list(lines), [str(i) for i in range(len(lines))]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"--prompts {source}: give a text a line, or JSON lines that have a prompt.")
    return [
        Prompt(name, "chat", path.stem, text) for name, text in zip(names, texts, strict=True)
    ]  # fmt: skip


def run_sweep(
    pair: Pair,
    prompts: Sequence[Prompt],
    sweep: Sweep,
    folder: str | Path,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Do what is missing in a folder; the rows of this sweep found there at the end, in order.

    Under `torchrun` or `accelerate launch` each process takes its share of the prompts and writes a file of its own.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rank, world_size = process_place()
    done = keyed(read_rows(*sorted(folder.glob("rows-*.jsonl"))), KEY)
    file = RowFile(folder / f"rows-{rank}.jsonl")
    is_warm = False
    for index in range(rank, len(prompts), world_size):
        prompt = prompts[index]
        for temperature in sweep.temperatures:
            jobs = sweep.jobs(temperature)
            missing = [job for job in jobs if key_of(pair, prompt, job) not in done]
            missing = missing[index % len(missing) :] + missing[: index % len(missing)] if missing else []
            if missing and not is_warm:  # what happens once a process is nobody's time
                _warm_up(pair, prompt, jobs)
                is_warm = True
            for job in missing:
                row = measured(pair, prompt, job)
                file.append(row)
                done[key_of(pair, prompt, job)] = row
                on_row(row)
    asked = [
        key_of(pair, prompt, job)
        for prompt in prompts
        for temperature in sweep.temperatures
        for job in sweep.jobs(temperature)
    ]
    return judged([done[key] for key in asked if key in done])


def process_place() -> tuple[int, int]:
    """Number of the process, and how many there are, as launchers say it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def key_of(pair: Pair, prompt: Prompt, job: Job) -> tuple:
    named = {"pair": pair.name, "prompt": prompt.id, **asdict(job)}
    return tuple(named[name] for name in KEY)


def _warm_up(pair: Pair, prompt: Prompt, jobs: Sequence[Job]) -> None:
    for job in jobs:
        _decode(pair, prompt, job, max_new_tokens=8)


def measured(pair: Pair, prompt: Prompt, job: Job) -> Row:
    """Decode once; what came of it as a row."""
    found = _decode(pair, prompt, job, job.max_new_tokens)
    row: Row = {
        "pair": pair.name,
        "prompt": prompt.id,
        "domain": prompt.domain,
        "kind": prompt.kind,
        **asdict(job),
    }
    row |= {"token_ids": list(found.token_ids), "text_sha256": _digest(found.token_ids)}
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


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]


def judged(rows: Sequence[Row]) -> list[Row]:
    """Rows with `lossless` (against plain decoding) and `speedup` (over the library's own `generate`, else over plain).

    The library samples with noise of its own, so its sampled text is not compared, and its speed is a token's.
    """

    def same(row: Row, method: str) -> Row | None:
        return found.get((row["prompt"], method, row["temperature"], row["seed"], row["max_new_tokens"]))

    found = keyed(rows, ("prompt", "method", "temperature", "seed", "max_new_tokens"))
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


def grouped(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, float, str], list[Row]]]:
    """Rows by domain, temperature and label, in order."""
    groups: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        label = method_label(row["method"], row["tree_budget"])
        groups.setdefault((row["domain"], row["temperature"], label), []).append(row)
    yield from groups.items()
