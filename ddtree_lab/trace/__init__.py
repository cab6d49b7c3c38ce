"""What was recorded of a decode: plain data, saved as versioned JSON, read without torch.

A trace holds each round's tree, the target's choices and the path taken, so every later view, smaller
budgets included (the tree of a smaller budget is a prefix), needs no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ddtree_lab.records import Record
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.trace import checks, reference
from ddtree_lab.trace.files import check_size, read_json, write_atomically

__all__ = ["CacheLayer", "Round", "Trace", "write_atomically"]

FORMAT = "ddtree-lab-trace"
VERSION = 2
READABLE = (1, 2)  # version 1 has no target_top_*, token_target_log_probs, token_bytes and layers
UNKNOWN = -1  # in target_token_ids; a log-probability that is not known is NaN


@dataclass(frozen=True, eq=False)
class Round(Record):
    """One round.

    Args:
        past_length: tokens in the cache before it; the root's position.
        tree: the drafted tree, its root the anchor.
        target_token_ids: the target's choice at each node, -1 where it is not known.
        target_log_probs: the target's log-probability of that choice, temperature 1.
        path: committed nodes, root first.
        emitted_token_ids: accepted drafts, then the bonus token (unless the text ended before it).
        stage_seconds: duration of each stage.
        token_target_log_probs: the target's log-probability of each drafted token, after the node's parent;
            NaN for the root.
        target_top_ids: the target's best tokens at each node, falling.
        target_top_log_probs: their log-probabilities, temperature 1.
    """

    past_length: int
    tree: DraftTree
    target_token_ids: tuple[int, ...]
    target_log_probs: tuple[float, ...]
    path: tuple[int, ...]
    emitted_token_ids: tuple[int, ...]
    stage_seconds: dict[str, float] = field(default_factory=dict)
    token_target_log_probs: tuple[float, ...] | None = None
    target_top_ids: Int[np.ndarray, "node k"] | None = None
    target_top_log_probs: Float[np.ndarray, "node k"] | None = None

    @property
    def ended_early(self) -> bool:
        """Whether the text ended inside the path: its last token is then a draft, not a bonus."""
        return self.emitted_token_ids[-1] in self.tree.children(self.path[-1])

    @property
    def accepted(self) -> tuple[int, ...]:
        """Nodes whose token was kept, the root not counted; one more than the path where the text ended inside it."""
        last = self.tree.children(self.path[-1])[self.emitted_token_ids[-1]] if self.ended_early else None
        return self.path[1:] if last is None else (*self.path[1:], last)

    @property
    def bonus_token_id(self) -> int | None:
        """The target's own token after the path; None where the text ended before it."""
        return None if self.ended_early else self.emitted_token_ids[-1]

    @property
    def num_accepted_drafts(self) -> int:
        """Drafted tokens kept. Where the text ended inside the path, its last token is a draft too."""
        return len(self.path) - 1 + int(self.ended_early)

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
        data = {
            "past_length": self.past_length,
            "token_ids": tree.token_ids.tolist(),
            "parents": tree.parents.tolist(),
            "ranks": tree.ranks.tolist(),
            "log_probs": written(tree.log_probs),
            "target_token_ids": list(self.target_token_ids),
            "target_log_probs": written(self.target_log_probs),
            "path": list(self.path),
            "emitted_token_ids": list(self.emitted_token_ids),
            "stage_seconds": {stage: round(value, 6) for stage, value in self.stage_seconds.items()},
        }
        if self.token_target_log_probs is not None:
            data["token_target_log_probs"] = written(self.token_target_log_probs)
        if self.target_top_ids is not None and self.target_top_log_probs is not None:
            data["target_top_ids"] = self.target_top_ids.tolist()
            data["target_top_log_probs"] = written(self.target_top_log_probs, 4)
        return data

    @classmethod
    def from_dict(cls, data: Any) -> Round:
        """Read a round's data.

        Raises:
            ValueError: saying which entry is wrong.
        """
        token_ids = checks.integers(data, "token_ids")
        n = len(token_ids)
        if not 0 < n <= checks.MAX_NODES:
            raise ValueError(f"token_ids has {n} nodes; a round has 1 to {checks.MAX_NODES}.")
        tree = DraftTree.from_parents(
            token_ids,
            checks.integers(data, "parents", n, least=-1),
            checks.integers(data, "ranks", n, least=-1),
            checks.log_probs(data, "log_probs", n),
        )
        path = tuple(checks.integers(data, "path").tolist())
        if not path or max(path) >= n or list(path) != tree.path(path[-1]):
            raise ValueError("path is no way down from the root of the tree.")
        emitted = tuple(checks.integers(data, "emitted_token_ids").tolist())
        if not emitted:
            raise ValueError("emitted_token_ids is empty; a round emits at least one token.")
        top = checks.top_tokens(data, n)
        has_own = data.get("token_target_log_probs") is not None
        return cls(
            past_length=checks.integer(data, "past_length"),
            tree=tree,
            target_token_ids=tuple(checks.integers(data, "target_token_ids", n, least=UNKNOWN).tolist()),
            target_log_probs=tuple(checks.log_probs(data, "target_log_probs", n).tolist()),
            path=path,
            emitted_token_ids=emitted,
            stage_seconds=checks.seconds(data.get("stage_seconds", {}), "stage_seconds"),
            token_target_log_probs=(
                tuple(checks.log_probs(data, "token_target_log_probs", n).tolist()) if has_own else None
            ),
            target_top_ids=top and top[0],
            target_top_log_probs=top and top[1],
        )


