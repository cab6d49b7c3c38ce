"""A record in words turned into JSON, a Markdown table, a bullet list or CSV."""

import json
import random
import re

from .base import Task
from .words import CITIES, COLOURS, FRUITS, JOBS, NAMES

FIELDS = {
    "name": NAMES,
    "age": tuple(range(18, 80)),
    "city": CITIES,
    "job": JOBS,
    "colour": COLOURS,
    "fruit": FRUITS,
}


def make(rng: random.Random) -> Task:
    fields = ["name", *rng.sample(["age", "city", "job", "colour", "fruit"], rng.randint(1, 2))]
    record = {field: rng.choice(FIELDS[field]) for field in fields}
    described = ", ".join(f"{field} {value}" for field, value in record.items())
    target = rng.choice(list(RENDERERS))
    wording = {"json": "JSON", "table": "a Markdown table", "bullets": "a bullet list", "csv": "CSV"}[target]
    prompt, opening = rng.choice(
        [
            (f"Turn this record into {wording}: {described}.", f"Here is the record as {wording}:"),
            (f"Format the following as {wording}: {described}.", f"As {wording} it looks like this:"),
        ]
    )
    closing = f"It has {len(fields)} fields, and the name is {record['name']}."
    answer = f"{opening}\n\n{RENDERERS[target](record)}\n\n{closing}"
    return Task("formatting", f"{target}:{described}", prompt, answer, {"target": target, "record": record})


def check(task: Task, text: str) -> bool:
    """The rendered block is the right one; JSON is compared as data, not as text."""
    target, record = task.solution["target"], task.solution["record"]
    if target != "json":
        return RENDERERS[target](record) in text
    block = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    try:
        return block is not None and json.loads(block.group(1)) == record
    except json.JSONDecodeError:
        return False


def _table(record: dict) -> str:
    rows = [list(record), ["---"] * len(record), [str(value) for value in record.values()]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


RENDERERS = {
    "json": lambda record: f"```json\n{json.dumps(record, indent=2)}\n```",
    "table": _table,
    "bullets": lambda record: "\n".join(f"- **{field}**: {value}" for field, value in record.items()),
    "csv": lambda record: "```\n" + ",".join(record) + "\n" + ",".join(map(str, record.values())) + "\n```",
}
