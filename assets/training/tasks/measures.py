"""Unit conversion: one table of factors, answers with the multiplication written out."""

import random

from .base import Task, equations_hold, integers_in, last_sentence

# (large unit, small unit, how many small ones make a large one, largest count asked for)
FACTORS = (
    ("hours", "minutes", 60, 9),
    ("minutes", "seconds", 60, 9),
    ("days", "hours", 24, 7),
    ("weeks", "days", 7, 12),
    ("years", "months", 12, 9),
    ("metres", "centimetres", 100, 12),
    ("kilometres", "metres", 1000, 12),
    ("kilograms", "grams", 1000, 12),
    ("litres", "millilitres", 1000, 12),
    ("feet", "inches", 12, 9),
    ("dozens", "pieces", 12, 9),
    ("euros", "cents", 100, 12),
)


def make(rng: random.Random) -> Task:
    large, small, factor, limit = rng.choice(FACTORS)
    count = rng.randint(2, limit)
    rest = rng.randint(2, min(factor - 1, 30)) if rng.random() < 0.7 else 0
    key = f"{large}:{count}:{rest}"
    amount = f"{count} {large} and {rest} {small}" if rest else f"{count} {large}"
    opening, prompt = rng.choice(
        [
            ("Sure.", f"Convert {amount} into {small}."),
            (f"Let's turn everything into {small}.", f"How many {small} are {amount}?"),
            ("Good question!", f"I have {amount}. What is that in {small}?"),
        ]
    )
    whole = count * factor
    result = whole + rest
    steps = (
        f"{opening} One of the {large} is the same as {factor} {small}, so we multiply:"
        f" {count} × {factor} = {whole}."
    )
    if rest:
        steps += f" Then we add the other {rest} {small}: {whole} + {rest} = {result}."
    answer = f"{steps}\n\n{amount} are {result} {small}."
    return Task("units", key, prompt, answer, {"result": result})


def check(task: Task, text: str) -> bool:
    """The closing sentence ends with the right number, and no equation on the way is false."""
    closing = integers_in(last_sentence(text))
    return bool(closing) and closing[-1] == task.solution["result"] and equations_hold(text)
