"""What the browser code is given: plain JSON, a column of a round's nodes a list.

`static/viewer.js` draws it and replays smaller budgets from it; nothing else is asked for later. Texts are visible
already and places are laid out, so that every face shows the same. What is not known is null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.trace import UNKNOWN, Round, Trace, written
from ddtree_lab.view.layout import tidy_rows
from ddtree_lab.view.tokens import line_texts, path_texts, visible_text

VERSION = 1
DIGITS = 4  # of log-probabilities: finer than any picture shows
NO_TRACE = Trace("", {}, (), 0, ())  # knows no texts: tokens are shown as their numbers
DEFINITIONS = {
    "drafted": "nodes of the tree, the root not counted: what the tree budget limits",
    "accepted_drafts": "drafted tokens kept in a round",
    "emitted_tokens": "accepted drafts and the bonus token, which is the target's own",
    "mass": "sum over drafted nodes of exp(path log-probability): how many kept drafts the drafter expects",
    "log_prob": "the drafter's log-probability of the path from the root to a node, summed, temperature 1",
    "step_log_prob": "the drafter's log-probability of a node's token at its depth: the path's minus the parent's",
    "rank": "place of a node's token in the drafter's distribution at its depth; 0 is its favourite",
    "target_log_prob": "the target's log-probability, temperature 1, of its own choice after a node",
    "token_target_log_prob": "the target's log-probability, temperature 1, of a drafted token, after its parent",
    "position_id": "committed tokens before the round plus depth",
    "cache_slot": "before the commit: committed tokens plus node number; after it: plus place on the path, or dropped",
    "seconds": "duration of each stage on the machine that recorded the trace",
    "gap": "the target's log-probability of its first choice minus that of its second",
    "replay": "a smaller budget is the first nodes of the recorded tree, walked with the target's recorded choices: "
    "exact within the round, greedy or with keyed noise; later rounds would begin elsewhere",
}


def trace_payload(
    trace: Trace, title: str | None = None, rounds: Iterable[int] | None = None
) -> dict[str, Any]:
    """A trace for the browser.

    Args:
        title: of the page.
        rounds: which rounds to hand over; all of them where not given.
    """
    indices = range(len(trace.rounds)) if rounds is None else list(rounds)
    return {
        "version": VERSION,
        "kind": "trace",
        "title": title or f"{trace.pair}: {len(trace.rounds)} round{'s' * (len(trace.rounds) != 1)}",
        "definitions": DEFINITIONS,
        "settings": {"pair": trace.pair, **trace.settings},
        "finish_reason": trace.finish_reason,
        "layers": [asdict(layer) for layer in trace.layers],
        "prompt": _tokens(trace, trace.prompt_token_ids),
        "first": _tokens(trace, (trace.first_token_id,)),
        "num_rounds": len(trace.rounds),
        "round_numbers": list(indices),
        "rounds": [round_payload(trace.rounds[i], trace) for i in indices],
    }


def _tokens(trace: Trace, token_ids: tuple[int, ...]) -> dict[str, Any]:
    return {"ids": list(token_ids), "texts": line_texts(token_ids, trace.text_of, trace.bytes_of)}


def round_payload(round_: Round, trace: Trace) -> dict[str, Any]:
    """A round for the browser, a list with an entry a node in each column."""
    tree = round_.tree
    ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
    texts = path_texts(ids, parents, trace.text_of, trace.bytes_of)
    # The target's choice and what was emitted continue a path, as a child would.
    chosen = list(round_.target_token_ids)
    target_texts = path_texts(ids + chosen, parents + list(range(len(ids))), trace.text_of, trace.bytes_of)
    emitted = list(round_.emitted_token_ids)
    anchored = line_texts([ids[0], *emitted], trace.text_of, trace.bytes_of)
    bonus = round_.bonus_token_id
    own = round_.token_target_log_probs
    return {
        "past_length": round_.past_length,
        "ids": ids,
        "parents": parents,
        "depths": tree.depths.tolist(),
        "ranks": tree.ranks.tolist(),
        "log_probs": written(tree.log_probs, DIGITS),
        "texts": texts,
        "x": tree.depths.tolist(),
        "y": tidy_rows(parents, None if bonus is None else round_.path[-1]).tolist(),
        "states": node_states(round_),
        "target_ids": [None if token == UNKNOWN else token for token in chosen],
        "target_texts": [
            None if token == UNKNOWN else text
            for token, text in zip(chosen, target_texts[len(ids) :], strict=True)
        ],
        "target_log_probs": written(round_.target_log_probs, DIGITS),
        "token_target_log_probs": [None] * len(ids) if own is None else written(own, DIGITS),
        "target_top": _top(round_, trace),
        "path": list(round_.path),
        "bonus": None if bonus is None else {"id": bonus, "text": anchored[-1]},
        "emitted": emitted,
        "emitted_texts": anchored[1:],
        "stage_seconds": {stage: round(seconds, 6) for stage, seconds in round_.stage_seconds.items()},
    }


def node_states(round_: Round) -> list[str]:
    """`"root"`, `"accepted"` or `"rejected"` for each node."""
    states = ["root"] + ["rejected"] * round_.tree.num_drafted
    for node in round_.accepted:
        states[node] = "accepted"
    return states


def _top(round_: Round, trace: Trace) -> list[list[list[Any]]] | None:
    if round_.target_top_ids is None or round_.target_top_log_probs is None:
        return None
    rows = round_.target_top_ids.tolist()
    text = {token: token_text(trace, token) for token in {token for row in rows for token in row}}
    values = written(round_.target_top_log_probs, DIGITS)
    return [
        [[token, text[token], value] for token, value in zip(row, known, strict=True)]
        for row, known in zip(rows, values, strict=True)
    ]


def token_text(trace: Trace, token: int) -> str:
    """A token's visible text; its bytes where they are only part of a character."""
    piece = trace.bytes_of(token)
    return visible_text(trace.text_of(token)) if piece is None else f"‹{piece.hex(' ')}›"


