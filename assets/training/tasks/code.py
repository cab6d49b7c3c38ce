"""Small Python functions from a closed grammar (filter × transform × outcome), judged by running them."""

import ast
import random
import re

from .base import Task

SAFE_BUILTINS = {"len": len, "sum": sum, "max": max, "min": min, "range": range, "list": list}
ALLOWED_ATTRIBUTES = {"append", "upper", "startswith", "endswith", "join"}
NUMBER_PROBES = ([], [4], [3, -2, 8, 15, 0, 7, -9, 12, 30, 6], [21, 5, 18, -4, 9, 10, 2, 14, 25, 35])
WORD_PROBES = (
    [],
    ["tea"],
    ["apple", "bee", "castle", "sun", "moonlight", "be", "astra", "cocoa", "stone", "mist"],
)


def make(rng: random.Random) -> Task:
    return _over_numbers(rng) if rng.random() < 0.7 else _over_words(rng)


def check(task: Task, text: str) -> bool:
    """Run the function of the answer and the reference's on the same lists; all results must agree."""
    found, wanted = _load(text), _load(task.answer)
    if found is None:
        return False
    probes = WORD_PROBES if task.solution["domain"] == "words" else NUMBER_PROBES
    try:
        return all(found(list(probe)) == wanted(list(probe)) for probe in probes)
    except Exception:  # the answer is a model's text: whatever it raises, it is wrong
        return False


def _load(text: str):
    """The function in the first fenced block, or None.

    The text comes from a model, so only a small subset of Python is let through: no import, no
    `while` (nothing can hang), no attribute outside a short list, hardly any builtin.
    """
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    try:
        tree = ast.parse(block.group(1)) if block else None
    except SyntaxError:
        return None
    if tree is None or len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom | ast.While | ast.Pow | ast.LShift):
            return None
        if isinstance(node, ast.Attribute) and node.attr not in ALLOWED_ATTRIBUTES:
            return None
    namespace = {"__builtins__": SAFE_BUILTINS}
    exec(compile(tree, "<answer>", "exec"), namespace)
    return namespace[tree.body[0].name]


def _over_numbers(rng: random.Random) -> Task:
    limit, divisor, amount = rng.randint(2, 20), rng.randint(3, 9), rng.randint(2, 9)
    which, condition = rng.choice(
        [
            ("even", "number % 2 == 0"),
            ("odd", "number % 2 == 1"),
            ("positive", "number > 0"),
            ("negative", "number < 0"),
            (f"larger than {limit}", f"number > {limit}"),
            (f"smaller than {limit}", f"number < {limit}"),
            (f"divisible by {divisor}", f"number % {divisor} == 0"),
        ]
    )
    what, value = rng.choice(
        [
            ("numbers", "number"),
            ("doubles", "2 * number"),
            ("squares", "number * number"),
            ("negatives", "-number"),
            (f"values plus {amount}", f"number + {amount}"),
            (f"values minus {amount}", f"number - {amount}"),
            (f"values times {amount}", f"{amount} * number"),
        ]
    )
    of = f"of the numbers that are {which}" if value != "number" else f"that are {which}"
    return _assemble(rng, "numbers", "number", f"the {what} {of}", condition, value)


def _over_words(rng: random.Random) -> Task:
    letter, length = rng.choice("abcmst"), rng.randint(2, 9)
    which, condition = rng.choice(
        [
            (f"start with the letter {letter}", f'word.startswith("{letter}")'),
            (f"end with the letter {letter}", f'word.endswith("{letter}")'),
            (f"contain the letter {letter}", f'"{letter}" in word'),
            (f"are longer than {length} letters", f"len(word) > {length}"),
            (f"are shorter than {length} letters", f"len(word) < {length}"),
        ]
    )
    what, value = rng.choice(
        [
            ("words", "word"),
            ("lengths", "len(word)"),
            ("first letters", "word[0]"),
            ("capital forms", "word.upper()"),
        ]
    )
    of = f"of the words that {which}" if value != "word" else f"that {which}"
    return _assemble(rng, "words", "word", f"the {what} {of}", condition, value)


def _assemble(rng, plural, singular, phrase, condition, value) -> Task:
    """Put a function together in the outcome drawn: a list, a sum or a count."""
    summable = value not in ("word", "word[0]", "word.upper()")
    outcome = rng.choice(["list", "sum", "count"] if summable else ["list", "count"])
    if outcome == "count":
        phrase = re.sub(r"^the .*? (of the \w+ )?that", f"{plural} that", phrase)
        value = singular
    verb = {"list": "collects", "sum": "adds up", "count": "counts the"}[outcome]
    name = {"list": "collect", "sum": "add_up", "count": "count"}[outcome] + f"_{plural}"
    name = rng.choice([name, f"{'pick' if outcome == 'list' else 'total'}_{plural}"])
    start = "[]" if outcome == "list" else "0"
    update = {
        "list": f"result.append({value})",
        "sum": f"result += {value}",
        "count": "result += 1",
    }[outcome]
    prompt = rng.choice(
        [
            f"Write a Python function `{name}` that {verb} {phrase}.",
            f"I need a Python function called `{name}`. It {verb} {phrase} in a list.",
        ]
    )
    closing = {
        "list": f"It goes through the {plural} once and keeps the order.",
        "sum": "The total starts at zero, so an empty list gives 0.",
        "count": "An empty list gives 0.",
    }[outcome]
    answer = (
        f"Here is a function that {verb} {phrase}:\n\n```python\ndef {name}({plural}):\n"
        f"    result = {start}\n    for {singular} in {plural}:\n        if {condition}:\n"
        f"            {update}\n    return result\n```\n\n{closing}"
    )
    key = f"{outcome}:{condition}:{value}"
    return Task("code", key, prompt, answer, {"domain": plural})
