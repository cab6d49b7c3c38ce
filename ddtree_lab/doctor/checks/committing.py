"""Checks of what the state holds after a round: it must be what a fresh prefill would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.doctor.checks.base import check, judge, row_errors
from ddtree_lab.doctor.checks.states import STAGES, committed, most_accepted
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.report import Finding
from ddtree_lab.stages.cache import make_cache, sliding_windows
from ddtree_lab.stages.tree import DraftTree

NO_STATES = "give the port a cache(), and KV, conv and recurrent state are told apart"


def _next_tokens(exam: Examination, port: Any, cases: Sequence[tuple[DraftTree, list[int], int]]) -> Tensor:
    """Logits at a lone token after each committed path; a case is (tree, path, the token after it)."""
    rows = []
    for tree, path, token in cases:
        state = committed(exam, port, tree, path)
        rows.append(port.verify(state, DraftTree.from_parents([token], [-1]))[0])
    return torch.stack(rows)


@check(
    "rollback", "commit", "D1 D5 D25", "is the token after a round scored right, whatever was accepted", cost=50,
)  # fmt: skip
def rollback(exam: Examination) -> Iterator[Finding]:
    """Accepted 0 to K + 3 along the text, then along a wrong branch; the rest of the tree is rejected each time."""
    material, most = exam.material, most_accepted(exam)
    comb = material.comb(0, most)
    cases = [(comb, comb.path(2 * j), material.text[j]) for j in range(most + 1)]
    cases += [(material.tree, material.tree.path(node), material.prompt[-1]) for node in (3, 7)]
    texts = [[*material.before(), *tree.token_ids[path].tolist(), token] for tree, path, token in cases]
    known = material.truth.after(texts)

    def wrong(answer: Tensor) -> Finding:
        bad = [len(cases[i][1]) - 1 for i in (known.excess(answer) > 1).nonzero()[:, 0].tolist()]
        return Finding(
            "rollback", "problem", "commit",
            symptom=f"after accepting {sorted(set(bad))} drafts the next token is scored wrongly",
            evidence={
                **row_errors(known, answer),
                "accepted_drafts": [len(path) - 1 for _, path, _ in cases],
                **({} if exam.port.has("cache") else {"not_seen": NO_STATES}),
            },
            cause="what rejected nodes wrote is still in the state, or accepted rows are missing",
            fix="after each round the cache must equal a fresh prefill of the text; recurrent layers cannot be cropped",
        )  # fmt: skip

    yield judge(
        exam, "rollback", lambda port: _next_tokens(exam, port, cases), known, STAGES,
        right=f"after accepting 0 to {most} drafts the next token is right",
        wrong=wrong,
    )  # fmt: skip


def no_boundary(exam: Examination) -> str:
    windows = sorted(set(sliding_windows(make_cache(exam.target))))
    if not windows:
        return "the target has no sliding windows"
    room = len(exam.material.written) - 6
    return "" if windows[0] <= room else (
        f"the window of {windows[0]} is longer than prompt and text; give a prompt of more than {windows[0]} tokens"
    )  # fmt: skip


@check(
    "window_boundary", "commit", "D14 D25", "does rollback hold where the text outgrows a sliding window", cost=30,
    unless=[no_boundary],
)  # fmt: skip
def window_boundary(exam: Examination) -> Iterator[Finding]:
    """Rounds that start two tokens before each window is full, up to one after."""
    material, text = exam.material, exam.material.written
    windows = [w for w in sorted(set(sliding_windows(make_cache(exam.target)))) if w <= len(text) - 6]
    starts = [past for w in windows for past in range(max(2, w - 2), w + 2)]

    def tree_after(past: int) -> DraftTree:
        wrong = (text[past + 1] + 1) % material.vocab_size
        return DraftTree.from_parents([text[past], wrong, text[past + 1], text[past + 2]], [-1, 0, 0, 2])

    def probe(port: Any) -> Tensor:
        rows = []
        for past in starts:
            state = port.prefill(torch.tensor([text[:past]]))
            port.verify(state, tree_after(past))
            state = port.commit(state, [0, 2])
            rows.append(port.verify(state, DraftTree.from_parents([text[past + 2]], [-1]))[0])
        return torch.stack(rows)

    known = material.truth.after([text[: past + 3] for past in starts])
    yield judge(
        exam, "window_boundary", probe, known, STAGES,
        right=f"rounds that start with {starts} committed tokens leave the right state",
        wrong=lambda answer: Finding(
            "window_boundary", "problem", "commit", exam.layers_of("sliding_attention"),
            symptom="the state is wrong where the text outgrows a sliding window",
            evidence={"committed_tokens": starts, **row_errors(known, answer)},
            cause="a sliding layer has dropped rows that rejected nodes pushed out",
            fix="keep the rows from before the pass until the path is known; crop cannot bring them back",
        ),
    )  # fmt: skip


@check(
    "rounds_in_a_row", "commit", "D1 D4", "is one text scored alike whatever was accepted on the way", cost=20
)
def rounds_in_a_row(exam: Examination) -> Iterator[Finding]:
    """The target's own text by three schedules: nothing accepted, two a round, four a round."""
    material, length = exam.material, 9
    schedules = (1, 3, 5)  # tokens a round emits
    starts = [start for step in schedules for start in range(0, length, step)]
    known = material.truth.after([[*material.before(), *material.spine(0, start + 1)] for start in starts])

    def probe(port: Any) -> Tensor:
        return torch.cat([_forced(exam, port, length, step) for step in schedules])

    yield judge(
        exam, "rounds_in_a_row", probe, known, STAGES,
        right="three schedules of acceptance give the same logits",
        wrong=lambda answer: Finding(
            "rounds_in_a_row", "problem", "commit",
            symptom="the logits along one fixed text depend on what was accepted and rejected on the way",
            evidence=row_errors(known, answer),
            cause="something of earlier rounds stays in the state",
            fix="look at the first round whose error is above rounding; what it rejected is what stayed",
        ),
    )  # fmt: skip


