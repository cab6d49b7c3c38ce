"""Records that are no tree, as sheets: tables whose cells have marks, bars and badges, the same in every face.

A sheet is plain data, as every payload is: `parts`, each with a title, a note, columns and rows; a row has a head and
cells; a cell has some of `text`, `prose` (a sentence, which may be broken), `number`, `share` (a bar), `state` (a
mark), `rollback` (a badge), `seen` (a square of a mask) and `tip`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from ddtree_lab.records import format_bytes, ranges
from ddtree_lab.trace import Trace
from ddtree_lab.view.numbers import log_text
from ddtree_lab.view.payload import VERSION, token_text
from ddtree_lab.view.tokens import path_texts

Sheet = dict[str, Any]
Part = dict[str, Any]
Cell = dict[str, Any]

MAX_RANKS = 6  # candidates of a depth
MAX_ROWS = 64  # nodes; the drafter holds those beyond less likely
SEEN = {"self": "●", "ancestor": "○", "hidden": "·"}
ROLLBACK = {
    "crop": "a row for each token: rows are cut off",
    "snapshot": "overwritten as it goes: the state from before has to be kept, or computed anew",
    "none": "nothing to undo, or no way to",
}
DEFINITIONS = {
    "rank": "place of a token in the drafter's distribution at its depth; 0 is its favourite",
    "log-probability": "natural logarithm of the drafter's probability at temperature 1; the bar is the probability",
    "entropy": "how undecided the drafter is there, in nats; 0 is certain",
    "position": "committed tokens before the round plus depth: the position id",
    "committed": "how many of the committed tokens the row sees",
    "slot before": "committed tokens plus node number: where the verify pass put the row",
    "slot after": "where the row is once the path is committed; the rows of all other nodes are dropped",
    "rollback": "how tokens are taken out of a layer's cache again",
    "bytes": "of the tensors that the layer holds now; the bar compares layers",
}


def draft_sheet(draft: Any, known: Trace) -> Sheet:
    """Depth × rank: the drafter's favourites at each position.

    Args:
        draft: a `Draft`.
        known: knows the texts of tokens.
    """
    anchor = token_text(known, draft.anchor_token_id)
    if not draft.depth:
        return _sheet(
            "draft", f"Nothing was drafted after “{anchor}”: the round is the target's own token.", []
        )
    log_probs, best = _favourites(draft)
    entropies = -(log_probs.exp() * log_probs.clamp(min=-1e9)).sum(-1)
    rows = [
        _row(
            str(depth),
            [_candidate(token_text(known, token), value) for token, value in zip(tokens, values, strict=True)]
            + [_cell(f"{abs(entropy):.2f}")],
        )
        for depth, (tokens, values, entropy) in enumerate(
            zip(best.indices.tolist(), best.values.tolist(), entropies.tolist(), strict=True), start=1
        )
    ]
    columns = ["depth", *(f"rank {rank}" for rank in range(best.indices.shape[-1])), "entropy"]
    lead = (
        f"One pass of the drafter after “{anchor}” gives a distribution for each of {_count(draft.depth, 'position')}. "
        "No depth knows what another one will turn out to be; the tree joins them."
    )
    return _sheet(
        "draft",
        lead,
        [_part("Candidates by depth and rank", columns, rows)],
        "rank",
        "log-probability",
        "entropy",
    )


def favourites(draft: Any) -> list[int]:
    """The tokens that a draft's sheet shows."""
    return _favourites(draft)[1].indices.flatten().tolist() if draft.depth else []


def _favourites(draft: Any) -> tuple[Any, Any]:
    """Log-probabilities [depth, vocab] and the best of each depth."""
    log_probs = draft.logits.float().log_softmax(-1)
    return log_probs, log_probs.topk(min(MAX_RANKS, log_probs.shape[-1]), dim=-1)


def _candidate(text: str, log_prob: float) -> Cell:
    if log_prob == -math.inf:
        return _cell("–", tip="impossible")
    share = math.exp(log_prob)
    return _cell(text, number=log_text(log_prob), share=share, tip=f"{text}: probability {share:.3g}")


def mask_sheet(mask: Any, known: Trace) -> Sheet:
    """A row for each node: which committed tokens and which nodes it sees; once more for each sliding window.

    Args:
        mask: a `TreeMask`.
    """
    lead = (
        f"{mask.num_nodes} rows × ({mask.past_length} committed + {mask.num_nodes} nodes): "
        "every node sees the committed tokens, its ancestors and itself."
    )
    masks = [("What each row may look at", mask.visible)]
    masks += [
        (f"In layers with a sliding window of {window}", additive[0, 0] == 0)
        for window, additive in sorted(mask.windowed.items())
    ]
    parts = [_mask_part(title, visible, mask, known) for title, visible in masks]
    return _sheet("mask", lead, parts, "position", "committed")


