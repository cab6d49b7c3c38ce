"""Short messages to a friend: an invitation, a thank-you, an apology, a reminder."""

import random

from .base import Task
from .words import FRIENDS, NAMES, WEEKDAYS

EVENTS = (
    "a picnic", "a game night", "a concert", "a birthday party", "a walk by the lake", "a cooking evening",
    "a film night", "a bike ride", "a chess match", "a garden party",
)  # fmt: skip
GIFTS = (
    "the flowers",
    "the book",
    "the warm scarf",
    "the cake",
    "the concert ticket",
    "the old photos",
    "the tea",
)
MISHAPS = ("being late", "missing the call", "losing the key", "breaking the cup", "forgetting the date")
CHORES = (
    "return the book",
    "water the plants",
    "bring the keys",
    "call the doctor",
    "pay the rent",
    "feed the cat",
)
HOURS = ("three", "four", "five", "six", "seven", "eight")


def make(rng: random.Random) -> Task:
    sender, friend, day = rng.choice(NAMES), rng.choice(FRIENDS), rng.choice(WEEKDAYS)
    purpose = rng.choice(["invite", "thank", "apologise", "remind"])
    if purpose == "invite":
        event, hour = rng.choice(EVENTS), rng.choice(HOURS)
        detail = f"{event}:{hour}"
        wish = f"invites {friend} to {event} on {day} at {hour}"
        body = (
            f"would you like to come to {event} on {day}? We start at {hour} o'clock, and there will"
            " be plenty to eat. You do not have to bring anything, just come as you are."
        )
        must = [event, day, hour]
    elif purpose == "thank":
        detail = gift = rng.choice(GIFTS)
        wish = f"thanks {friend} for {gift} from {day}"
        body = (
            f"thank you so much for {gift}! I was very happy when it arrived on {day}. Every time I"
            f" think of {gift}, I think of you, and it makes me smile."
        )
        must = [gift, day]
    elif purpose == "apologise":
        detail = mishap = rng.choice(MISHAPS)
        wish = f"apologises to {friend} for {mishap} on {day}"
        body = (
            f"I am really sorry for {mishap} on {day}. It was my fault, and I should have told you"
            " right away. Please let me make it up to you with a cup of coffee."
        )
        must = [mishap, day]
    else:
        detail = chore = rng.choice(CHORES)
        wish = f"reminds {friend} to {chore} on {day}"
        body = (
            f"this is just a small reminder: please do not forget to {chore} on {day}. If you cannot"
            " make it, tell me in time and we will find another way."
        )
        must = [chore, day]
    prompt, closing = rng.choice(
        [
            (f"Write a short message from {sender} that {wish}.", "Best wishes,"),
            (f"Help {sender} with a friendly note that {wish}.", "See you soon,"),
        ]
    )
    answer = f"Dear {friend},\n\n{body}\n\n{closing}\n{sender}"
    key = f"{purpose}:{sender}:{friend}:{day}:{detail}"
    opening_and_end = [f"Dear {friend},", f"\n{sender}"]
    return Task("messages", key, prompt, answer, {"must_name": must + opening_and_end})


def check(task: Task, text: str) -> bool:
    """Addressee, sender and every detail asked for occur, and the sender's name closes it."""
    must = task.solution["must_name"]
    return all(word in text for word in must) and text.rstrip().endswith(must[-1])
