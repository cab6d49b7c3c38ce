"""Rounds and traces made by hand, for the views."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

import ddtree_lab as dl
from ddtree_lab.trace import CacheLayer, Round, Trace

TEXTS = {
    0: "the",
    1: " cat",
    2: " dog",
    3: " sat",
    4: "\n",
    5: " ran",
    6: "é",
    9: "</script>",
    10: "[red]x[/red]",
}


def example_round() -> Round:
    """Five drafted tokens, two of them kept."""
    tree = dl.DraftTree.from_parents(
        [0, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 1, 3], [-1, 0, 1, 0, 3, 0], np.log([1, 0.5, 0.3, 0.4, 0.05, 0.24])
    )
    top = np.array([[1, 2], [3, 4], [0, 1], [5, 6], [0, 1], [0, 1]])
    best = np.log([[0.9, 0.05], [0.8, 0.1], [0.1, 0.05], [0.6, 0.3], [0.1, 0.05], [0.1, 0.05]])
    return Round(
        past_length=41,
        tree=tree,
        target_token_ids=(1, 3, 0, 5, 0, 0),
        target_log_probs=tuple(best[:, 0].tolist()),
        path=(0, 1, 3),
        emitted_token_ids=(1, 3, 5),
        stage_seconds={"draft": 0.002, "verify": 0.0125},
        token_target_log_probs=(np.nan, *np.log([0.9, 0.05, 0.8, 0.1, 0.3]).tolist()),
        target_top_ids=top,
        target_top_log_probs=best,
    )


def example_trace(*rounds: Round, texts: dict[int, str] | None = None) -> Trace:
    return Trace(
        pair="example",
        settings={"method": "ddtree", "tree_budget": 5, "temperature": 0.0},
        prompt_token_ids=(2, 4),
        first_token_id=0,
        rounds=rounds or (example_round(),),
        token_texts=texts or TEXTS,
        finish_reason="length",
        layers=(CacheLayer(0, "linear_attention", "snapshot"), CacheLayer(1, "full_attention", "crop")),
    )


def large_round(n: int, seed: int = 0, chain: bool = False) -> Round:
    """A round of `n` nodes whose target follows the last node's path."""
    chance = random.Random(seed)
    parents = [-1] + [i - 1 if chain else chance.randrange(max(0, i // 3), i) for i in range(1, n)]
    depths = np.zeros(n)
    for i in range(1, n):
        depths[i] = depths[parents[i]] + 1
    ids = list(range(n))  # no token twice, so that the path is the only one
    tree = dl.DraftTree.from_parents(ids, parents, [-1, *([0] * (n - 1))], -0.1 * depths)
    path = tree.path(n - 1)
    chosen = [n] * n
    for node, child in zip(path, path[1:], strict=False):
        chosen[node] = ids[child]
    return Round(7, tree, tuple(chosen), (-0.1,) * n, tuple(path), (*(ids[i] for i in path[1:]), n))


def ended_round() -> Round:
    """The example where the text ended on its second draft."""
    return replace(example_round(), path=(0, 1), emitted_token_ids=(1, 3))
