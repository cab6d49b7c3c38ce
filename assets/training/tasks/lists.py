"""Lists of numbers and of words: sorting, reversing, filtering, counting, largest and smallest."""

import random

from .base import Task, integers_in, sentence_list
from .words import ANIMALS, COLOURS, FRUITS, TOOLS

POOLS = {"fruits": FRUITS, "animals": ANIMALS, "tools": TOOLS, "colours": COLOURS}


def make_numbers(rng: random.Random) -> Task:
    """A list of 3 or 4 distinct numbers up to 20 and one of six wishes."""
    numbers = rng.sample(range(1, 21), rng.randint(3, 4))
    shown = ", ".join(map(str, numbers))
    operation = rng.choice(["ascending", "descending", "reversed", "even", "odd", "larger"])
    limit = rng.randint(5, 15)
    prompt, lead, result, tail = {
        "ascending": lambda: _sorted_numbers(rng, numbers, shown, descending=False),
        "descending": lambda: _sorted_numbers(rng, numbers, shown, descending=True),
        "reversed": lambda: (
            rng.choice([f"Reverse the list {shown}.", f"Write these numbers backwards: {shown}."]),
            "Here is the list in reverse order",
            numbers[::-1],
            f"It now starts with {numbers[-1]} and ends with {numbers[0]}.",
        ),
        "even": lambda: _parity(rng, numbers, shown, remainder=0),
        "odd": lambda: _parity(rng, numbers, shown, remainder=1),
        "larger": lambda: _larger(rng, numbers, shown, limit),
    }[operation]()
    answer = f"{lead}: {', '.join(map(str, result))}.\n\n{tail}" if result else tail
    key = f"{operation}:{limit if operation == 'larger' else ''}:{shown}"
    return Task("number_lists", key, prompt, answer, {"result": result, "tail": tail})


def check_numbers(task: Task, text: str) -> bool:
    """The first line holds the right numbers in the right order, and the closing sentence is right."""
    head, _, tail = text.strip().rpartition("\n\n")
    if integers_in(head.partition(":")[2]) != task.solution["result"]:
        return False
    return tail.strip() == task.solution["tail"]


def make_words(rng: random.Random) -> Task:
    """A list of 3 to 5 words from one pool and one of five wishes."""
    pool_name = rng.choice(list(POOLS))
    words = rng.sample(POOLS[pool_name], rng.randint(3, 5))
    shown = ", ".join(words)
    operation = rng.choice(["alphabetical", "reversed", "numbered", "without", "ends"])
    left_out = rng.choice(words)
    if operation == "alphabetical":
        prompt = rng.choice(
            [
                f"Sort these {pool_name} alphabetically: {shown}.",
                f"Please put the {pool_name} {shown} in alphabetical order.",
            ]
        )
        lead, result = "In alphabetical order they are", sorted(words)
    elif operation == "reversed":
        prompt = f"Reverse the order of these {pool_name}: {shown}."
        lead, result = "From the last one to the first", words[::-1]
    elif operation == "numbered":
        prompt = f"Make a numbered list of these {pool_name}: {shown}."
        lead, result = f"Here are your {len(words)} {pool_name}", words
    elif operation == "without":
        prompt = f"Take {left_out} out of this list of {pool_name}: {shown}."
        lead, result = f"Without {left_out} the list is", [word for word in words if word != left_out]
    else:
        prompt = f"Which of these {pool_name} come first and last in the list: {shown}?"
        lead, result = "The first one and the last one are", [words[0], words[-1]]
    lines = "\n".join(f"{index}. {word}" for index, word in enumerate(result, 1))
    answer = f"{lead}:\n\n{lines}"
    key = f"{operation}:{left_out if operation == 'without' else ''}:{shown}"
    return Task("word_lists", key, prompt, answer, {"lines": lines})


def check_words(task: Task, text: str) -> bool:
    """The numbered lines are exactly the right ones."""
    return text.strip().partition("\n\n")[2].strip() == task.solution["lines"]


def _sorted_numbers(rng, numbers, shown, descending):
    way = "from largest to smallest" if descending else "from smallest to largest"
    prompt = rng.choice([f"Sort these numbers {way}: {shown}.", f"Put {shown} in order, {way}."])
    tail = f"The smallest number is {min(numbers)} and the largest is {max(numbers)}."
    return prompt, f"Sorted {way}, the numbers are", sorted(numbers, reverse=descending), tail


def _parity(rng, numbers, shown, remainder):
    word = "odd" if remainder else "even"
    result = [number for number in numbers if number % 2 == remainder]
    prompt = rng.choice(
        [
            f"Which of these numbers are {word}: {shown}?",
            f"Keep only the {word} numbers of {shown}.",
        ]
    )
    if not result:
        return prompt, "", result, f"None of these numbers is {word}."
    rest = "leaves a rest of one" if remainder else "leaves no rest"
    tail = f"An {word} number {rest} when it is divided by two."
    return prompt, f"The {word} numbers are", result, tail


def _larger(rng, numbers, shown, limit):
    result = [number for number in numbers if number > limit]
    prompt = rng.choice(
        [
            f"Which of these numbers are larger than {limit}: {shown}?",
            f"Filter the list {shown} and keep what is larger than {limit}.",
        ]
    )
    if not result:
        return prompt, "", result, f"None of these numbers is larger than {limit}."
    if len(result) == len(numbers):
        return prompt, f"Larger than {limit} are", result, "That is all of them."
    dropped = [number for number in numbers if number <= limit]
    tail = f"The rest, {sentence_list(dropped)}, had to go."
    return prompt, f"Larger than {limit} are", result, tail
