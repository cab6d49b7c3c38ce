"""The chat half of the training text: twelve kinds of short tasks, each with a checker.

Everything is drawn from a seeded `random.Random`; nothing is read from disk. A task's parameters
(its `key`) decide by a hash on which side of the split it falls, so the held-out side can be drawn
again at any time and never overlaps with training.
"""

import random
from collections.abc import Iterator

from . import (
    arithmetic,
    calendar,
    code,
    facts,
    formatting,
    lists,
    measures,
    messages,
    rewriting,
    sequences,
    stories,
)
from .base import Kind, Task

__all__ = ["KINDS", "Kind", "Task", "draw_task", "draw_tasks"]

# The weights give the kinds that need calculation or exact copying more training text than the others.
KINDS: dict[str, Kind] = {
    "arithmetic": Kind(arithmetic.make, arithmetic.check, weight=2.0),
    "units": Kind(measures.make, measures.check),
    "sequences": Kind(sequences.make, sequences.check, weight=1.5),
    "calendar": Kind(calendar.make, calendar.check, weight=1.2),
    "number_lists": Kind(lists.make_numbers, lists.check_numbers, weight=2.0),
    "word_lists": Kind(lists.make_words, lists.check_words, weight=1.5),
    "code": Kind(code.make, code.check),
    "facts": Kind(facts.make, facts.check, weight=1.2),
    "stories": Kind(stories.make, stories.check, weight=0.6),
    "rewriting": Kind(rewriting.make, rewriting.check, weight=1.2),
    "formatting": Kind(formatting.make, formatting.check, weight=1.3),
    "messages": Kind(messages.make, messages.check, weight=0.5),
}


def draw_task(rng: random.Random, kind: str, held_out: bool) -> Task:
    """One task of a kind from the wanted side of the split (redrawn until it falls there)."""
    while True:
        task = KINDS[kind].make(rng)
        if task.is_held_out == held_out:
            return task


def draw_tasks(seed: int, held_out: bool = False) -> Iterator[Task]:
    """An endless, seeded stream of tasks of all kinds in proportion to their weights."""
    rng = random.Random(seed)
    names = list(KINDS)
    weights = [KINDS[name].weight for name in names]
    while True:
        yield draw_task(rng, rng.choices(names, weights)[0], held_out)
