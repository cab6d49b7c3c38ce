"""Checks of the verify pass: every node must be scored as if its path were the only text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from ddtree_lab.doctor.checks.base import Unseen, check, follows, judge, needs_layers, row_errors
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.forcing import watched
from ddtree_lab.doctor.guarded import PortError
from ddtree_lab.doctor.report import Finding
from ddtree_lab.doctor.truth import Known, row_distance
from ddtree_lab.stages.tree import DraftTree

STAGES = ("mask", "verify", "cache")


@check("anchor_alone", "verify", "D26", "is the anchor alone scored as the target itself would", cost=4)
def anchor_alone(exam: Examination) -> Iterator[Finding]:
    tree = DraftTree.from_parents(exam.material.prompt[-1:], [-1])

    def probe(port: Any) -> Tensor:
        return port.verify(exam.prefilled(port), tree)

    known = exam.material.known(tree, exam.material.before())
    yield judge(
        exam, "anchor_alone", probe, known, STAGES,
        right="prefill and the first token are right",
        wrong=lambda answer: Finding(
            "anchor_alone", "problem", "verify",
            symptom="already the first token after the prompt is wrong, without any tree",
            evidence={
                **row_errors(known, answer),
                "argmax": int(answer[0].argmax()), "target": int(known.values[0].argmax()),
            },
            cause="the prefill, or what the cache holds after it, is wrong",
            fix="compare one forward of the prompt with and without the cache",
        ),
    )  # fmt: skip


@check("chain", "verify", "D24 D2", "is a tree without branches scored like plain text", cost=4)
def chain(exam: Examination) -> Iterator[Finding]:
    spine = exam.material.spine(0, 8)
    tree = DraftTree.from_parents(spine, np.arange(-1, len(spine) - 1))

    def probe(port: Any) -> Tensor:
        return port.verify(exam.prefilled(port), tree)

    known = exam.material.known(tree, exam.material.before())
    yield judge(
        exam, "chain", probe, known, STAGES,
        right="a chain of 8 is right",
        wrong=partial(_wrong_nodes, exam, "chain", tree, known),
    )  # fmt: skip


@check(
    "layer_by_layer", "verify", "D3 D5 D7", "given clean input, which layers answer otherwise than for the path alone",
    cost=30, unless=[needs_layers],
)  # fmt: skip
def layer_by_layer(exam: Examination) -> Iterator[Finding]:
    """The sharpest check: no error of one layer reaches another, nor does its rounding."""
    material, tree = exam.material, exam.material.tree
    rows = material.layer_rows(tree, material.before())
    known = Known(rows.outputs.flatten(0, 1), rows.slack.flatten())

    def wrong(answer: Tensor) -> Finding:
        excess = known.excess(answer).unflatten(0, rows.slack.shape)  # [layer, node]
        layers = tuple((excess > 1).any(1).nonzero()[:, 0].tolist())
        nodes = (excess > 1).any(0).nonzero()[:, 0].tolist()
        kinds = ", ".join(sorted({exam.kinds[i] for i in layers}))
        return Finding(
            "layer_by_layer", "problem", "verify", layers,
            symptom=f"on clean input {kinds} layers answer wrongly for nodes {nodes}",
            evidence={
                "largest_error_over_rounding": float(excess.max()),
                "matrix": _matrix(exam, _relative(answer - known.values, known.values, rows.slack.shape),
                                  "error of each layer's answer on clean input, by node"),
            },
            cause=_signature(tree, nodes)[0],
            fix=_signature(tree, nodes)[1],
        )  # fmt: skip

    yield judge(
        exam, "layer_by_layer", lambda port: layer_answers(exam, port, tree).flatten(0, 1), known, STAGES,
        right=f"{len(exam.kinds)} layers × {tree.num_nodes} nodes within rounding",
        wrong=wrong,
    )  # fmt: skip


def layer_answers(exam: Examination, port: Any, tree: DraftTree) -> Tensor:
    """What each layer answers for the nodes when it is given clean input, [layer, node, hidden]."""
    before, tokens = exam.material.before(), tuple(tree.token_ids.tolist())
    with watched(exam.target, exam.material.clean_inputs(tree, before)) as seen:
        port.verify(exam.prefilled(port), tree)
    rows, prompt = (seen.rows(of, len(exam.kinds)) for of in (tokens, tuple(before)))
    if rows is None or prompt is None or rows.shape[1] != tree.num_nodes:
        raise Unseen(
            "verify", "does not run the tree's nodes as the rows of one pass through the target's layers"
        )
    return rows


def _relative(apart: Tensor, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    return (apart.norm(dim=-1) / rows.norm(dim=-1).clamp(min=1e-9)).unflatten(0, shape)


def _matrix(exam: Examination, values: Tensor, caption: str) -> dict[str, Any]:
    """Layers × nodes, for the heat map."""
    return {
        "layers": list(range(len(values))),
        "kinds": exam.kinds,
        "moved": [[round(value, 4) for value in row] for row in values.tolist()],
        "caption": caption,
    }


@check(
    "node_against_path", "verify", "D3 D5 D6 D8", "is each node of a branching tree scored as its path alone would be",
    cost=22,
)  # fmt: skip
def node_against_path(exam: Examination) -> Iterator[Finding]:
    def probe(port: Any) -> Tensor:
        return port.verify(exam.prefilled(port), exam.material.tree)

    known = exam.material.known(exam.material.tree, exam.material.before())
    yield judge(
        exam, "node_against_path", probe, known, STAGES,
        right=f"all {exam.material.tree.num_nodes} nodes within rounding of their paths alone",
        wrong=partial(_wrong_nodes, exam, "node_against_path", exam.material.tree, known),
    )  # fmt: skip


def _wrong_nodes(exam: Examination, name: str, tree: DraftTree, known: Known, answer: Tensor) -> Finding:
    """Which nodes are wrong, and what the first wrong one says."""
    wrong = (known.excess(answer) > 1).nonzero()[:, 0].tolist()
    same = int((answer.argmax(-1) == known.values.argmax(-1)).sum())
    cause, fix = _signature(tree, wrong)
    gap = known.values[wrong[0]].topk(2).values
    return Finding(
        name, "problem", "verify", _leaking_layers(exam),
        symptom=f"{len(wrong)} of {tree.num_nodes} nodes are wrong, the first is node {wrong[0]}",
        evidence={
            **row_errors(known, answer),
            "argmax_as_the_target": f"{same} of {tree.num_nodes}",
            "gap_at_the_first": float(gap[0] - gap[1]),
        },
        cause=cause,
        fix=fix,
    )  # fmt: skip


def _leaking_layers(exam: Examination) -> tuple[int, ...]:
    """Layers of the kind in which a leak starts, if it can be seen."""
    with suppress(PortError, ValueError):
        leak = leaks(exam)
        if leak.layers:
            return exam.layers_of(exam.kinds[leak.layers[0]])
    return ()


def _signature(tree: DraftTree, wrong: list[int]) -> tuple[str, str]:
    """Cause and fix as far as the pattern of wrong nodes tells."""
    siblings = [i for i in range(2, tree.num_nodes) if tree.parents[i] != i - 1]
    if siblings and wrong[0] >= siblings[0]:
        return (
            "every node before the first sibling is right: something runs the nodes in storage order",
            "give each layer the tree: masks and positions for attention, the parent's state for recurrences",
        )
    if wrong[0] == 0:
        return (
            "already the root is wrong: the committed context, the mask of its rows or the positions are",
            "check past_length, the mask's convention and that position ids start at past_length",
        )
    return ("nodes deeper in the tree are wrong", "check positions, the mask and the convolution windows")


@check(
    "layer_attribution", "verify", "D7", "which layers let a node see what is not on its path", cost=10,
    unless=[needs_layers],
)  # fmt: skip
def layer_attribution(exam: Examination) -> Iterator[Finding]:
    """Change the token of node 1, a leaf: no other node's row may move in any layer."""
    try:
        leak = leaks(exam)
    except PortError as failure:
        yield Finding("layer_attribution", "skipped", "verify", symptom=f"the port's verify {failure.reason}")
        return
    if not leak.layers:
        right = "no row moves that does not hang below the change"
        yield Finding("layer_attribution", "ok", "verify", symptom=right)
        return
    kinds = ", ".join(sorted({exam.kinds[i] for i in leak.layers}))
    finding = Finding(
        "layer_attribution", "problem", "verify", leak.layers,
        symptom=f"nodes {list(leak.nodes)} move in {kinds} layers when the token of an unrelated sibling changes",
        evidence={"matrix": leak.matrix},
        cause=f"{kinds} layers let nodes see what is not on their path",
        fix="give these layers the tree: a mask for attention, the parent's state and ancestors' windows "
        "for recurrences",
    )  # fmt: skip
    yield follows(exam, finding) if exam.known else finding


