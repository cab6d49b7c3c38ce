"""Word problems with the working written out: two steps, numbers small enough for a small model."""

import random

from .base import Task, equations_hold, integers_in, last_sentence
from .words import FRIENDS, NAMES, THINGS


def make(rng: random.Random) -> Task:
    story = rng.choice([_gain_and_give, _boxes, _shopping, _sharing])
    return story(rng, rng.choice(NAMES), rng.choice(FRIENDS), rng.choice(THINGS))


def check(task: Task, text: str) -> bool:
    """The last number of the closing sentence is the result, and no equation on the way is false."""
    closing = integers_in(last_sentence(text))
    return bool(closing) and closing[-1] == task.solution["result"] and equations_hold(text)


def _task(story: str, numbers: tuple, prompt: str, answer: str, result: int) -> Task:
    key = f"{story}:{','.join(map(str, numbers))}"
    return Task("arithmetic", key, prompt, answer, {"result": result})


def _gain_and_give(rng, name, friend, things) -> Task:
    start, gained = rng.randint(2, 12), rng.randint(2, 12)
    total = start + gained
    given = rng.randint(2, min(12, total - 1))
    left = total - given
    prompt, answer = rng.choice(
        [
            (
                f"{name} has {start} {things} and gets {gained} more. Then {name} gives {given} of them"
                f" to {friend}. How many {things} are left?",
                f"Let's take it step by step.\n\n{name} starts with {start} {things} and gets {gained} more:"
                f" {start} + {gained} = {total}.\nThen {given} of them go to {friend}:"
                f" {total} - {given} = {left}.\n\nSo the number of {things} left is {left}.",
            ),
            (
                f"There are {start} {things} on the table. {name} adds {gained}, and {friend} takes away"
                f" {given}. How many are there now?",
                f"First {name} adds {gained} {things}, so there are {start} + {gained} = {total}."
                f" After that {friend} takes {given} away, which makes {total} - {given} = {left}."
                f"\n\nThe number of {things} on the table is now {left}.",
            ),
        ]
    )
    return _task("gain_and_give", (start, gained, given), prompt, answer, left)


def _boxes(rng, name, friend, things) -> Task:
    boxes, each, more = rng.randint(2, 5), rng.randint(2, 9), rng.randint(2, 9)
    packed = boxes * each
    total = packed + more
    prompt, answer = rng.choice(
        [
            (
                f"{name} fills {boxes} boxes with {each} {things} each and keeps {more} {things} in a bag."
                f" How many {things} is that in total?",
                f"We can split this into two parts.\n\nIn the boxes: {boxes} × {each} = {packed} {things}."
                f"\nWith the bag: {packed} + {more} = {total} {things}.\n\nIn total that is {total}.",
            ),
            (
                f"{name} has {boxes} shelves. On each shelf there are {each} {things}. {friend} brings"
                f" {more} more. How many {things} does {name} have then?",
                f"The shelves hold {boxes} × {each} = {packed} {things}. {friend} brings {more} more, so"
                f" we add them: {packed} + {more} = {total}.\n\n{name} then has {total} {things}.",
            ),
        ]
    )
    return _task("boxes", (boxes, each, more), prompt, answer, total)


def _shopping(rng, name, friend, things) -> Task:
    count, price = rng.randint(2, 5), rng.randint(2, 9)
    cost = count * price
    paid = rng.choice([note for note in (20, 50, 100) if note > cost])
    change = paid - cost
    prompt, answer = rng.choice(
        [
            (
                f"{name} buys {count} {things} for {price} coins each and pays with {paid} coins."
                f" How much change does {name} get?",
                f"Let's take it step by step.\n\nThe {things} cost {count} × {price} = {cost} coins."
                f"\nThe change is {paid} - {cost} = {change} coins.\n\n{name} gets back {change} coins.",
            ),
            (
                f"One of the {things} costs {price} coins. {name} has {paid} coins and buys {count}."
                f" How many coins remain?",
                f"{count} {things} at {price} coins each come to {count} × {price} = {cost} coins."
                f" {name} had {paid} coins, and {paid} - {cost} = {change}."
                f"\n\nThe number of coins that remain is {change}.",
            ),
        ]
    )
    return _task("shopping", (count, price, paid), prompt, answer, change)


def _sharing(rng, name, friend, things) -> Task:
    people, each, found = rng.randint(2, 5), rng.randint(2, 9), rng.randint(2, 9)
    total = people * each
    result = each + found
    prompt, answer = rng.choice(
        [
            (
                f"{people} friends share {total} {things} equally. Afterwards {name}, one of them, finds"
                f" {found} more. How many {things} does {name} have?",
                f"Sharing equally means dividing: {total} ÷ {people} = {each} {things} for everyone."
                f" {name} finds {found} more, so {each} + {found} = {result}."
                f"\n\n{name} has {result} {things}.",
            ),
            (
                f"{name} and {friend} are part of a team of {people}. The team splits {total} {things}"
                f" evenly, and later {friend} gets {found} more. How many does {friend} end up with?",
                f"Let's take it step by step.\n\nEach share is {total} ÷ {people} = {each} {things}."
                f"\n{friend} gets {found} more: {each} + {found} = {result}."
                f"\n\n{friend} ends up with {result} {things}.",
            ),
        ]
    )
    return _task("sharing", (people, each, found), prompt, answer, result)