def written(log_probs: Any, digits: int = 6) -> list[Any]:
    """Log-probabilities as JSON has them: rounded, null where not known, -inf as a large number."""
    values = np.maximum(np.asarray(log_probs, dtype=np.float64), checks.LEAST_LOG_PROB).round(digits)
    known = values.tolist()
    for place in np.argwhere(np.isnan(values)).tolist():
        column = known[place[0]] if len(place) == 2 else known
        column[place[-1]] = None
    return known


@dataclass(frozen=True)
class CacheLayer:
    """A layer of the target's cache.

    Args:
        layer: its index.
        kind: `"full_attention"`, `"linear_attention"`, …
        rollback: how tokens are taken out of it again: `"crop"`, `"snapshot"` or `"none"`.
    """

    layer: int
    kind: str
    rollback: str


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
        token_bytes: the UTF-8 bytes of those tokens that are only part of a character.
        layers: of the target's cache.
    """

    pair: str
    settings: dict[str, Any]
    prompt_token_ids: tuple[int, ...]
    first_token_id: int
    rounds: tuple[Round, ...]
    token_texts: dict[int, str] = field(default_factory=dict)
    finish_reason: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    token_bytes: dict[int, bytes] = field(default_factory=dict)
    layers: tuple[CacheLayer, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All new tokens."""
        return (self.first_token_id, *(token for r in self.rounds for token in r.emitted_token_ids))

    def text_of(self, token_id: int) -> str:
        return self.token_texts.get(token_id, f"<{token_id}>")

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of a token that is only part of a character, else None."""
        return self.token_bytes.get(token_id)

    @property
    def text(self) -> str:
        """All new tokens' text; characters split over tokens are whole."""
        pieces = (self.bytes_of(token) or self.text_of(token).encode() for token in self.token_ids)
        return b"".join(pieces).decode(errors="replace")

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
            "token_bytes": {str(token): piece.hex() for token, piece in sorted(self.token_bytes.items())},
            "layers": [asdict(layer) for layer in self.layers],
            "environment": self.environment,
        }

    @classmethod
    def from_dict(cls, data: Any, run: int = 0) -> Trace:
        """Read a trace's data; everything in it is checked and nothing in it is run.

        Args:
            data: also runs of the published DDTree code that kept their `round_trees`, as many as there are.
            run: index of the one to read, where there are several.

        Raises:
            ValueError: saying what is wrong and where, or that there is no such run.
        """
        runs = _runs(data)
        if not 0 <= run < len(runs):
            raise ValueError(f"run is {run}; the file holds runs 0 to {len(runs) - 1}.")
        return cls._from_data(reference.converted(runs, run) if reference.KEY in runs[run] else data)

    @classmethod
    def _from_data(cls, data: dict[str, Any]) -> Trace:
        if data.get("version") not in READABLE:
            raise ValueError(
                f"trace version is {checks.short(data.get('version'))}; this program reads {READABLE[0]} to "
                f"{READABLE[-1]}."
            )
        rounds = []
        entries = checks.entry(data, "rounds")
        if not isinstance(entries, list):
            raise ValueError(f"rounds is {checks.kind(entries)}, not a list.")
        for index, round_ in enumerate(entries):
            try:
                rounds.append(Round.from_dict(round_))
            except ValueError as fault:
                raise ValueError(f"round {index}: {fault}") from fault
        reason = data.get("finish_reason")
        return cls(
            pair=checks.string(checks.entry(data, "pair"), "pair"),
            settings=checks.plain_object(checks.entry(data, "settings"), "settings"),
            prompt_token_ids=tuple(checks.integers(data, "prompt_token_ids").tolist()),
            first_token_id=checks.integer(data, "first_token_id"),
            rounds=tuple(rounds),
            token_texts=checks.texts(data.get("token_texts", {}), "token_texts"),
            finish_reason=None if reason is None else checks.string(reason, "finish_reason"),
            environment=checks.plain_object(data.get("environment", {}), "environment"),
            token_bytes=checks.byte_texts(data.get("token_bytes", {}), "token_bytes"),
            layers=_layers(data.get("layers", [])),
        )

    def save(self, path: str | Path) -> None:
        """Write JSON; a file of that name is replaced only by a whole one."""
        text = json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        write_atomically(path, text + "\n")

    @classmethod
    def load(cls, path: str | Path, run: int = 0) -> Trace:
        """Read a saved trace.

        Args:
            run: index of the one to read in a file of the published code, which may hold many; `load_all` reads all.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a trace, or a damaged one, or no such run.
        """
        with _named(path):
            return cls.from_dict(_data(path), run)

    @classmethod
    def load_all(cls, path: str | Path) -> tuple[Trace, ...]:
        """Every run of a file, in its order: one, unless the published code saved it; arguments as in `load`."""
        with _named(path):
            data = _data(path)
            return tuple(cls.from_dict(data, run) for run in range(len(_runs(data))))


@contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """Errors say which file they are about."""
    try:
        yield
    except ValueError as fault:
        raise ValueError(f"{path}: {fault}") from fault


def _data(path: str | Path) -> Any:
    check_size(path)
    return reference.read(path) if reference.is_torch_file(path) else read_json(path)


def _runs(data: Any) -> list[dict[str, Any]]:
    """What a file holds: one trace of this package's, or runs of the published code."""
    if isinstance(data, dict) and data.get("format") == FORMAT:
        return [data]
    if not (runs := reference.find_runs(data)):
        raise ValueError(f"this is no DDTree Lab trace (its format entry is not {FORMAT!r}).")
    return runs


def _layers(data: Any) -> tuple[CacheLayer, ...]:
    if not isinstance(data, list):
        raise ValueError(f"layers is {checks.kind(data)}, not a list.")
    return tuple(
        CacheLayer(
            checks.integer(layer, "layer"),
            checks.string(checks.entry(layer, "kind"), "kind"),
            checks.string(checks.entry(layer, "rollback"), "rollback"),
        )
        for layer in data
    )
