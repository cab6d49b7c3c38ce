"""What a sweep decodes: bundled prompts, files, and the data sets of the papers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_lab.pair import Prompt, bundled_prompts

BUNDLED = "bundled"
DOMAINS = ("chat", "docs", "code")


@dataclass(frozen=True)
class Question(Prompt):
    """A user's message; its domain is the file or the data set that it is from."""

    @property
    def is_raw(self) -> bool:
        return False


@dataclass(frozen=True)
class DataSet:
    """Where the hub has a data set, and how the benchmarks of DFlash and DDTree make a message of an entry.

    Args:
        subset: the hub's name of the part, if there are several.
        message: the entry's fields stand in braces.
    """

    hub_id: str
    subset: str | None
    message: str


DATA_SETS = {
    "humaneval": DataSet(
        "openai/openai_humaneval", None,
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```",
    ),
    "gsm8k": DataSet(
        "openai/gsm8k", "main",
        "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    ),
}  # fmt: skip


def read_prompts(source: str) -> list[Prompt]:
    """The prompts of a sweep.

    Args:
        source: `"bundled"`, or `"chat"`, `"docs"`, `"code"` of them; `"humaneval"` or `"gsm8k"`, which come from the
            hub or its cache; a text file with a prompt a line; or JSON lines with `prompt` (or `question`) and, if
            there is one, `id`.

    Raises:
        ValueError: a file without prompts, or with lines of another kind.
        ModuleNotFoundError: a data set is asked for and the package `datasets` is not installed.
        OSError: a data set is neither in the cache nor reachable.
    """
    if source in (BUNDLED, *DOMAINS):
        return bundled_prompts(None if source == BUNDLED else source)
    if source in DATA_SETS:
        return _prompts_of(source, _load(source, DATA_SETS[source]))
    return _read_file(Path(source))


def _prompts_of(name: str, entries: Sequence[dict[str, Any]]) -> list[Prompt]:
    message = DATA_SETS[name].message
    return [
        Question(str(entry.get("task_id", i)), name, name, message.format(**entry))
        for i, entry in enumerate(entries)
    ]


def _load(name: str, data_set: DataSet) -> list[dict[str, Any]]:
    """The test split, through the library that keeps it in its cache."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ModuleNotFoundError(
            f"--prompts {name} is read by the package datasets, which is not installed: pip install "
            "'ddtree-lab[datasets]', or give a JSON-lines file with a prompt a line."
        ) from error
    try:
        return list(load_dataset(data_set.hub_id, data_set.subset, split="test"))
    except Exception as error:  # the library's own kinds, those of the hub, of the network and of the disk
        raise OSError(
            f"--prompts {name}: {data_set.hub_id} could not be loaded ({_first_line(error)}). Run it once where the "
            "hub can be reached, so that it is in the cache, or give a JSON-lines file with a prompt a line."
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _read_file(path: Path) -> list[Prompt]:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix == ".jsonl":
        entries = [json.loads(line) for line in lines]
        entries = [entry if isinstance(entry, dict) else {} for entry in entries]
        texts = [entry.get("prompt") or entry.get("question") for entry in entries]
        names = [str(entry.get("id", entry.get("task_id", i))) for i, entry in enumerate(entries)]
    else:
        texts, names = list(lines), [str(i) for i in range(len(lines))]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"--prompts {path}: give a text a line, or JSON lines that have a prompt.")
    return [Question(name, path.stem, path.stem, text) for name, text in zip(names, texts, strict=True)]
