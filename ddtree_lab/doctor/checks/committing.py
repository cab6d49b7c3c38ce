"""Checks of what the state holds after a round: it must be what a fresh prefill would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ddtree_lab.compat import layer_tensors
from ddtree_lab.doctor.checks.base import check, judge, needs, row_errors
from ddtree_lab.doctor.examination import NOISE_FACTOR, NOISE_FLOOR, Examination
from ddtree_lab.doctor.hypotheses import distance
from ddtree_lab.doctor.report import Finding
from ddtree_lab.stages.cache import make_cache
from ddtree_lab.stages.forward import prefill, run_target
from ddtree_lab.stages.tree import DraftTree

STAGES = ("cache", "mask", "verify", "commit")
NO_CACHE = {"cache": "not examined: the port has no cache()"}
PARTS = {"keys": "KV", "values": "KV", "conv_states": "conv", "recurrent_states": "recurrent"}


def _committed(exam: Examination, port: Any, path: Sequence[int]) -> Any:
    """A port's state after one round that accepts a path of the tree."""
    state = exam.prefilled(port)
    port.verify(state, exam.tree)
    return port.commit(state, path)


def _text_after(exam: Examination, path: Sequence[int]) -> list[int]:
    return [*exam.before(), *exam.tree.token_ids[list(path)].tolist()]


def _next_anchor(exam: Examination, path: Sequence[int]) -> DraftTree:
    """A lone root after a committed path: the target's own token there."""
    return DraftTree.from_parents([int(exam.truth(_text_after(exam, path)).argmax())], [-1])


def _truth_after(exam: Examination, paths: Sequence[Sequence[int]]) -> Tensor:
    return torch.stack(
        [exam.truth([*_text_after(exam, p), int(_next_anchor(exam, p).token_ids[0])]) for p in paths]
    )


@check(
    "rollback", "commit", "D1 D5 D25", "does the state after a round equal a fresh prefill, whatever was accepted",
    cost=40,
)  # fmt: skip
def rollback(exam: Examination) -> Iterator[Finding]:
    """Accepted 0, 1, … along both long branches; the rest of the tree is rejected each time."""
    paths = [exam.tree.path(node) for node in (0, 2, 3, 4, 6, 7, 8)]
    truth = _truth_after(exam, paths)

    def probe(port: Any) -> Tensor:
        return torch.stack([port.verify(_committed(exam, port, p), _next_anchor(exam, p))[0] for p in paths])

    def wrong(answer: Tensor) -> Finding:
        errors = (answer - truth).abs().amax(-1)
        differences = _differences(exam, paths[1]) if exam.port.has("cache") else {}
        bad = [len(paths[i]) - 1 for i in range(len(paths)) if float(errors[i]) > exam.tolerance]
        return Finding(
            "rollback", "problem", "commit",
            tuple(i for i, parts in differences.items() if max(parts.values()) > 1e-2),
            symptom=f"after accepting {sorted(set(bad))} drafts the next token is scored wrongly",
            evidence={
                "error_by_accepted_drafts": {
                    f"{len(p) - 1} ({p[-1]})": round(float(e), 4) for p, e in zip(paths, errors, strict=True)
                },
                "tolerance": exam.tolerance,
                **({"state_error_by_part": _by_part(differences)} if differences else NO_CACHE),
            },
            cause="what rejected nodes wrote is still in the state, or accepted rows are missing",
            fix="after each round the cache must equal a fresh prefill of the text; recurrent layers cannot be cropped",
        )  # fmt: skip

    yield judge(
        exam, "rollback", probe, truth, STAGES,
        right=f"after accepting 0 to {max(map(len, paths)) - 1} drafts the next token is right",
        wrong=wrong,
    )  # fmt: skip


def _fresh_cache(exam: Examination, text: Sequence[int]) -> Cache:
    cache = make_cache(exam.target)
    prefill(exam.target, torch.tensor([list(text)]), cache)
    exam.num_forwards += 1
    return cache


def _flat(cache: Cache) -> Tensor:
    """All numbers a cache holds, in one row."""
    tensors = (t for layer in cache.layers for t in layer_tensors(layer).values())
    return torch.cat([t.float().cpu().flatten() for t in tensors])


def _differences(exam: Examination, path: Sequence[int]) -> dict[int, dict[str, float]]:
    """Layer → part → distance of the port's cache after a path from a fresh prefill's."""
    cache = exam.port.cache(_committed(exam, exam.port, path))
    fresh = _fresh_cache(exam, _text_after(exam, path))
    found: dict[int, dict[str, float]] = {}
    for i, (have, want) in enumerate(zip(cache.layers, fresh.layers, strict=False)):
        held = layer_tensors(have)
        for name, tensor in layer_tensors(want).items():
            part = PARTS.get(name.partition("[")[0], name)
            error = _distance_or_inf(held.get(name), tensor)
            found.setdefault(i, {})[part] = max(error, found.get(i, {}).get(part, 0.0))
    return found


def _distance_or_inf(have: Tensor | None, want: Tensor) -> float:
    if have is None or have.shape != want.shape:
        return float("inf")
    return distance(have.float().cpu(), want.float().cpu())


