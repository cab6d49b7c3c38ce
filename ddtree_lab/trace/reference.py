"""Runs saved by the published DDTree code (`liranringel/ddtree`), where they kept their trees.

Such a run has `output_ids`, `num_input_tokens` and `round_trees`: for each round `accepted_indices` (the root first)
and a `tree` of `node_token_ids` and `node_depths` without the root and `parents` with it. The benchmark saves lists of
runs with `torch.save`, so such a file is opened with torch's weights-only reader, which runs nothing of it; the same
entries as JSON are read without torch. What a run does not say (the target's choice off the path, every probability)
stays unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ddtree_lab.trace import checks

KEY = "round_trees"
WHERE = "where in the file"
ZIP_MAGIC = b"PK\x03\x04"
NESTING = 6  # {"responses": [{"ddtree_tb64": run}]}


def is_torch_file(path: str | Path) -> bool:
    """Whether a file was written by `torch.save`."""
    with Path(path).open("rb") as file:
        return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC


def read(path: str | Path) -> Any:
    """What `torch.save` wrote, namespaces and tensors as plain data.

    Raises:
        ValueError: it holds anything but numbers, texts, containers, tensors and namespaces.
    """
    import pickle

    import torch

    try:
        with torch.serialization.safe_globals([SimpleNamespace]):
            return _plain(torch.load(path, map_location="cpu", weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, EOFError) as fault:
        reason = str(fault).splitlines()[0]
        raise ValueError(f"torch's weights-only reader does not open it: {reason}") from fault


def _plain(value: Any, nesting: int = 12) -> Any:
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if nesting == 0:
        raise ValueError("it is nested too deeply for a saved run.")
    if isinstance(value, dict):
        return {str(key): _plain(part, nesting - 1) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part, nesting - 1) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def find_runs(data: Any) -> list[dict[str, Any]]:
    """The runs with trees in them, in order of the prompts, of each prompt the largest budget first.

    Each has an entry more, `WHERE`: its place in the file, such as `"responses 3 ddtree_tb64"`.
    """
    return list(_runs(data, NESTING, ()))


def _runs(data: Any, nesting: int, where: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    if not isinstance(data, (dict, list)) or nesting == 0:
        return
    if isinstance(data, dict) and isinstance(data.get(KEY), list):
        yield {**data, WHERE: " ".join(where)}
        return
    # Methods come in the order of their budgets, the largest last.
    parts = list(enumerate(data)) if isinstance(data, list) else list(data.items())[::-1]
    for name, part in parts:
        yield from _runs(part, nesting - 1, (*where, str(name)))


def converted(runs: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A run as the data of a trace; its settings say which of how many it is, and where in the file.

    Args:
        runs: from `find_runs`.

    Raises:
        ValueError: the trees do not fit the text; the published code deletes tokens that equal its mask token.
    """
    run = runs[index]
    place = f", {run[WHERE]}" if run[WHERE] else ""
    output = checks.entry(run, "output_ids")
    ids = output[0] if isinstance(output, list) and output and isinstance(output[0], list) else output
    token_ids = checks.integers({"output_ids": ids}, "output_ids").tolist()
    start = checks.integer(run, "num_input_tokens")
    if not 0 < start < len(token_ids):
        raise ValueError(
            f"num_input_tokens is {start} of {len(token_ids)} output_ids; there is no new token."
        )
    rounds, budget, end = [], 0, start
    for number, entry in enumerate(run[KEY]):
        if end + 1 >= len(token_ids):
            break  # rounds after the end of the text: the published code runs one for nothing
        try:
            rounds.append(_round(entry, token_ids, end))
        except ValueError as fault:
            raise ValueError(f"{KEY} {number}: {fault}") from fault
        budget = max(budget, len(rounds[-1]["token_ids"]) - 1)
        end += len(rounds[-1]["path"])
    return {
        "format": "ddtree-lab-trace",
        "version": 2,
        "pair": "a run of the published code",
        "settings": {
            "method": "ddtree",
            "tree_budget": budget,
            "source": f"liranringel/ddtree, run {index + 1} of {len(runs)}{place}",
        },
        "prompt_token_ids": token_ids[:start],
        "first_token_id": token_ids[start],
        "rounds": rounds,
    }


def _round(entry: Any, token_ids: list[int], position: int) -> dict[str, Any]:
    """A round whose root is the token at `position` of the text."""
    tree = checks.entry(entry, "tree")
    drafted = checks.integers(tree, "node_token_ids").tolist()
    parents = checks.integers(tree, "parents", len(drafted) + 1, least=-1).tolist()
    accepted = checks.integers(entry, "accepted_indices").tolist()
    nodes = [token_ids[position], *drafted]
    if not accepted or max(accepted) >= len(nodes):
        raise ValueError("accepted_indices are no nodes of the tree.")
    emitted = token_ids[position + 1 : position + 1 + len(accepted)]
    path = accepted[: len(emitted)]  # the text may end inside the path
    if [nodes[node] for node in accepted[1 : len(emitted) + 1]] != emitted[: len(accepted) - 1]:
        raise ValueError(
            "its accepted tokens are not those of output_ids; the published code deletes tokens that equal its mask "
            "token, and then rounds cannot be told apart."
        )
    choices = dict(zip(path, emitted, strict=True))
    unknown = [None] * len(nodes)
    return {
        "past_length": position,
        "token_ids": nodes,
        "parents": parents,
        "ranks": [-1] * len(nodes),
        "log_probs": unknown,
        "target_token_ids": [choices.get(node, -1) for node in range(len(nodes))],
        "target_log_probs": unknown,
        "path": path,
        "emitted_token_ids": emitted,
    }
