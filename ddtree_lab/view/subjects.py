"""From anything that can be viewed to what is drawn: a payload for the browser, or a record that is text."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ddtree_lab.records import Record
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.trace import UNKNOWN, Round, Trace
from ddtree_lab.view import sheets
from ddtree_lab.view.payload import (
    NO_TRACE,
    bare_round,
    diff_payload,
    leaks_payload,
    one_round,
    trace_payload,
)

if TYPE_CHECKING:
    from ddtree_lab.pair import Pair
    from ddtree_lab.session import Session

# A notebook keeps every output, so it is given the first rounds of a long trace only. A file is given all.
MAX_NODES_EMBEDDED = 20_000
NAMES = "a trace, a generation with record=True, a session, a round, a tree, any stage's record or a doctor's report"


@dataclass(frozen=True)
class Subject:
    """What is viewed.

    Args:
        name: one line.
        payload: what the browser code draws, or None: the record is shown as its text.
        record: prints itself where there is no payload.
    """

    name: str
    payload: dict[str, Any] | None
    record: Record | None = None


def subject_of(x: Any, pair: Pair | None = None) -> Subject:
    """What to draw for an object.

    Args:
        pair: whose tokenizer gives the texts of tokens, for records that hold only their numbers.

    Raises:
        TypeError: it is nothing that can be viewed.
        ValueError: a generation without a trace.
    """
    if isinstance(x, Trace):
        return Subject(repr(x), trace_payload(x))
    if isinstance(x, Round):
        return Subject(repr(x), one_round(x, texts_of(pair, _round_ids(x))))
    if isinstance(x, DraftTree):
        return Subject(repr(x), bare_round(x, texts_of(pair, x.token_ids.tolist())))
    if isinstance(x, tuple) and len(x) == 2 and all(isinstance(part, Trace) for part in x):
        return Subject(f"{x[0]!r} beside {x[1]!r}", diff_payload(*x))
    if not isinstance(x, Record):
        raise TypeError(f"x is a {type(x).__name__}, which cannot be viewed; give {NAMES}.")
    return _with_torch(x, pair) or Subject(repr(x), None, x)


def _with_torch(x: Any, pair: Pair | None) -> Subject | None:
    """Records whose classes need torch; a module that was never imported cannot have made `x`."""
    if _is(x, "ddtree_lab.decode", "Generation"):
        if x.trace is None:
            raise ValueError("the generation holds no trace; generate with record=True to view its rounds.")
        return subject_of(x.trace)
    if is_session(x):
        return Subject(repr(x), session_payload(x))
    if _is(x, "ddtree_lab.stages.verify", "Verification"):
        round_ = _verified(x)
        return Subject(repr(x), one_round(round_, texts_of(pair, _round_ids(round_))))
    if _is(x, "ddtree_lab.doctor.report", "Report"):
        matrices = (finding.evidence.get("matrix") for finding in x.findings)
        matrix = next((matrix for matrix in matrices if matrix), None)
        sheet = sheets.report_sheet(x)
        if matrix is None:
            return Subject(repr(x), sheet, x)
        leaks = leaks_payload(matrix, f"{x.subject}: nodes and layers")
        return Subject(repr(x), leaks | {"lead": sheet["lead"], "parts": sheet["parts"]}, x)
    drawn = _sheet(x, pair)
    return None if drawn is None else Subject(repr(x), drawn)


def _sheet(x: Any, pair: Pair | None) -> dict[str, Any] | None:
    """The records of stages that are no tree."""
    if _is(x, "ddtree_lab.stages.draft", "Draft"):
        return sheets.draft_sheet(x, texts_of(pair, [x.anchor_token_id, *sheets.favourites(x)]))
    if _is(x, "ddtree_lab.stages.mask", "TreeMask"):
        return sheets.mask_sheet(x, texts_of(pair, _tree_ids(x.tree)))
    if _is(x, "ddtree_lab.stages.walk", "Walk"):
        known = texts_of(pair, [*_tree_ids(x.tree), *x.target_token_ids])
        return sheets.walk_sheet(x, known) if x.tree is None else one_round(_walked(x), known)
    if _is(x, "ddtree_lab.pipeline", "Commit"):
        return sheets.commit_sheet(x, texts_of(pair, [*_tree_ids(x.tree), *x.token_ids]))
    if _is(x, "ddtree_lab.stages.cache", "CacheReport"):
        return sheets.cache_sheet(x)
    if _is(x, "ddtree_lab.stages.embedding", "EmbeddingPath"):
        return sheets.embedding_sheet(x)
    return None


def texts_of(pair: Pair | None, token_ids: Sequence[int]) -> Trace:
    """What knows the texts of tokens; without a pair they are shown as their numbers."""
    if pair is None or not token_ids:
        return NO_TRACE
    from ddtree_lab.pair import Pair as PairClass
    from ddtree_lab.recording import make_trace

    if not isinstance(pair, PairClass):
        raise TypeError(f"pair is a {type(pair).__name__}; give the pair whose tokenizer knows the tokens.")
    return make_trace(pair, tuple(token_ids), token_ids[0], (), {}, None)


def _tree_ids(tree: DraftTree | None) -> list[int]:
    return [] if tree is None else tree.token_ids.tolist()


def _round_ids(round_: Round) -> list[int]:
    top = () if round_.target_top_ids is None else round_.target_top_ids.flatten().tolist()
    ids = {*_tree_ids(round_.tree), *round_.target_token_ids, *round_.emitted_token_ids, *top}
    return sorted(ids - {UNKNOWN})


def _walked(walk: Any) -> Round:
    """A walk as a round in which nothing but the target's choices is known."""
    unknown = (math.nan,) * walk.tree.num_nodes
    return Round(0, walk.tree, walk.target_token_ids, unknown, walk.path, walk.token_ids)


