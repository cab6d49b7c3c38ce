"""From states to a trace: what the target said at each node, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ddtree_lab.environment import environment_summary
from ddtree_lab.pair import Pair
from ddtree_lab.pipeline import State
from ddtree_lab.stages.cache import describe_cache
from ddtree_lab.stages.verify import Verification
from ddtree_lab.stages.walk import Walk
from ddtree_lab.trace import CacheLayer, Round, Trace

NUM_TOP = 5  # of the target's best tokens at each node
REPLACEMENT = "\ufffd"  # what a tokenizer writes for half a character
_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


def record_round(before: State, after: State, with_log_probs: bool = True) -> Round:
    """The round between two states as plain data.

    Args:
        before: when the round began; its text is all but what the round emitted.
        after: right after the commit.
        with_log_probs: also what the target thought, which takes a pass over the logits.
    """
    walk, verification = after.records["walk"], after.records["verify"]
    assert isinstance(walk, Walk) and isinstance(verification, Verification)
    emitted = after.token_ids[len(before.token_ids) :]
    return Round(
        past_length=verification.past_length,
        tree=verification.tree,
        target_token_ids=walk.target_token_ids,
        path=walk.path[: len(emitted)],
        emitted_token_ids=emitted,
        stage_seconds=after.stage_seconds,
        **(
            what_the_target_thinks(verification, walk.target_token_ids)
            if with_log_probs
            else dict(target_log_probs=(np.nan,) * len(walk.target_token_ids))
        ),
    )


def what_the_target_thinks(verification: Verification, token_ids: Sequence[int]) -> dict[str, Any]:
    """The target's log-probabilities (temperature 1) at each node, as entries of a `Round`.

    Args:
        token_ids: the target's choice at each node.
    """
    log_probs = verification.logits.float().log_softmax(-1)  # (n, vocab)
    best = log_probs.topk(min(NUM_TOP, log_probs.shape[-1]), dim=-1)
    tree, device = verification.tree, log_probs.device
    nodes = torch.arange(tree.num_nodes, device=device)
    chosen = log_probs[nodes, torch.as_tensor(token_ids, device=device)]
    parents = torch.as_tensor(tree.parents[1:], device=device)
    drafted = log_probs[parents, torch.as_tensor(tree.token_ids[1:], device=device)]
    return dict(
        target_log_probs=tuple(chosen.tolist()),
        token_target_log_probs=(np.nan, *drafted.tolist()),
        target_top_ids=best.indices.cpu().numpy(),
        target_top_log_probs=best.values.double().cpu().numpy(),
    )


def make_trace(
    pair: Pair,
    prompt_token_ids: tuple[int, ...],
    first_token_id: int,
    rounds: Sequence[Round],
    settings: dict[str, Any],
    finish_reason: str | None,
) -> Trace:
    """A trace with the text of every token that occurs in it."""
    occurring = {*prompt_token_ids, first_token_id}
    for r in rounds:
        occurring |= {*r.tree.token_ids.tolist(), *r.target_token_ids}
        occurring |= set() if r.target_top_ids is None else {*r.target_top_ids.flatten().tolist()}
    texts = {token: pair.decode([token], skip_special_tokens=False) for token in occurring}
    pieces = {token: _piece(pair, token) for token, text in texts.items() if REPLACEMENT in text}
    return Trace(
        pair=pair.name,
        settings=settings,
        prompt_token_ids=prompt_token_ids,
        first_token_id=first_token_id,
        rounds=tuple(rounds),
        token_texts=texts,
        finish_reason=finish_reason,
        environment=environment_summary(),
        token_bytes={token: piece for token, piece in pieces.items() if piece},
        layers=tuple(
            CacheLayer(layer.layer_idx, layer.kind, layer.rollback)
            for layer in describe_cache(pair.target).layers
        ),
    )


def _piece(pair: Pair, token_id: int) -> bytes:
    """The bytes of a token that is part of a character; none where its tokenizer spells bytes in its own way."""
    if pair.tokenizer is None:
        return b""
    spelled = pair.tokenizer.convert_ids_to_tokens(token_id)
    if spelled is None:
        return b""
    if spelled.startswith("<0x") and spelled.endswith(">"):  # byte fallback
        return bytes([int(spelled[3:-1], 16)])
    if all(character in _BYTE_OF for character in spelled):  # byte-level BPE
        return bytes(_BYTE_OF[character] for character in spelled)
    return b""