def _mask_part(title: str, visible: Any, mask: Any, known: Trace) -> Part:
    seen = visible.tolist()
    n, shown = mask.num_nodes, min(mask.num_nodes, MAX_ROWS)
    past = len(seen[0]) - n
    texts = _texts(mask.tree, n, known)
    positions = mask.position_ids[0].tolist()
    rows = []
    for i in range(shown):
        committed = sum(seen[i][:past])
        cells = [_cell(str(positions[i])), _cell(f"{committed} of {past}")]
        for j in range(shown):
            look = "self" if i == j else "ancestor" if seen[i][past + j] else "hidden"
            tip = f"node {i} {'does not see' if look == 'hidden' else 'sees'} {'itself' if i == j else f'node {j}'}"
            cells.append(_cell(seen=look, tip=tip))
        rows.append(_row(f"{i} {texts[i]}".strip(), cells))
    columns = ["node", "position", "committed", *map(str, range(shown))]
    note = "● itself, ○ an ancestor, · not seen"
    return _part(title, columns, rows, note + _left_out(n - shown))


def walk_sheet(walk: Any, known: Trace) -> Sheet:
    """A walk whose tree is not known: a row for each step, and why it went on or stopped.

    Args:
        walk: a `Walk`.
    """
    rows = []
    for step, node in enumerate(walk.path):
        token = token_text(known, walk.token_ids[step])
        is_last = step == len(walk.path) - 1
        why = (
            "stops: no child has this token"
            if is_last
            else f"goes on: this is child node {walk.path[step + 1]}"
        )
        rows.append(_row(str(node), [_cell(token, state="bonus" if is_last else "accepted"), _prose(why)]))
    kept, said = (
        _count(walk.num_accepted_drafts, "accepted draft"),
        _count(walk.num_emitted_tokens, "emitted token"),
    )
    lead = f"{kept} and the bonus token: {said}."
    return _sheet("walk", lead, [_part("Step by step", ["at node", "the target's token", "the walk"], rows)])


def commit_sheet(commit: Any, known: Trace) -> Sheet:
    """Cache slots before and after, and what each kind of layer keeps.

    Args:
        commit: a `Commit`.
    """
    tree, path = commit.tree, commit.path
    past = commit.cache_length - len(path)
    n = max(path) + 1 if tree is None else tree.num_nodes
    shown = [node for node in range(n) if node < MAX_ROWS or node in path]
    texts = _texts(tree, n, known)
    rows = []
    for node in shown:
        state = "root" if node == 0 else "accepted" if node in path else "rejected"
        after = str(past + path.index(node)) if node in path else "dropped"
        rows.append(_row(str(node), [_cell(texts[node], state=state), _cell(str(past + node)), _cell(after)]))
    note = f"slots 0 … {past - 1} are committed and stay" if past else "nothing was committed before"
    parts = [
        _part(
            "Cache slots",
            ["node", "token", "slot before", "slot after"],
            rows,
            note + _left_out(n - len(shown)),
        )
    ]
    if commit.layers:
        kinds = [
            _row(kind.replace("_", " "), [_badge(rollback), _cell(layers), _prose(_fate(rollback, path))])
            for kind, rollback, layers in _kinds(commit.layers)
        ]
        parts.append(_part("Layers", ["kind", "rollback", "layers", "what this round leaves in them"], kinds))
    end = f" The text ends ({commit.finish_reason})." if commit.finish_reason else ""
    last = token_text(known, commit.token_ids[-1])
    lead = (
        f"{_count(len(path), 'row')} of {n} go into the cache, which then holds {commit.cache_length} tokens. "
        f"The last emitted token, “{last}”, is the next anchor and not in it yet.{end}"
    )
    return _sheet("commit", lead, parts, "slot before", "slot after", "rollback")


def _fate(rollback: str, path: Sequence[int]) -> str:
    if rollback == "crop":
        return f"the rows of nodes {ranges(path)}; the others are cut off"
    if rollback == "snapshot":
        return f"the state after node {path[-1]}; the states of other nodes are not kept"
    return "what the layer makes of it"


