"""What was recorded of a decode: plain data, saved as versioned JSON, read without torch.

A trace holds each round's tree, the target's choices and the path taken, so every later view, smaller
budgets included (the tree of a smaller budget is a prefix), needs no model.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_lab.records import Record
from ddtree_lab.stages.tree import DraftTree

FORMAT = "ddtree-lab-trace"
VERSION = 1


@dataclass(frozen=True, eq=False)
class Round(Record):
    """One round.

    Args:
        past_length: tokens in the cache before it; the root's position.
        tree: the drafted tree, its root the anchor.
        target_token_ids: the target's choice at each node.
        target_log_probs: the target's log-probability of that choice, temperature 1.
        path: committed nodes, root first.
        emitted_token_ids: accepted drafts, then the bonus token (unless the text ended before it).
        stage_seconds: duration of each stage.
    """

    past_length: int
    tree: DraftTree
    target_token_ids: tuple[int, ...]
    target_log_probs: tuple[float, ...]
    path: tuple[int, ...]
    emitted_token_ids: tuple[int, ...]
    stage_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def num_accepted_drafts(self) -> int:
        """Drafted tokens kept. Where the text ended inside the path, its last token is a draft too."""
        last = self.path[-1]
        ended_early = self.emitted_token_ids[-1] in self.tree.children(last)
        return len(self.path) - 1 + int(ended_early)

    @property
    def num_emitted_tokens(self) -> int:
        return len(self.emitted_token_ids)

    @property
    def seconds(self) -> float:
        return sum(self.stage_seconds.values())

    def __repr__(self) -> str:
        return (
            f"Round({self.tree.num_drafted} drafted, {self.num_accepted_drafts} accepted, "
            f"{self.num_emitted_tokens} emitted)"
        )

    def to_dict(self) -> dict[str, Any]:
        tree = self.tree
        return {
            "past_length": self.past_length,
            "token_ids": tree.token_ids.tolist(),
            "parents": tree.parents.tolist(),
            "ranks": tree.ranks.tolist(),
            "log_probs": [round(value, 6) for value in tree.log_probs.tolist()],
            "target_token_ids": list(self.target_token_ids),
            "target_log_probs": [round(value, 6) for value in self.target_log_probs],
            "path": list(self.path),
            "emitted_token_ids": list(self.emitted_token_ids),
            "stage_seconds": {stage: round(value, 6) for stage, value in self.stage_seconds.items()},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Round:
        tree = DraftTree.from_parents(data["token_ids"], data["parents"], data["ranks"], data["log_probs"])
        n = tree.num_nodes
        for name in ("target_token_ids", "target_log_probs"):
            if len(data[name]) != n:
                raise ValueError(f"{name} has {len(data[name])} entries for {n} nodes")
        if not data["emitted_token_ids"]:
            raise ValueError("emitted_token_ids is empty; a round emits at least one token")
        path = tuple(int(node) for node in data["path"])
        if not path or any(not 0 <= node < n for node in path) or list(path) != tree.path(path[-1]):
            raise ValueError(f"path {list(path)} is no root path of the tree")
        return cls(
            past_length=int(data["past_length"]),
            tree=tree,
            target_token_ids=tuple(int(token) for token in data["target_token_ids"]),
            target_log_probs=tuple(float(value) for value in data["target_log_probs"]),
            path=path,
            emitted_token_ids=tuple(int(token) for token in data["emitted_token_ids"]),
            stage_seconds={str(k): float(v) for k, v in data.get("stage_seconds", {}).items()},
        )


@dataclass(frozen=True, eq=False)
class Trace(Record):
    """A recorded decode.

    Args:
        pair: name of the pair.
        settings: method, tree_budget, temperature, seed and what else was set.
        prompt_token_ids: the prompt as the target saw it.
        first_token_id: the token the prefill gave, the first anchor.
        rounds: in order.
        token_texts: the text of every token that occurs, special ones by name.
        finish_reason: why the text ended, or None if it was stopped or is going on.
    """

    pair: str
    settings: dict[str, Any]
    prompt_token_ids: tuple[int, ...]
    first_token_id: int
    rounds: tuple[Round, ...]
    token_texts: dict[int, str] = field(default_factory=dict)
    finish_reason: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All new tokens."""
        return (self.first_token_id, *(token for r in self.rounds for token in r.emitted_token_ids))

    def text_of(self, token_id: int) -> str:
        return self.token_texts.get(token_id, f"<{token_id}>")

    @property
    def text(self) -> str:
        return "".join(map(self.text_of, self.token_ids))

    def __repr__(self) -> str:
        method = self.settings.get("method", "?")
        return f"Trace({self.pair}, {method}, {len(self.rounds)} rounds, {len(self.token_ids)} new tokens)"

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "pair": self.pair,
            "settings": self.settings,
            "prompt_token_ids": list(self.prompt_token_ids),
            "first_token_id": self.first_token_id,
            "finish_reason": self.finish_reason,
            "rounds": [r.to_dict() for r in self.rounds],
            "token_texts": {str(token): text for token, text in sorted(self.token_texts.items())},
            "environment": self.environment,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Trace:
        """Read a trace's data; everything in it is checked and nothing in it is run.

        Raises:
            ValueError: saying what is wrong and where.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"this is no DDTree Lab trace (its format entry is not {FORMAT!r}).")
        if data.get("version") != VERSION:
            raise ValueError(
                f"trace version is {data.get('version')!r}; this program reads version {VERSION}."
            )
        rounds = []
        try:
            for index, entry in enumerate(data["rounds"]):
                try:
                    rounds.append(Round.from_dict(entry))
                except (KeyError, TypeError, ValueError, IndexError) as fault:
                    raise ValueError(f"round {index}: {type(fault).__name__}: {fault}") from fault
            return cls(
                pair=str(data["pair"]),
                settings=dict(data["settings"]),
                prompt_token_ids=tuple(int(token) for token in data["prompt_token_ids"]),
                first_token_id=int(data["first_token_id"]),
                rounds=tuple(rounds),
                token_texts={int(token): str(text) for token, text in data.get("token_texts", {}).items()},
                finish_reason=data.get("finish_reason"),
                environment=dict(data.get("environment", {})),
            )
        except (KeyError, TypeError, AttributeError) as fault:
            raise ValueError(f"the trace is damaged: {type(fault).__name__}: {fault}") from fault

    def save(self, path: str | Path) -> None:
        """Write JSON; a file of that name is replaced only by a whole one."""
        write_atomically(path, json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a saved trace.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a trace, or a damaged one.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as fault:
            raise ValueError(f"{path} is not JSON: {fault}") from fault
        try:
            return cls.from_dict(data)
        except ValueError as fault:
            raise ValueError(f"{path}: {fault}") from fault


def write_atomically(path: str | Path, text: str) -> None:
    """Write a text file beside its place, then rename it into place."""
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        mode = path.stat().st_mode if path.exists() else 0o666 & ~_umask()
        temporary.chmod(mode & 0o777)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
