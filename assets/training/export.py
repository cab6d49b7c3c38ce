"""Stage 5: put the trained pair where it ships, with the prompts that go with it.

python -m assets.training.export
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch

from ddtree_lab.drafter import DFlashDrafter

from .held_out import hard_prompts, held_out_tasks
from .sampling import continuations, load_target
from .settings import DRAFTER_FOLDER, MASK, PAIR, TARGET_FOLDER
from .tasks import KINDS, Task
from .tokenizer import chat_text, load_tokenizer, save_tokenizer

LARGEST_PAIR_BYTES = 24 * 2**20
TASKS_PER_KIND = 2
HARD_PER_DOMAIN = 4
DEFAULT_KINDS = ("sequences", "arithmetic")  # the first prompt shows a worked answer
DEFAULT_ANSWER_TOKENS = (60, 100)


def export() -> None:
    """The target with its tokenizer, the drafter, the prompts."""
    PAIR.mkdir(parents=True, exist_ok=True)
    with fresh_folder(PAIR / "target") as folder:
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            shutil.copyfile(TARGET_FOLDER / name, folder / name)
        save_tokenizer(load_tokenizer(), folder)
    with fresh_folder(PAIR / "drafter") as folder:
        DFlashDrafter.from_pretrained(DRAFTER_FOLDER).save_pretrained(folder)
    size = sum(path.stat().st_size for path in PAIR.rglob("*") if path.is_file())
    assert size <= LARGEST_PAIR_BYTES, f"the pair takes {size:,} bytes, more than {LARGEST_PAIR_BYTES:,}"
    write_prompts()


@contextmanager
def fresh_folder(destination: Path) -> Iterator[Path]:
    """An empty folder to fill; it then takes the destination's place, so no reader sees it half full."""
    fresh, old = (destination.with_name(f"{destination.name}.{suffix}") for suffix in ("new", "old"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    yield fresh
    for path in fresh.iterdir():
        path.chmod(0o644)  # safetensors writes files only their owner can read
    if destination.exists():
        destination.rename(old)
    fresh.rename(destination)
    shutil.rmtree(old, ignore_errors=True)


def write_prompts() -> None:
    """`prompts.json`: the default first, then chat prompts of every kind, then document prefixes.

    Only the default is chosen by its answer; the others are simply the first held-out ones drawn.
    """
    tasks = held_out_tasks(TASKS_PER_KIND + 10)
    default = _default_task(tasks)
    others = [task for task in islice(tasks, TASKS_PER_KIND * len(KINDS)) if task is not default]
    entries = [_chat_entry("default", default)]
    counts: dict[str, int] = {}
    for task in others:
        counts[task.kind] = counts.get(task.kind, 0) + 1
        entries.append(_chat_entry(f"{task.kind.replace('_', '-')}-{counts[task.kind]}", task))
    for index, prompt in enumerate(hard_prompts(HARD_PER_DOMAIN)):
        entries.append(
            {
                "id": f"hard-{prompt.domain}-{index // 2 + 1}",
                "domain": prompt.domain,
                "kind": prompt.name,
                "prompt": prompt.text,
                "answer": None,
            }
        )
    text = json.dumps(entries, indent=2, ensure_ascii=False) + "\n"
    (PAIR / "prompts.json").write_text(text, encoding="utf-8")


def greedy_answers(tasks: list[Task], max_new_tokens: int = 160) -> list[list[int]]:
    """Token ids of the shipped target's greedy answers, in the order of `tasks`."""
    target, tokenizer = load_target(PAIR / "target"), load_tokenizer()
    encoded = tokenizer([chat_text(task.prompt, "")[0] for task in tasks]).input_ids
    by_length: dict[int, list[int]] = {}
    for index, ids in enumerate(encoded):
        by_length.setdefault(len(ids), []).append(index)
    answers: dict[int, list[int]] = {}
    for indices in by_length.values():
        prompts = torch.tensor([encoded[index] for index in indices])
        rows = continuations(target, prompts, max_new_tokens, torch.zeros(len(prompts)), torch.Generator())
        answers |= dict(zip(indices, rows, strict=True))
    return [answers[index] for index in range(len(tasks))]


def _default_task(tasks: list[Task]) -> Task:
    """The first worked task whose greedy answer is right and of a readable length."""
    tokenizer = load_tokenizer()
    shortest, longest = DEFAULT_ANSWER_TOKENS
    worked = [task for kind in DEFAULT_KINDS for task in tasks if task.kind == kind]
    for task, ids in zip(worked, greedy_answers(worked), strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if shortest <= len(ids) <= longest and KINDS[task.kind].check(task, text):
            return task
    raise RuntimeError("no held-out task of the default kinds is answered rightly; train longer")


def _chat_entry(name: str, task: Task) -> dict:
    assert MASK not in task.prompt
    return {"id": name, "domain": "chat", "kind": task.kind, "prompt": task.prompt, "answer": task.answer}


if __name__ == "__main__":
    export()
