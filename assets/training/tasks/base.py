"""What every kind of chat task has in common: the record, the split, small helpers for wording."""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

HELD_OUT_SHARE = 1 / 16


@dataclass(frozen=True)
class Task:
    """One question with a reference answer.

    `key` names *what* is asked (numbers, words, attributes) and not how it is worded, so that a
    held-out task cannot leak into training through a paraphrase.
    """

    kind: str
    key: str
    prompt: str
    answer: str
    solution: dict = field(default_factory=dict)

    @property
    def key_hash(self) -> int:
        """64 bits of a stable hash (`hash()` is salted a process, so it cannot be used)."""
        digest = hashlib.blake2b(f"{self.kind}|{self.key}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big")

    @property
    def is_held_out(self) -> bool:
        return self.key_hash < HELD_OUT_SHARE * 2**64


@dataclass(frozen=True)
class Kind:
    """A family of tasks: `make` draws one, `check` says whether an answer to it is right."""

    make: Callable[[random.Random], Task]
    check: Callable[[Task, str], bool]
    weight: float = 1.0


def sentence_list(items: Sequence[str]) -> str:
    """`["a", "b", "c"]` → `"a, b and c"`."""
    items = [str(item) for item in items]
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def plural(count: int, singular: str, plural_form: str | None = None) -> str:
    """`(1, "day")` → `"1 day"`, `(2, "day")` → `"2 days"`."""
    return f"{count} {singular if count == 1 else plural_form or singular + 's'}"


def with_article(noun: str) -> str:
    """`"owl"` → `"an owl"`."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun


def capitalised(text: str) -> str:
    """First letter upper case, the rest untouched (`str.capitalize` would lower names)."""
    return text[0].upper() + text[1:]


def integers_in(text: str) -> list[int]:
    """All integers of a text, in order."""
    return [int(number) for number in re.findall(r"-?\d+", text)]


def last_sentence(text: str) -> str:
    """What stands after the last full stop but one."""
    return re.split(r"(?<=[.!?])\s+", text.strip())[-1]


def equations_hold(text: str) -> bool:
    """Whether every `a + b = c` (also -, ×, ÷) written in the text is true."""
    operations = {
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "×": lambda a, b: a * b,
        "÷": lambda a, b: a / b if b else None,
    }
    pattern = r"(\d+) ([+\-×÷]) (\d+) = (-?\d+)"
    found = re.findall(pattern, text)
    return all(operations[sign](int(a), int(b)) == int(c) for a, sign, b, c in found)
