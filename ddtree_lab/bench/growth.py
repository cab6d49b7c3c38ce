"""How time and memory of a verify pass grow, and with which exponent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ddtree_lab.bench.micro import ready, spread_fields
from ddtree_lab.bench.rows import Row
from ddtree_lab.bench.subjects import Subject, make_subject, random_hybrid
from ddtree_lab.bench.timing import interleaved, peak_bytes
from ddtree_lab.pair import Pair
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.verify import verify_tree

NODES = (16, 32, 64, 128, 256, 512, 1024)
PROMPTS = (128, 512, 2048, 8192)
DEPTHS = (1, 4, 16, 64)
LAYERS = (4, 8, 16, 32)


def bench_growth(pair: Pair, repeats: int = 5) -> Iterator[Row]:
    """A verify pass against its nodes, the prompt's tokens, the tree's depth and the target's layers."""
    subject = make_subject(pair.name, pair.target)
    yield from _rows("nodes", {n: (subject, subject.tree(n)) for n in NODES}, repeats)
    prompts = {tokens: make_subject(pair.name, pair.target, tokens) for tokens in PROMPTS}
    yield from _rows("prompt tokens", {n: (s, s.tree(33)) for n, s in prompts.items()}, repeats)
    yield from _rows("depth", {depth: (subject, branches(65, depth)) for depth in DEPTHS}, repeats)
    targets = {layers: make_subject("random", random_hybrid(128, layers, 2048)) for layers in LAYERS}
    yield from _rows("layers", {n: (s, s.tree(33)) for n, s in targets.items()}, repeats)


def branches(num_nodes: int, depth: int) -> DraftTree:
    """A root with chains of one length below it."""
    parents = [-1] + [i - 1 if (i - 1) % depth else 0 for i in range(1, num_nodes)]
    return DraftTree.from_parents(np.arange(num_nodes) + 4, parents)


def _rows(axis: str, cases: dict[int, tuple[Subject, DraftTree]], repeats: int) -> Iterator[Row]:
    def verify(subject: Subject, tree: DraftTree) -> Callable[[], Any]:
        return lambda: verify_tree(subject.target, subject.cache, tree)

    calls = {value: verify(*case) for value, case in cases.items()}
    timings = interleaved({str(value): ready(call) for value, call in calls.items()}, repeats)
    for value, (subject, _) in cases.items():
        yield {
            "bench": "growth", "subject": subject.label, "case": axis, "value": value,
            **spread_fields("seconds", timings.of(str(value))),
            "peak_bytes": peak_bytes(calls[value], subject.tensors()),
        }  # fmt: skip


def exponent(values: Sequence[float], costs: Sequence[float]) -> float:
    """The slope of log cost over log value, over the upper half of the values, where constants matter least."""
    half = len(values) // 2
    return float(np.polyfit(np.log(values[half:]), np.log(costs[half:]), 1)[0])
