"""Checks of the cache's tensors after a round, KV, conv windows and recurrent state apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.doctor.checks.base import Hindrance, check, judge, needs, needs_recurrence
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.forcing import watched
from ddtree_lab.doctor.guarded import Guarded
from ddtree_lab.doctor.report import Finding
from ddtree_lab.doctor.truth import Known, cache_rows
from ddtree_lab.stages.tree import DraftTree

STAGES = ("commit", "verify", "mask", "cache")


def conv_kernel(exam: Examination) -> int:
    """K of the target's short convolutions, 4 where it has none."""
    return int(getattr(exam.config, "linear_conv_kernel_dim", 4) or 4)


def most_accepted(exam: Examination) -> int:
    """K + 3: past every window of the convolution."""
    return conv_kernel(exam) + 3


def committed(exam: Examination, port: Any, tree: DraftTree, path: Sequence[int]) -> Any:
    """A port's state after one round that accepts a path of the tree."""
    return after_rounds(exam, port, [(tree, path)])


def after_rounds(exam: Examination, port: Any, steps: Sequence[tuple[DraftTree, Sequence[int]]]) -> Any:
    """A port's state after rounds that each verify a tree and accept a path of it."""
    state = exam.prefilled(port)
    for tree, path in steps:
        port.verify(state, tree)
        state = port.commit(state, path)
    return state


Schedule = tuple[int, ...]  # drafts accepted in each of some rounds in a row
Case = tuple[Schedule, str, int, Tensor, float]  # rounds, tensor's name, layer, its numbers, its slack


def schedules(exam: Examination) -> list[Schedule]:
    """One round that accepts 0 to K + 3 drafts, and two in a row, each with something rejected."""
    return [*((accepted,) for accepted in range(most_accepted(exam) + 1)), (0, 1), (1, 0)]


def _fresh(exam: Examination, names: tuple[str, ...]) -> list[Case]:
    """What the tensors of a cache should hold after each schedule."""
    before, most = exam.material.before(), most_accepted(exam)
    spine = exam.material.spine(0, most + 1)
    truth, on_clean_input = exam.material.truth, _takes_clean_input(exam)
    truth.states([*before, *spine], on_clean_input=on_clean_input)  # first, for all others begin like it
    return [
        (rounds, name, layer, rows, slack)
        for rounds in schedules(exam)
        for name, layer, rows, slack in truth.states(
            [*before, *spine[: sum(rounds) + len(rounds)]], on_clean_input=on_clean_input
        )
        if name in names
    ]


def _takes_clean_input(exam: Examination) -> bool:
    """Whether the port runs prompt and tree (or path) as forwards that can be given clean input."""
    memo, material = exam.port.memo, exam.material
    if "takes_clean_input" not in memo:
        memo["takes_clean_input"] = False
        if material.has_layers:
            tree, before = material.tree, tuple(material.before())
            path = tree.path(2)
            tokens = (tuple(tree.token_ids.tolist()), tuple(tree.token_ids[path].tolist()))
            with watched(exam.target, {before: None, tokens[0]: None, tokens[1]: None}) as seen:
                committed(exam, exam.port, tree, path)
            memo["takes_clean_input"] = before in seen.outputs and any(t in seen.outputs for t in tokens)
    return bool(memo["takes_clean_input"])


def _held(exam: Examination, port: Guarded, names: tuple[str, ...]) -> list[Tensor]:
    """The same tensors of a port; all of them come from the same rounds, which are run once."""
    if "rounds" not in port.memo:
        port.memo["rounds"] = _rounds_with_clean_input(exam, port)
    return [rows for name, _, rows in port.memo["rounds"] if name in names]


def _rounds_with_clean_input(exam: Examination, port: Guarded) -> list[tuple[str, int, Tensor]]:
    """What a port's cache holds after each schedule, its layers given clean input where they can be."""
    material, most = exam.material, most_accepted(exam)
    held: list[tuple[str, int, Tensor]] = []
    for rounds in schedules(exam):
        clean: dict[tuple[int, ...], Tensor] = {}
        steps: list[tuple[DraftTree, Sequence[int]]] = []
        for accepted in rounds:
            done = sum(len(path) for _, path in steps)
            tree = material.comb(done, most)
            path = tree.path(2 * accepted)
            steps.append((tree, path))
            if _takes_clean_input(exam):
                clean |= material.clean_inputs(tree, material.before(done), path)
        with watched(exam.target, clean) if clean else nullcontext():
            held += cache_rows(port.cache(after_rounds(exam, port, steps)))
    return held