def is_session(x: Any) -> bool:
    return _is(x, "ddtree_lab.session", "Session")


def _is(x: Any, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(x, getattr(loaded, name))


def _verified(verification: Any) -> Round:
    """A verification as the round that greedy decoding would make of it."""
    from ddtree_lab.recording import what_the_target_thinks
    from ddtree_lab.stages.walk import walk_tree

    tokens = verification.argmax_token_ids.tolist()
    walk = walk_tree(verification.tree, tokens)
    return Round(
        past_length=verification.past_length,
        tree=verification.tree,
        target_token_ids=walk.target_token_ids,
        path=walk.path,
        emitted_token_ids=walk.token_ids,
        **what_the_target_thinks(verification, tokens),
    )


def session_payload(session: Session) -> dict[str, Any]:
    """The finished rounds, and the one that is being worked on as far as it is."""
    records, trace = session.state.records, session.trace
    if "tree" not in records or "commit" in records:
        return trace_payload(trace, title=repr(session))
    tree, verification = records["tree"], records.get("verify")
    assert isinstance(tree, DraftTree)
    if verification is None:
        # The texts of the tree's tokens, as if it had been a round.
        known = texts_of(session.pair, tree.token_ids.tolist())
        return _appended(
            trace_payload(trace, title=repr(session)), bare_round(tree, known)["rounds"][0], session
        )
    round_ = _verified(verification)
    known = texts_of(session.pair, _round_ids(round_))
    return _appended(
        trace_payload(trace, title=repr(session)), one_round(round_, known)["rounds"][0], session
    )


def _appended(payload: dict[str, Any], round_: dict[str, Any], session: Session) -> dict[str, Any]:
    """The unfinished round after the finished ones; its position is that of the anchor."""
    number = payload["num_rounds"]
    round_ |= {
        "past_length": len(session.state.token_ids) - 1,
        "stage_seconds": dict(session.state.stage_seconds),
    }
    return payload | {
        "num_rounds": number + 1,
        "round_numbers": [*payload["round_numbers"], number],
        "rounds": [*payload["rounds"], round_],
    }


def embedded(subject: Subject) -> Subject:
    """The same without the rounds that a notebook should not keep."""
    payload = subject.payload
    if payload is None or payload["kind"] != "trace":
        return subject
    sizes = accumulate(len(round_["ids"]) for round_ in payload["rounds"])
    count = max(1, sum(size <= MAX_NODES_EMBEDDED for size in sizes))
    kept = {name: payload[name][:count] for name in ("rounds", "round_numbers")}
    return replace(subject, payload=payload | kept)