def diff_payload(a: Trace, b: Trace, title: str | None = None) -> dict[str, Any]:
    """Two runs and where the second leaves the first."""
    return {
        "version": VERSION,
        "kind": "diff",
        "title": title or f"{a.pair} beside {b.pair}",
        "definitions": DEFINITIONS,
        "a": trace_payload(a),
        "b": trace_payload(b),
        "divergence": divergence(a, b),
    }


def divergence(a: Trace, b: Trace) -> dict[str, Any] | None:
    """The first new token that differs, with what the target thought there in both runs; None if none does.

    `index` counts new tokens; a run that has ended there has id None. `gap` is that of the first run, where recorded.
    """
    ids_a, ids_b = a.token_ids, b.token_ids
    shorter = min(len(ids_a), len(ids_b))
    index = next((i for i in range(shorter) if ids_a[i] != ids_b[i]), shorter)
    if index == len(ids_a) == len(ids_b):
        return None
    sides = [_choice(trace, index) for trace in (a, b)]
    return {
        "index": index,
        "round_a": sides[0].pop("round"),
        "round_b": sides[1].pop("round"),
        "a": sides[0],
        "b": sides[1],
        "gap": next((gap for side in sides if (gap := _gap(side["top"])) is not None), None),
    }


def _choice(trace: Trace, index: int) -> dict[str, Any]:
    """The new token of that index and the target's best where it was chosen; round None: the prefill chose it."""
    token_ids = trace.token_ids
    side: dict[str, Any] = {"id": None, "text": "the text has ended", "round": None, "node": None, "top": []}
    if index < len(token_ids):
        line = line_texts(token_ids[: index + 1], trace.text_of, trace.bytes_of)
        side |= {"id": token_ids[index], "text": line[-1]}
    begin = 1
    for number, round_ in enumerate(trace.rounds):
        if begin <= index < begin + round_.num_emitted_tokens:
            node = round_.path[index - begin]
            top = _top(round_, trace)
            return side | {"round": number, "node": node, "top": top[node] if top else []}
        begin += round_.num_emitted_tokens
    return side


def _gap(top: list[list[Any]]) -> float | None:
    if len(top) < 2 or top[0][2] is None or top[1][2] is None:
        return None
    return round(top[0][2] - top[1][2], DIGITS)


def leaks_payload(matrix: dict[str, Any], title: str, tolerance: float = 0.0) -> dict[str, Any]:
    """The doctor's leak matrix: how far each node's row is from where it should be, in each layer.

    Args:
        matrix: a finding's evidence: `layers`, `kinds`, `moved` (relative movement, layers × nodes) and `caption`.
        tolerance: movement up to here is rounding.
    """
    moved = matrix["moved"]
    return {
        "version": VERSION,
        "kind": "leaks",
        "title": title,
        "definitions": {"moved": matrix["caption"]},
        "layers": [
            {"layer": layer, "kind": kind}
            for layer, kind in zip(matrix["layers"], matrix["kinds"], strict=True)
        ],
        "nodes": [f"node {i}" for i in range(len(moved[0]) if moved else 0)],
        "matrix": moved,
        "tolerance": tolerance,
    }


def one_round(round_: Round, trace: Trace = NO_TRACE) -> dict[str, Any]:
    """A single round as a payload of one.

    Args:
        trace: knows the texts of its tokens.
    """
    return _single(round_payload(round_, trace), repr(round_))


def bare_round(tree: DraftTree, trace: Trace = NO_TRACE) -> dict[str, Any]:
    """A tree that no target has seen as a payload of one round."""
    nothing = Round(0, tree, (UNKNOWN,) * tree.num_nodes, (math.nan,) * tree.num_nodes, (0,), (UNKNOWN,))
    drafted = round_payload(nothing, trace) | {
        "states": ["root"] + ["drafted"] * tree.num_drafted,
        "y": tidy_rows(tree.parents.tolist()).tolist(),
        "bonus": None,
        "emitted": [],
        "emitted_texts": [],
    }
    absent = (
        "target_ids",
        "target_texts",
        "target_log_probs",
        "token_target_log_probs",
        "target_top",
        "path",
    )
    return _single(drafted | dict.fromkeys(absent), repr(tree))


def _single(round_: dict[str, Any], title: str) -> dict[str, Any]:
    return {
        "version": VERSION,
        "kind": "trace",
        "title": title,
        "definitions": DEFINITIONS,
        "settings": {},
        "finish_reason": None,
        "layers": [],
        "prompt": {"ids": [], "texts": []},
        "first": {"ids": [], "texts": []},
        "num_rounds": 1,
        "round_numbers": [0],
        "rounds": [round_],
    }
