"""Days and months counted forwards and backwards, clock times: every step is counted aloud."""

import random

from .base import Task, last_sentence, plural, sentence_list
from .words import MONTHS, NAMES, WEEKDAYS


def make(rng: random.Random) -> Task:
    return rng.choice([_weekday, _month, _clock])(rng)


def check(task: Task, text: str) -> bool:
    """The closing sentence names the right day, month or time (and it is the last one it names)."""
    closing = last_sentence(text)
    return closing.rstrip(".!").endswith(task.solution["result"])


def _weekday(rng: random.Random) -> Task:
    start, days, forwards = rng.randrange(7), rng.randint(2, 20), rng.random() < 0.6
    weeks, rest = divmod(days, 7)
    step = 1 if forwards else -1
    counted = [WEEKDAYS[(start + step * index) % 7] for index in range(1, rest + 1)]
    result = WEEKDAYS[(start + step * days) % 7]
    day = WEEKDAYS[start]
    if forwards:
        prompt = rng.choice(
            [
                f"Today is {day}. Which day will it be in {days} days?",
                f"A parcel was sent on a {day} and arrives {days} days later. On which day does it arrive?",
            ]
        )
        verb, direction = "lands on", "forwards"
    else:
        prompt = f"Today is {day}. Which day was it {days} days ago?"
        verb, direction = "lands on", "backwards"
    if weeks and rest:
        opening = (
            f"{days} days are {plural(weeks, 'full week')} and {plural(rest, 'day')}."
            f" Full weeks bring us back to {day}, so only {rest} counts."
        )
    elif weeks:
        opening = f"{days} days are exactly {plural(weeks, 'full week')}, and full weeks change nothing."
    else:
        opening = f"{days} days are less than a week, so we simply count."
    counting = f" Counting {direction} from {day}: {', '.join(counted)}." if counted else ""
    answer = f"{opening}{counting}\n\nThat {verb} {result}."
    return Task("calendar", f"weekday:{start}:{step * days}", prompt, answer, {"result": result})


def _month(rng: random.Random) -> Task:
    start, count, forwards = rng.randrange(12), rng.randint(2, 9), rng.random() < 0.6
    step = 1 if forwards else -1
    counted = [MONTHS[(start + step * index) % 12] for index in range(1, count + 1)]
    word = "after" if forwards else "before"
    prompt = rng.choice(
        [
            f"Which month comes {count} months {word} {MONTHS[start]}?",
            f"What is the month {count} months {word} {MONTHS[start]}? Please count them.",
        ]
    )
    answer = (
        f"Let's count {count} months {'forwards' if forwards else 'backwards'} from {MONTHS[start]}:"
        f" {sentence_list(counted)}.\n\nThe month we are looking for is {counted[-1]}."
    )
    return Task("calendar", f"month:{start}:{step * count}", prompt, answer, {"result": counted[-1]})


def _clock(rng: random.Random) -> Task:
    hour, minute = rng.randint(6, 18), rng.choice([0, 15, 30, 45])
    hours, minutes = rng.randint(1, 3), rng.choice([15, 30])
    event = rng.choice(["film", "concert", "lesson", "train ride", "meeting", "hike"])
    name = rng.choice(NAMES)
    between = (hour + hours) * 60 + minute
    end = between + minutes
    prompt = rng.choice(
        [
            f"A {event} starts at {_time(hour * 60 + minute)} and takes {plural(hours, 'hour')} and"
            f" {minutes} minutes. When does it end?",
            f"{name} has a {event} at {_time(hour * 60 + minute)}. It lasts {plural(hours, 'hour')} and"
            f" {minutes} minutes. When is it over?",
        ]
    )
    answer = (
        f"The {event} starts at {_time(hour * 60 + minute)}. Adding {plural(hours, 'hour')} gives"
        f" {_time(between)}, and adding {minutes} minutes to that gives {_time(end)}."
        f"\n\nThe {event} ends at {_time(end)}."
    )
    key = f"clock:{hour}:{minute}:{hours}:{minutes}"
    return Task("calendar", key, prompt, answer, {"result": _time(end)})


def _time(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02d}"
