"""What neither model has seen: held-out chat tasks of every kind, and windows of held-out documents."""

import random
from dataclasses import dataclass

import numpy as np

from .data import Rows
from .documents import load_documents
from .rollouts import Rollouts
from .settings import SEEDS
from .tasks import KINDS, Task, draw_task
from .tokenizer import load_tokenizer

TRIES_PER_TASK = 40  # some kinds have only a few dozen held-out tasks in all


@dataclass(frozen=True)
class HardPrompt:
    """A raw prefix of a held-out document."""

    name: str
    domain: str  # "docs" or "code"
    text: str


def held_out_tasks(count_per_kind: int, seed: int = SEEDS.evaluation) -> list[Task]:
    """Up to `count_per_kind` different tasks of each kind, checked against both training sets.

    The kinds take turns (arithmetic, units, …, arithmetic, units, …), so any prefix is balanced.
    """
    by_kind = [_of_kind(kind, count_per_kind, seed) for kind in KINDS]
    tasks = [tasks[index] for index in range(count_per_kind) for tasks in by_kind if index < len(tasks)]
    assert_unseen(tasks)
    return tasks


def assert_unseen(tasks: list[Task]) -> None:
    """No task occurs in the training of the target or of the drafter."""
    hashes = np.array([task.key_hash for task in tasks], np.uint64)
    for name, seen in (("target", Rows.load().seen_tasks), ("drafter", Rollouts.load().seen_tasks)):
        leaked = [task.key for task, is_seen in zip(tasks, np.isin(hashes, seen), strict=True) if is_seen]
        assert not leaked, f"held-out tasks occur in the {name}'s training: {leaked[:3]}"


def hard_prompts(
    count_per_domain: int, minimum_tokens: int = 60, maximum_tokens: int = 120
) -> list[HardPrompt]:
    """Line-aligned windows of held-out documents, one a document, both domains in turn."""
    rng = random.Random(SEEDS.evaluation)
    tokenizer = load_tokenizer()
    prompts: dict[str, list[HardPrompt]] = {"docs": [], "code": []}
    documents = [document for document in load_documents() if document.is_held_out]
    rng.shuffle(documents)
    for document in documents * 3:
        found = prompts[document.domain]
        if len(found) >= count_per_domain:
            continue
        lines = document.text.split("\n")
        start = rng.randrange(max(1, len(lines) - 30))
        text = ""
        for line in lines[start : start + 30]:
            text += line + "\n"
            if len(tokenizer(text).input_ids) >= minimum_tokens:
                break
        if minimum_tokens <= len(tokenizer(text).input_ids) <= maximum_tokens:
            found.append(HardPrompt(document.name, document.domain, text))
    return [prompt for pair in zip(prompts["docs"], prompts["code"], strict=True) for prompt in pair]


def _of_kind(kind: str, count: int, seed: int) -> list[Task]:
    rng = random.Random(f"{seed}:{kind}")
    found: dict[str, Task] = {}
    for _ in range(count * TRIES_PER_TASK):
        task = draw_task(rng, kind, held_out=True)
        found.setdefault(task.key, task)
        if len(found) == count:
            break
    return list(found.values())