def cache_sheet(report: Any) -> Sheet:
    """A row for each layer of a cache: kind, rollback, class, bytes and shapes.

    Args:
        report: a `CacheReport`.
    """
    most = max((layer.num_bytes for layer in report.layers), default=0) or 1
    rows = [
        _row(
            str(layer.layer_idx),
            [
                _cell(layer.kind.replace("_", " ")),
                _badge(layer.rollback),
                _cell(layer.class_name),
                _cell(format_bytes(layer.num_bytes), share=layer.num_bytes / most),
                _cell(
                    ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in layer.shapes.items())
                    or "empty"
                ),
            ],
        )
        for layer in report.layers
    ]
    kinds = "; ".join(f"{kind.replace('_', ' ')}: {layers}" for kind, _, layers in _kinds(report.layers))
    undone = (
        "Cutting rows undoes tokens in every layer."
        if report.is_croppable
        else "Cutting rows does not undo tokens in every layer: some need the state from before."
    )
    lead = (
        f"{_count(report.seq_length, 'token')}, {format_bytes(report.num_bytes)}. Layers of {kinds}. {undone}"
    )
    part = _part("Layers", ["layer", "kind", "rollback", "class", "bytes", "shapes"], rows)
    return _sheet("cache", lead, [part], "rollback", "bytes")


def embedding_sheet(path: Any) -> Sheet:
    """Where ids become vectors and vectors logits.

    Args:
        path: an `EmbeddingPath`.
    """
    rows = [
        _row(
            name,
            [_cell(where), _cell(type(module).__name__), _cell(" × ".join(map(str, module.weight.shape)))],
        )
        for name, where, module in (
            ("ids → vectors", path.input_path, path.input),
            ("vectors → logits", path.output_path, path.output),
        )
    ]
    shared = "one weight is used for both" if path.tied else "each has a weight of its own"
    lead = f"{path.vocab_size} tokens, {path.hidden_size} numbers each; {shared}."
    return _sheet("embedding", lead, [_part("Modules", ["what", "where", "class", "weight"], rows)])


FOUND = {"problem": "✗ problem", "ok": "✓ ok", "note": "· note", "skipped": "– skipped"}


def report_sheet(report: Any) -> Sheet:
    """The problems that the doctor found, with cause and fix, and everything that it checked.

    Args:
        report: a doctor's `Report`.
    """
    problems = [
        _row(f.check, [_cell(f.stage), _cell(ranges(f.layers)), *map(_prose, (f.symptom, f.cause, f.fix))])
        for f in report.problems
    ]
    checks = [
        _row(f.check, [_cell(f.stage), _cell(FOUND[f.status]), _prose(f.symptom)]) for f in report.findings
    ]
    parts = [_part("What was checked", ["check", "stage", "found", "what"], checks)]
    if problems:
        parts.insert(0, _part("Problems", ["check", "stage", "layers", "seen", "cause", "fix"], problems))
    return _sheet(report.subject, report.verdict, parts)


# --- pieces ---------------------------------------------------------------------------------------------


def _sheet(title: str, lead: str, parts: list[Part], *defined: str) -> Sheet:
    return {
        "version": VERSION,
        "kind": "sheet",
        "title": title,
        "lead": lead,
        "definitions": {name: DEFINITIONS[name] for name in defined},
        "parts": parts,
    }


def _part(title: str, columns: Sequence[str], rows: list[dict[str, Any]], note: str = "") -> Part:
    return {"title": title, "note": note, "columns": list(columns), "rows": rows}


def _row(head: str, cells: Iterable[Cell]) -> dict[str, Any]:
    return {"head": head, "cells": list(cells)}


def _cell(text: str = "", **more: Any) -> Cell:
    return {"text": text, **{name: value for name, value in more.items() if value not in (None, "")}}


def _prose(text: str) -> Cell:
    return _cell(text, prose=True)


def _badge(rollback: str) -> Cell:
    return _cell(rollback, rollback=rollback, tip=ROLLBACK[rollback])


def _texts(tree: Any, n: int, known: Trace) -> list[str]:
    """The tokens of rows; empty where the tree is not known."""
    if tree is None:
        return [""] * n
    return path_texts(tree.token_ids.tolist(), tree.parents.tolist(), known.text_of, known.bytes_of)


def _kinds(layers: Iterable[Any]) -> list[tuple[str, str, str]]:
    """Kind, rollback and indices of layers that are alike."""
    key = lambda layer: (layer.kind, layer.rollback)  # noqa: E731
    groups = groupby(sorted(layers, key=lambda layer: (key(layer), layer.layer_idx)), key=key)
    return [(*alike, ranges([layer.layer_idx for layer in members])) for alike, members in groups]


def _left_out(count: int) -> str:
    return f"; {_count(count, 'further node')} not shown" if count else ""


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
