"""A survey: architectures one after the other, each in its own process, written down as they are done."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ddtree_lab
from ddtree_lab.environment import version_of
from ddtree_lab.survey.isolation import Ended, call_isolated
from ddtree_lab.survey.results import Row, Survey, judge

RESULTS = "survey.jsonl"
SECONDS = 60.0
MEMORY_BYTES = 2 * 2**30
MEASURED = ("scale", "noise", "tolerance", "signal")
EXAMINED_CODE = ("stages", "recurrent", "survey", "compat.py")  # what an answer depends on

Progress = Callable[[str, str, int, int], None]  # architecture, step, how many are done, of how many


def survey(
    architectures: dict[str, str],
    *,
    out: str | Path | None = None,
    seconds: float = SECONDS,
    memory_bytes: int = MEMORY_BYTES,
    on_progress: Progress = lambda name, step, done, total: None,
    examine: Callable[..., dict[str, Any]] | None = None,
) -> Survey:
    """Examine every architecture; what breaks is a row like any other.

    Args:
        architectures: model type → class name, as `causal_architectures()` gives them.
        out: a folder that keeps the rows as they are found; those it has already, of the same library and code,
            are not examined again.
        seconds: an architecture may take.
        memory_bytes: its process may hold.
        examine: what is called in the other process with a class name, instead of `examine_architecture`.

    Raises:
        OSError: the folder cannot be written.
    """
    if examine is None:
        from ddtree_lab.survey.architectures import examine_architecture

        examine = examine_architecture
    started = time.monotonic()
    code = code_version()
    done = _known(out, code)
    rows = []
    for i, (name, class_name) in enumerate(architectures.items()):
        row = done.get((name, class_name))
        if row is None:
            on_progress(name, "", i, len(architectures))

            def step(what: str, name: str = name, i: int = i) -> None:
                on_progress(name, what, i, len(architectures))

            before = time.monotonic()
            ended = call_isolated(
                examine, class_name, seconds=seconds, memory_bytes=memory_bytes, on_step=step
            )
            row = _row(name, class_name, ended, code, time.monotonic() - before)
            _keep(out, row)
        rows.append(row)
    return Survey(tuple(rows), time.monotonic() - started)


def choose(architectures: dict[str, str], wanted: Sequence[str]) -> dict[str, str]:
    """Some of the architectures, by model type or class name.

    Raises:
        ValueError: there is none of that name.
    """
    chosen = {}
    for name in wanted:
        found = {t: c for t, c in architectures.items() if name in (t, c)}
        if not found:
            import difflib

            near = difflib.get_close_matches(name, [*architectures, *architectures.values()], 3)
            hint = f" Did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"{name!r} is no causal language model of the installed transformers.{hint}")
        chosen.update(found)
    return chosen


def code_version() -> str:
    """A hash of the code that the answers depend on: rows of other code are not taken over."""
    root = Path(ddtree_lab.__file__).parent
    digest = hashlib.sha256()
    for part in EXAMINED_CODE:
        path = root / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_text(encoding="utf-8").encode())
    return digest.hexdigest()[:12]


def _row(name: str, class_name: str, ended: Ended, code: str, seconds: float) -> Row:
    common: dict[str, Any] = {
        "name": name, "model_class": class_name, "transformers": version_of("transformers"),
        "code": code, "seconds": round(seconds, 2), "peak_bytes": ended.peak_bytes,
    }  # fmt: skip
    if ended.value is None:
        outcome = {"": "no answer", "ShrinkError": "not shrunk"}.get(ended.raised, "unjudged")
        return Row(outcome=outcome, reason=ended.failure, **common)
    found = ended.value
    outcome, reason = judge(found["answers"])
    kept = {key: found[key] for key in ("answers", "caches", "embeddings", "num_layers", "num_parameters")}
    measured = {key: found[key] for key in MEASURED if key in found}
    return Row(outcome=outcome, reason=reason, measured=measured, **kept, **common)


def _known(out: str | Path | None, code: str) -> dict[tuple[str, str], Row]:
    """The rows of a folder that were found with this library and this code; a line cut short is left out."""
    file = None if out is None else Path(out) / RESULTS
    rows: dict[tuple[str, str], Row] = {}
    if file is None or not file.exists():
        return rows
    here = (version_of("transformers"), code)
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = Row(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if (row.transformers, row.code) == here:
            rows[row.name, row.model_class] = row
    return rows


def _keep(out: str | Path | None, row: Row) -> None:
    if out is None:
        return
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / RESULTS
    # A line that an interrupt cut short is ended first, so that only that one is lost.
    torn = file.exists() and file.stat().st_size and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as stream:
        stream.write(("\n" if torn else "") + json.dumps(asdict(row)) + "\n")