@dataclass(frozen=True)
class Leak:
    """Which rows move where they must not.

    Args:
        layers: those in which a node moves that is not the changed one, nor below it.
        nodes: such nodes.
        matrix: relative movement, layers × nodes, with the layers' kinds.
    """

    layers: tuple[int, ...]
    nodes: tuple[int, ...]
    matrix: dict[str, Any]


def leaks(exam: Examination) -> Leak:
    """Change node 1's token and see in which layers, each on clean input, other nodes move with it.

    Raises:
        PortError: the port fails, or does not run the nodes as rows of one pass through the layers.
    """
    tree, before = exam.material.tree, exam.material.before()
    tokens = tree.token_ids.copy()
    tokens[1] = (tokens[1] + 1) % exam.material.vocab_size
    answer = layer_answers(exam, exam.port, tree)
    changed = layer_answers(exam, exam.port, replace(tree, token_ids=tokens, _children=None))
    slack = exam.material.layer_rows(tree, before).slack
    shape = slack.shape
    moves = row_distance(changed.flatten(0, 1), answer.flatten(0, 1)).unflatten(0, shape) > slack
    moves[:, 1] = False
    relative = _relative((changed - answer).flatten(0, 1), answer.flatten(0, 1), shape)
    shown = relative.where(moves, 0.0)
    shown[:, 1] = relative[:, 1]
    caption = "how far each node's row moves in each layer when node 1's token is changed"
    return Leak(
        tuple(moves.any(1).nonzero()[:, 0].tolist()),
        tuple(moves.any(0).nonzero()[:, 0].tolist()),
        _matrix(exam, shown, caption),
    )


def _mirrored(tree: DraftTree) -> DraftTree:
    """Another tree of the same size: its branches come in another order."""
    return DraftTree.from_parents(tree.token_ids, [-1, 0, 1, 1, 0, 4, 4, 6, 2])


@check("verifying_twice", "verify", "D18", "does verifying leave the state as it was", cost=3)
def verifying_twice(exam: Examination) -> Iterator[Finding]:
    """Another tree of the same size first: what is left over of it shows in the second."""
    tree = exam.material.tree

    def probe(port: Any) -> Tensor:
        state = exam.prefilled(port)
        port.verify(state, _mirrored(tree))
        return port.verify(state, tree)

    known = exam.material.known(tree, exam.material.before())
    yield judge(
        exam, "verifying_twice", probe, known, STAGES,
        right="a second verify of the same state does not see the first",
        wrong=lambda answer: Finding(
            "verifying_twice", "problem", "verify",
            symptom="a tree is scored otherwise after another one was verified on the same state",
            evidence=row_errors(known, answer),
            cause="the verify pass writes into the state it reads, or a buffer of the first tree is still in use",
            fix="work on a fork of the cache, or restore it before returning; make mask and positions anew",
        ),
    )  # fmt: skip