def _part_check(name: str, part: str, names: tuple[str, ...], detectors: str, question: str,
                unless: list[Hindrance], cause: str, fix: str) -> None:  # fmt: skip
    @check(name, "commit", detectors, question, cost=150, unless=[needs("cache"), *unless])
    def run(exam: Examination) -> Iterator[Finding]:
        cases = _fresh(exam, names)
        if not cases:  # a recurrent layer need not have a convolution, nor the other way round
            yield Finding(name, "skipped", "commit", symptom=f"the target's cache holds no {part}")
            return
        known = Known(torch.cat([(rows / slack).flatten() for *_, rows, slack in cases])[None], torch.ones(1))

        def probe(port: Any) -> Tensor:
            held = _held(exam, port, names)
            slacks = [slack for *_, slack in cases] + [1.0] * len(held)
            return torch.cat([(rows / slack).flatten() for rows, slack in zip(held, slacks, strict=False)])[
                None
            ]

        yield judge(
            exam, name, probe, known, STAGES,
            key=f"states: {name}",
            right=f"{part} after accepting 0 to {most_accepted(exam)} drafts, and after two rounds, "
            "as after a fresh prefill",
            wrong=lambda answer: _wrong_part(exam, name, part, cases, answer, cause, fix),
        )  # fmt: skip


def _wrong_part(exam: Examination, name: str, part: str, cases: list[Case], answer: Tensor, cause: str,
                fix: str) -> Finding:  # fmt: skip
    if answer.shape[1] != sum(rows.numel() for *_, rows, _ in cases):
        return Finding(
            name, "problem", "commit", symptom=f"the cache holds {part} of another size than a fresh prefill's",
            evidence={"numbers": answer.shape[1], "expected": sum(rows.numel() for *_, rows, _ in cases)},
            cause=cause, fix=fix,
        )  # fmt: skip
    by_rounds: dict[str, float] = {}
    layers = set()
    for (rounds, _, layer, rows, slack), held in zip(
        cases, answer[0].split([rows.numel() for *_, rows, _ in cases]), strict=True
    ):
        error = float((held - (rows / slack).flatten()).abs().max())
        accepted = " then ".join(map(str, rounds))
        by_rounds[accepted] = max(error, by_rounds.get(accepted, 0.0))
        if error > 1:
            layers.add(layer)
    bad = ", ".join(accepted for accepted, error in by_rounds.items() if error > 1)
    return Finding(
        name, "problem", "commit", tuple(sorted(layers)),
        symptom=f"after accepting {bad} drafts the {part} in the cache is not what a fresh prefill gives",
        evidence={"error_over_rounding_by_accepted_drafts": by_rounds},
        cause=cause, fix=fix,
    )  # fmt: skip


_part_check(
    "kv_rows", "KV", ("keys", "values"), "D1", "are the keys and values after a round the accepted path's",
    [], "other rows than the accepted path's were kept, or in another order",
    "append the accepted path's rows from the root down, and nothing else",
)  # fmt: skip
_part_check(
    "conv_windows", "conv window", ("conv_states",), "D5 D1", "are the conv windows after a round the accepted path's",
    [needs_recurrence], "the conv window holds inputs of rejected nodes, or misses accepted ones",
    "rebuild the window from the accepted path's pre-convolution inputs, then the committed window",
)  # fmt: skip
_part_check(
    "recurrent_states", "recurrent state", ("recurrent_states",), "D1 D15",
    "is the recurrent state after a round the accepted path's",
    [needs_recurrence], "the recurrent state holds what rejected nodes wrote, or was rounded",
    "put back the state from before the pass and replay the accepted path, or take it from the tree's factors; "
    "recurrent layers cannot be cropped",
)  # fmt: skip