def _by_part(differences: dict[int, dict[str, float]]) -> dict[str, float]:
    """KV, convolution and recurrent state apart, the worst of all layers."""
    worst: dict[str, float] = {}
    for parts in differences.values():
        worst.update({part: max(error, worst.get(part, 0.0)) for part, error in parts.items()})
    return worst


@check(
    "state_after_commit", "commit", "D1", "do the cache's tensors after a commit equal a fresh prefill's", cost=6,
    unless=[needs("cache")],
)  # fmt: skip
def state_after_commit(exam: Examination) -> Iterator[Finding]:
    path = exam.tree.path(6)

    text = _text_after(exam, path)
    truth = _flat(_fresh_cache(exam, text))
    limit = _state_tolerance(exam, text, truth)

    def probe(port: Any) -> Tensor:
        return _flat(port.cache(_committed(exam, port, path)))

    def wrong(answer: Tensor) -> Finding:
        differences = _differences(exam, path)
        return Finding(
            "state_after_commit", "problem", "commit",
            tuple(i for i, parts in differences.items() if max(parts.values()) > limit),
            symptom="the cache after a commit is not what a prefill of the same text gives",
            evidence={"by_layer": differences, "tolerance": limit},
            cause="the commit keeps other rows or states than the accepted path's",
            fix="compare the tensors named above with a fresh prefill after each commit",
        )  # fmt: skip

    yield judge(
        exam, "state_after_commit", probe, truth, STAGES, tolerance=limit,
        right=f"every tensor within {limit:.2g}", wrong=wrong,
    )  # fmt: skip


def _state_tolerance(exam: Examination, text: Sequence[int], truth: Tensor) -> float:
    """The same text run one token at a time: what rounding alone does to the tensors."""
    cache = _fresh_cache(exam, text[:-4])
    for token in text[-4:]:
        run_target(exam.target, torch.tensor([[token]]), cache)
    exam.num_forwards += 4
    return max(NOISE_FACTOR * distance(_flat(cache), truth), NOISE_FLOOR * float(truth.abs().max()))


@check(
    "rounds_in_a_row", "commit", "D1 D4", "is one text scored alike whatever was accepted on the way", cost=30
)
def rounds_in_a_row(exam: Examination) -> Iterator[Finding]:
    """The target's own text by three schedules: nothing accepted, two a round, four a round."""
    text = [exam.prompt[-1], *exam.text]
    length = 9

    def probe(port: Any) -> Tensor:
        return torch.cat([_forced(exam, port, text[:length], step) for step in (1, 3, 5)])

    rows = [exam.truth([*exam.before(), *text[: i + 1]]) for i in range(length)]
    truth = torch.cat([torch.stack([rows[i] for i in _anchors(length, step)]) for step in (1, 3, 5)])
    yield judge(
        exam, "rounds_in_a_row", probe, truth, STAGES,
        right="three schedules of acceptance give the same logits",
        wrong=lambda answer: Finding(
            "rounds_in_a_row", "problem", "commit",
            symptom="the logits along one fixed text depend on what was accepted and rejected on the way",
            evidence=row_errors(exam, answer, truth),
            cause="something of earlier rounds stays in the state",
            fix="look at the first round whose error is above the tolerance; what it rejected is what stayed",
        ),
    )  # fmt: skip


def _anchors(length: int, step: int) -> list[int]:
    """Indices of the text at which rounds start, if each emits `step` tokens."""
    return list(range(0, length, step))


def _forced(exam: Examination, port: Any, text: list[int], step: int) -> Tensor:
    """Root logits of each round when rounds commit `step` tokens of the text; wrong branches come first."""
    rows = []
    state = exam.prefilled(port)
    vocab = exam.pair.embeddings.vocab_size
    for start in _anchors(len(text), step):
        taken = text[start : start + step]
        wrong = [(token + 1) % vocab for token in taken]
        tokens = [taken[0], wrong[0], *taken[1:], wrong[-1]]
        parents = [
            -1,
            0,
            *([0] if len(taken) > 1 else []),
            *range(2, len(taken)),
            0 if len(taken) == 1 else 1,
        ]
        tree = DraftTree.from_parents(tokens, parents)
        rows.append(port.verify(state, tree)[0])
        state = port.commit(state, [0, *range(2, len(taken) + 1)])
    return torch.stack(rows)


@check("runs_in_a_row", "cache", "D18", "is a second prompt scored as if it were the first", cost=8)
def runs_in_a_row(exam: Examination) -> Iterator[Finding]:
    second = exam.bushy_tree(3)
    truth = exam.truth_of(second, exam.before(3))

    def probe(port: Any) -> Tensor:
        state = exam.prefilled(port)
        port.verify(state, exam.tree)
        port.commit(state, exam.tree.path(6))
        return port.verify(exam.prefilled(port, 3), second)

    yield judge(
        exam, "runs_in_a_row", probe, truth, STAGES,
        right="a second run does not see the first",
        wrong=lambda answer: Finding(
            "runs_in_a_row", "problem", "cache",
            symptom="a prompt is scored otherwise after another prompt was run",
            evidence=row_errors(exam, answer, truth),
            cause="a buffer or a state of the first run is still in use in the second",
            fix="make every run's cache, masks and drafter context anew",
        ),
    )  # fmt: skip
