"""Number sequences to be continued by three terms, the rule said first."""

import random

from .base import Task, equations_hold, integers_in, last_sentence, sentence_list


def make(rng: random.Random) -> Task:
    rule = rng.choices(["up", "down", "double"], weights=[5, 4, 1])[0]
    step = 2 if rule == "double" else rng.randint(2, 6)
    if rule == "up":
        first = rng.randint(1, 30)
        terms = [first + index * step for index in range(7)]
        why = f"Each number is {step} more than the one before it."
        sign, amount = "+", step
    elif rule == "down":
        last = rng.randint(1, 30)
        terms = [last + index * step for index in reversed(range(7))]
        why = f"Each number is {step} less than the one before it."
        sign, amount = "-", step
    else:
        first = rng.randint(1, 6)
        terms = [first * 2**index for index in range(7)]
        why = "Each number is twice the one before it."
        sign, amount = "×", 2
    shown, hidden = terms[:4], terms[4:]
    shown_text = ", ".join(map(str, shown))
    prompt, opening = rng.choice(
        [
            (f"What comes next: {shown_text}?", "Let's look at the steps."),
            (f"Continue the sequence {shown_text} with three more numbers.", "Happy to."),
            (f"Which three numbers follow {shown_text}?", "There is a simple rule here."),
        ]
    )
    steps = [f"{before} {sign} {amount} = {after}" for before, after in zip(terms[3:6], hidden, strict=True)]
    answer = (
        f"{opening} {why} So we go on like this: {steps[0]}, then {steps[1]}, then {steps[2]}."
        f"\n\nThe next three numbers are {sentence_list(hidden)}."
    )
    return Task("sequences", f"{rule}:{step}:{terms[0]}", prompt, answer, {"terms": hidden})


def check(task: Task, text: str) -> bool:
    """The closing sentence names exactly the three right terms."""
    return integers_in(last_sentence(text)) == task.solution["terms"] and equations_hold(text)
