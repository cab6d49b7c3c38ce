"""The shape of a check, the register, and how a probe's answer is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ddtree_lab.doctor.bugs import Bug
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.guarded import PortError
from ddtree_lab.doctor.hypotheses import Probe, explain, observe
from ddtree_lab.doctor.references import addresses
from ddtree_lab.doctor.report import Finding
from ddtree_lab.doctor.truth import Known, row_distance
from ddtree_lab.drafter import DFlashDrafter

Hindrance = Callable[[Examination], str]


@dataclass(frozen=True)
class Check:
    """One named examination.

    Args:
        name: for `--check` and for findings.
        stage: the stage it is about.
        detectors: ids of the port-bug log's detectors.
        question: what it answers, in a line.
        cost: forwards of the target it takes at most, the port's own included.
        hindrance: why it does not apply to a port or pair; empty if it does.
    """

    name: str
    stage: str
    detectors: tuple[str, ...]
    question: str
    cost: int
    run: Callable[[Examination], Iterable[Finding]]
    hindrance: Hindrance


REGISTER: dict[str, Check] = {}


class Unseen(PortError):  # noqa: N818 (nothing went wrong)
    """The port works in a way that hooks on the target do not see; it may be right."""


def check(
    name: str, stage: str, detectors: str, question: str, *, cost: int, unless: Sequence[Hindrance] = ()
) -> Callable[[Callable[[Examination], Iterable[Finding]]], Callable[[Examination], Iterable[Finding]]]:
    """Register a check; within a room they run in the order in which they are written."""

    def hindrance(exam: Examination) -> str:
        return next((reason for reason in (unlike(exam) for unlike in unless) if reason), "")

    def register(run: Callable[[Examination], Iterable[Finding]]) -> Any:
        REGISTER[name] = Check(name, stage, tuple(detectors.split()), question, cost, run, hindrance)
        return run

    return register


def needs(method: str) -> Hindrance:
    return lambda exam: "" if exam.port.has(method) else f"the port has no {method}()"


def needs_dflash(exam: Examination) -> str:
    is_dflash = isinstance(exam.pair.drafter, DFlashDrafter)
    return "" if is_dflash else "the drafter is no DFlash drafter and reads no hidden states"


def needs_layers(exam: Examination) -> str:
    return "" if exam.material.has_layers else "the target's decoder layers cannot be found"


def needs_attention(exam: Examination) -> str:
    return "" if exam.attention_layers else "the target has no attention layers"


def needs_recurrence(exam: Examination) -> str:
    return "" if exam.recurrent_layers else "the target has no recurrent layers"


def judge(
    exam: Examination,
    name: str,
    probe: Probe,
    known: Known,
    stages: Sequence[str],
    *,
    right: str,
    wrong: Callable[[Tensor], Finding],
    key: str = "",
    passes: Callable[[Tensor], bool] | None = None,
) -> Finding:
    """Compare what a probe gives on the port with the truth, and find the cause of a difference.

    Args:
        stages: where the cause may be, the likeliest first; bugs of these stages are tried.
        right: what to say if all is well.
        wrong: the finding for a wrong answer, before its cause is known.
        key: names the probe where a check has several.
        passes: whether an answer that is not the known one is right all the same.
    """
    seen = observe(exam.port, probe)
    if isinstance(seen.failure, Unseen):
        reason = f"the port's {seen.failure.method} {seen.failure.reason}"
        return Finding(name, "skipped", REGISTER[name].stage, symptom=reason)
    if seen.failure is not None:
        finding = failed(name, seen.failure)
    else:
        assert seen.answer is not None
        excess = float("inf")
        if seen.answer.shape == known.values.shape:
            excess = max(known.excess(seen.answer).tolist(), default=0.0)  # a drafter may draft nothing
        if passes(seen.answer) if passes is not None else excess <= 1:
            evidence = {"error_over_rounding": excess} if passes is None else {}
            return Finding(name, "ok", REGISTER[name].stage, symptom=right, evidence=evidence)
        finding = wrong(seen.answer)
    return with_cause(exam, finding, explain(exam, key or name, seen, probe, stages, known.slack))


def row_errors(known: Known, answer: Tensor) -> dict[str, Any]:
    """Evidence: the largest error of each row, and what rounding explains."""
    if answer.shape != known.values.shape:
        return {"shape": list(answer.shape), "expected_shape": list(known.values.shape)}
    errors = row_distance(answer, known.values)
    return {
        "errors": [float(f"{e:.3g}") for e in errors],
        "rounding": [float(f"{s:.2g}") for s in known.slack],
    }


def failed(name: str, failure: PortError) -> Finding:
    """A port that raises or answers nonsense is a finding like any other."""
    return Finding(
        name, "problem", REGISTER[name].stage,
        symptom=f"the port's {failure.method} {failure.reason}",
        cause="the port cannot do what was asked of it",
        fix=f"call {failure.method} with the tree and prompt of this check on their own and follow the traceback",
    )  # fmt: skip


def follows(exam: Examination, finding: Finding) -> Finding:
    """The finding as a note: what was found before explains it."""
    names = ", ".join(bug.name for bug in exam.known)
    symptom = f"{finding.symptom}; follows from what was found before ({names})"
    return replace(finding, status="note", symptom=symptom, cause="", fix="")


def with_cause(exam: Examination, finding: Finding, bugs: tuple[Bug, ...] | None) -> Finding:
    """The finding with the cause that the matching bugs name; a consequence of known ones is a note."""
    if bugs is None:
        return finding
    if not bugs:
        return follows(exam, finding)
    exam.known.extend(bugs)
    kinds = {bug.layer_kind for bug in bugs} - {""}
    layers = tuple(sorted({i for kind in kinds for i in exam.layers_of(kind)})) or finding.layers
    return replace(
        finding,
        stage=bugs[0].stage,
        layers=layers,
        cause="; and ".join(bug.cause for bug in bugs),
        fix="; ".join(bug.fix for bug in bugs),
        bugs=tuple(bug.name for bug in bugs),
        references=addresses(reference for bug in bugs for reference in bug.references),
    )
