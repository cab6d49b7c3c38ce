"""Sentences rewritten: past tense, future, question, negation, and with somebody else as the subject."""

import random

from .base import Task
from .words import FRIENDS, JOBS, NAMES

# base form, third person, past
VERBS = (
    ("borrow", "borrows", "borrowed"), ("bring", "brings", "brought"), ("buy", "buys", "bought"),
    ("carry", "carries", "carried"), ("clean", "cleans", "cleaned"), ("draw", "draws", "drew"),
    ("find", "finds", "found"), ("forget", "forgets", "forgot"), ("hide", "hides", "hid"),
    ("keep", "keeps", "kept"), ("leave", "leaves", "left"), ("lose", "loses", "lost"),
    ("need", "needs", "needed"), ("paint", "paints", "painted"), ("repair", "repairs", "repaired"),
    ("sell", "sells", "sold"), ("show", "shows", "showed"), ("take", "takes", "took"),
)  # fmt: skip
OBJECTS = (
    "a wooden chair", "the old clock", "a green bottle", "two lamps", "a small box", "the blue door",
    "a large basket", "the garden tools", "three baskets", "the broken vase", "a red bicycle", "the map",
)  # fmt: skip
PLACES = (
    "in the kitchen", "at the market", "near the station", "in the garden", "at school", "behind the house",
    "on the balcony", "in the workshop",
)  # fmt: skip
OPERATIONS = ("past", "future", "question", "negative", "subject")


def make(rng: random.Random) -> Task:
    verb = rng.choice(VERBS)
    base, present, past = verb
    subject = rng.choice([rng.choice(NAMES), "The " + rng.choice(JOBS)])
    inside = subject[0].lower() + subject[1:] if subject.startswith("The ") else subject
    other = rng.choice(FRIENDS)
    rest = f"{rng.choice(OBJECTS)} {rng.choice(PLACES)}"
    operation = rng.choice(OPERATIONS)
    sentence = f"{subject} {present} {rest}."
    wish, result, reason = {
        "past": (
            "into the past tense",
            f"{subject} {past} {rest}.",
            f'The verb "{present}" became "{past}".',
        ),
        "future": (
            "into the future tense",
            f"{subject} will {base} {rest}.",
            f'The verb "{present}" became "will {base}".',
        ),
        "question": (
            "into a question",
            f"Does {inside} {base} {rest}?",
            f'A question starts with "does", and "{present}" becomes "{base}".',
        ),
        "negative": (
            'into its opposite with "not"',
            f"{subject} does not {base} {rest}.",
            f'To negate it, "{present}" becomes "does not {base}".',
        ),
        "subject": (
            f"so that {other} does it",
            f"{other} {present} {rest}.",
            f"Only the subject changed: it is {other} now.",
        ),
    }[operation]
    verb_of_wish = "Rewrite this" if operation == "subject" else "Turn this sentence"
    prompt, opening = rng.choice(
        [
            (f"{verb_of_wish} {wish}: {sentence}", "Here is the new sentence:"),
            (f'"{sentence}" Please rewrite this {wish}.', "Of course. The sentence becomes:"),
        ]
    )
    key = f"{operation}:{subject}:{base}:{rest}:{other if operation == 'subject' else ''}"
    answer = f'{opening}\n\n"{result}"\n\n{reason}'
    return Task("rewriting", key, prompt, answer, {"sentence": f'"{result}"'})


def check(task: Task, text: str) -> bool:
    """The quoted sentence is the right one."""
    return f"\n{task.solution['sentence']}\n" in text