def _forced(exam: Examination, port: Any, length: int, step: int) -> Tensor:
    """Root logits of each round when rounds commit `step` tokens of the text; wrong branches come first."""
    rows = []
    state = exam.prefilled(port)
    for start in range(0, length, step):
        accepted = min(step, length - start) - 1
        tree = exam.material.comb(start, max(1, accepted))
        rows.append(port.verify(state, tree)[0])
        state = port.commit(state, tree.path(2 * accepted))
    return torch.stack(rows)


@check("runs_in_a_row", "cache", "D18", "is a second prompt scored as if it were the first", cost=34)
def runs_in_a_row(exam: Examination) -> Iterator[Finding]:
    material = exam.material
    second = material.bushy_tree(3)
    known = material.known(second, material.before(3))

    def probe(port: Any) -> Tensor:
        port.commit(_verified(exam, port), material.tree.path(6))
        return port.verify(exam.prefilled(port, 3), second)

    yield judge(
        exam, "runs_in_a_row", probe, known, ("cache", *STAGES[:3]),
        right="a second run does not see the first",
        wrong=lambda answer: Finding(
            "runs_in_a_row", "problem", "cache",
            symptom="a prompt is scored otherwise after another prompt was run",
            evidence=row_errors(known, answer),
            cause="a buffer or a state of the first run is still in use in the second",
            fix="make every run's cache, masks and drafter context anew",
        ),
    )  # fmt: skip


def _verified(exam: Examination, port: Any) -> Any:
    state = exam.prefilled(port)
    port.verify(state, exam.material.tree)
    return state


@check(
    "text_by_drafter", "commit", "D4 D16",
    "is the text the same with a drafter that is always right and with one that never is", cost=20,
)  # fmt: skip
def text_by_drafter(exam: Examination) -> Iterator[Finding]:
    """The doctor's own loop around verify and commit: the text must be the target's own both times."""
    from ddtree_lab.doctor.checks.texts import judge_texts

    material, length = exam.material, 12

    def texts(port: Any) -> list[list[int]]:
        return [_written_with(exam, port, length, is_right) for is_right in (True, False)]

    yield judge_texts(
        exam, "text_by_drafter", texts, length, STAGES,
        right=f"{length} tokens, the same with both",
        wrong="the greedy text depends on what is drafted",
        cause="a rejected or accepted draft changes what the target says next",
        fix="make the state after each round independent of what was rejected; see the checks of the commit",
        expected=[material.text[:length]] * 2,
    )  # fmt: skip


def _written_with(exam: Examination, port: Any, length: int, is_right: bool) -> list[int]:
    """Greedy text of a port when its drafts are the target's own text, or carefully none of it."""
    material = exam.material
    state, anchor, written = exam.prefilled(port), material.prompt[-1], list[int]()
    draft: Callable[[int], tuple[list[int], list[int]]] = (
        _right_branch(exam) if is_right else _wrong_branches(exam)
    )
    while len(written) < length:
        tokens, parents = draft(len(written))
        tree = DraftTree.from_parents([anchor, *tokens], [-1, *parents])
        choices = port.verify(state, tree).argmax(-1).tolist()
        path = [0]
        while (child := tree.children(path[-1]).get(choices[path[-1]])) is not None:
            path.append(child)
        written += [choices[node] for node in path]
        state, anchor = port.commit(state, path), written[-1]
    return written[:length]


def _right_branch(exam: Examination) -> Callable[[int], tuple[list[int], list[int]]]:
    return lambda done: (exam.material.text[done : done + 3], [0, 1, 2])


def _wrong_branches(exam: Examination) -> Callable[[int], tuple[list[int], list[int]]]:
    vocab = exam.material.vocab_size
    return lambda done: ([(exam.material.text[done] + i) % vocab for i in (1, 2, 3)], [0, 0, 1])
