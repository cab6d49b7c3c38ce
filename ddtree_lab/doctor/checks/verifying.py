"""Checks of the verify pass: every node must be scored as if its path were the only text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree_lab.doctor.checks.base import check, follows, judge, row_errors
from ddtree_lab.doctor.examination import Examination, PortError
from ddtree_lab.doctor.report import Finding
from ddtree_lab.stages.forward import decoder_layers
from ddtree_lab.stages.tree import DraftTree

STAGES = ("cache", "mask", "verify")
MOVED = 1e-4  # relative change of a hidden row that is no rounding


@check("anchor_alone", "verify", "D26", "is the anchor alone scored as the target itself would", cost=3)
def anchor_alone(exam: Examination) -> Iterator[Finding]:
    tree = DraftTree.from_parents(exam.prompt[-1:], [-1])

    def probe(port: Any) -> Tensor:
        return port.verify(exam.prefilled(port), tree)

    yield judge(
        exam, "anchor_alone", probe, exam.truth_of(tree, exam.before()), STAGES,
        right="prefill and the first token are right",
        wrong=lambda answer: Finding(
            "anchor_alone", "problem", "verify",
            symptom="already the first token after the prompt is wrong, without any tree",
            evidence={"argmax": int(answer[0].argmax()), "target": int(exam.truth(exam.prompt).argmax())},
            cause="the prefill, or what the cache holds after it, is wrong",
            fix="compare one forward of the prompt with and without the cache",
        ),
    )  # fmt: skip


@check("chain", "verify", "D24 D2", "is a tree without branches scored like plain text", cost=12)
def chain(exam: Examination) -> Iterator[Finding]:
    spine = [exam.prompt[-1], *exam.text[:7]]
    tree = DraftTree.from_parents(spine, np.arange(-1, len(spine) - 1))

    def probe(port: Any) -> Tensor:
        return port.verify(exam.prefilled(port), tree)

    yield judge(
        exam, "chain", probe, exam.truth_of(tree, exam.before()), STAGES,
        right="a chain of 8 is right",
        wrong=partial(_wrong_nodes, exam, "chain", tree),
    )  # fmt: skip


@check(
    "node_against_path", "verify", "D3 D5 D6 D8", "is each node of a branching tree scored as its path alone would be",
    cost=24,
)  # fmt: skip
def node_against_path(exam: Examination) -> Iterator[Finding]:
    def probe(port: Any) -> Tensor:
        return port.verify(exam.prefilled(port), exam.tree)

    yield judge(
        exam, "node_against_path", probe, exam.truth_of(exam.tree, exam.before()), STAGES,
        right=f"all nodes within {exam.tolerance:.2g} of their paths alone",
        wrong=partial(_wrong_nodes, exam, "node_against_path", exam.tree),
    )  # fmt: skip


def _mirrored(tree: DraftTree) -> DraftTree:
    """Another tree of the same size: its branches come in another order."""
    return DraftTree.from_parents(tree.token_ids, [-1, 0, 1, 1, 0, 4, 4, 6, 2])


def _wrong_nodes(exam: Examination, name: str, tree: DraftTree, answer: Tensor) -> Finding:
    """Which nodes are wrong, and what the first wrong one says."""
    truth = exam.truth_of(tree, exam.before())
    errors = (answer - truth).abs().amax(-1)
    wrong = (errors > exam.tolerance).nonzero()[:, 0].tolist()
    same = int((answer.argmax(-1) == truth.argmax(-1)).sum())
    first = wrong[0]
    cause, fix = _signature(tree, wrong)
    return Finding(
        name, "problem", "verify", _leaking_layers(exam),
        symptom=f"{len(wrong)} of {len(truth)} nodes are wrong, the first is node {first}",
        evidence={
            "errors": [round(float(error), 4) for error in errors],
            "tolerance": exam.tolerance,
            "argmax_as_the_target": f"{same} of {len(truth)}",
        },
        cause=cause,
        fix=fix,
    )  # fmt: skip


def _leaking_layers(exam: Examination) -> tuple[int, ...]:
    """Layers of the kind in which the leak starts, if it can be seen."""
    with suppress(PortError, ValueError):
        leak = leaks(exam)
        if leak is not None and leak.layers:
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


def unhooked(exam: Examination) -> str:
    try:
        decoder_layers(exam.target)
    except ValueError:
        return "the target's layers cannot be found"
    return ""


@check(
    "layer_attribution", "verify", "D7", "which layers let a node see what is not on its path", cost=4,
    unless=[unhooked],
)  # fmt: skip
def layer_attribution(exam: Examination) -> Iterator[Finding]:
    """Change the token of node 1, a leaf: no other node's row may move in any layer."""
    try:
        leak = leaks(exam)
    except PortError as error:
        yield Finding("layer_attribution", "skipped", "verify", symptom=f"the port's {error}")
        return
    if leak is None:
        reason = "the port does not run the nodes as the rows of one pass through the target's layers"
        yield Finding("layer_attribution", "skipped", "verify", symptom=reason)
        return
    if not leak.layers:
        right = "no row moves that does not hang below the change"
        yield Finding("layer_attribution", "ok", "verify", symptom=right)
        return
    kind = exam.kinds[leak.layers[0]]
    finding = Finding(
        "layer_attribution", "problem", "verify", exam.layers_of(kind),
        symptom=f"nodes {list(leak.nodes)} move from layer {leak.layers[0]} ({kind}) on when the token of an "
        "unrelated sibling changes",
        evidence={"first_layer": leak.layers[0], "matrix": leak.matrix},
        cause=f"{kind} layers let nodes see what is not on their path",
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


def leaks(exam: Examination) -> Leak | None:
    """Move node 1's token and see what moves with it; None if the pass is not rows through the target's layers."""
    tree = exam.tree
    tokens = tree.token_ids.copy()
    tokens[1] = (tokens[1] + 1) % exam.pair.embeddings.vocab_size
    before = _hidden_rows(exam, tree)
    after = _hidden_rows(exam, replace(tree, token_ids=tokens, _children=None))
    if before is None or after is None:
        return None
    moved = (after - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-9)  # [layers, nodes]
    moved = moved.where(moved > max(MOVED, 10 * exam.noise / exam.scale), 0.0)
    elsewhere = moved.clone()
    elsewhere[:, 1] = 0
    matrix = {
        "layers": list(range(len(moved))),
        "kinds": exam.kinds,
        "moved": [[round(value, 4) for value in row] for row in moved.tolist()],
    }
    return Leak(
        tuple((elsewhere > 0).any(1).nonzero()[:, 0].tolist()),
        tuple((elsewhere > 0).any(0).nonzero()[:, 0].tolist()),
        matrix,
    )


def _hidden_rows(exam: Examination, tree: DraftTree) -> Tensor | None:
    """What each decoder layer returns for the nodes, [layers, nodes, hidden]; None if that is not what runs."""
    rows: dict[int, list[Tensor]] = {}

    def keep(layer_idx: int, module: Any, args: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        rows.setdefault(layer_idx, []).append(hidden.detach().float().cpu())

    state = exam.prefilled(exam.port)
    layers = decoder_layers(exam.target)
    with ExitStack() as stack:
        for i, layer in enumerate(layers):
            handle = layer.register_forward_hook(partial(keep, i))
            stack.callback(handle.remove)
        exam.port.verify(state, tree)
    once = all(len(rows.get(i, ())) == 1 for i in range(len(layers)))
    if not once or any(tuple(r[0].shape[:2]) != (1, tree.num_nodes) for r in rows.values()):
        return None
    return torch.stack([rows[i][0][0] for i in range(len(layers))])


@check("verifying_twice", "verify", "D18", "does verifying leave the state as it was", cost=4)
def verifying_twice(exam: Examination) -> Iterator[Finding]:
    """Another tree of the same size first: what is left over of it shows in the second."""

    def probe(port: Any) -> Tensor:
        state = exam.prefilled(port)
        port.verify(state, _mirrored(exam.tree))
        return port.verify(state, exam.tree)

    truth = exam.truth_of(exam.tree, exam.before())
    yield judge(
        exam, "verifying_twice", probe, truth, STAGES,
        right="a second verify of the same state does not see the first",
        wrong=lambda answer: Finding(
            "verifying_twice", "problem", "verify",
            symptom="a tree is scored otherwise after another one was verified on the same state",
            evidence=row_errors(exam, answer, truth),
            cause="the verify pass writes into the state it reads, or a buffer of the first tree is still in use",
            fix="work on a fork of the cache, or restore it before returning; make mask and positions anew",
        ),
    )  # fmt: skip
