"""Run the checks on a port and say what they mean together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddtree_lab.doctor.checks import CHECKS
from ddtree_lab.doctor.checks.base import failed, follows
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.guarded import SECONDS_PER_CALL, PortError
from ddtree_lab.doctor.material import Material
from ddtree_lab.doctor.report import Finding, Report
from ddtree_lab.pair import Pair, Prompt, bundled_prompts
from ddtree_lab.records import ranges
from ddtree_lab.threads import fitting_threads

LOW_EMITTED_TOKENS = 2.0  # a drafter below this on clean states is itself the reason
NUM_OTHER_PROMPTS = 3
GENERIC_PROMPT = "Count from three to twelve and say which of the numbers are even."


def diagnose(
    pair: Pair,
    port: Any = None,
    checks: Sequence[str] | None = None,
    *,
    prompt: str | Sequence[int] | torch.Tensor | None = None,
    seconds_per_call: float = SECONDS_PER_CALL,
    on_check: Callable[[str], None] | None = None,
) -> Report:
    """Examine a port, stage by stage.

    Args:
        pair: target and drafter the port runs.
        port: an object with `prefill`, `verify`, `commit` and perhaps `draft`, `cache`, `generate`
            (see `Port`); None for the built-in one.
        checks: names of the checks to run; all by default.
        prompt: text or token ids to examine it on; a bundled or a generic one by default.
        seconds_per_call: a call of the port that takes longer is stopped (in the main thread, on Unix).
        on_check: is told each check's name before it runs.

    Raises:
        ValueError: an unknown check, or a prompt of fewer than two tokens.
        TypeError: the port lacks one of the three methods.
    """
    names = _chosen(checks)
    _check_port(port)
    material = material_for(pair, prompt)
    return examine(material, port, names, seconds_per_call=seconds_per_call, on_check=on_check)


def material_for(pair: Pair, prompt: str | Sequence[int] | torch.Tensor | None = None) -> Material:
    """What ports of a pair are tried on; several can be examined on one."""
    ids, message = _prompt(pair, prompt)
    return Material(pair, ids, _other_prompts(pair, prompt), message)


def examine(
    material: Material,
    port: Any = None,
    checks: Sequence[str] | None = None,
    *,
    seconds_per_call: float = SECONDS_PER_CALL,
    on_check: Callable[[str], None] | None = None,
) -> Report:
    """`diagnose` on material that is there already."""
    began, forwards = time.perf_counter(), material.truth.num_forwards
    exam = Examination(material, port, seconds_per_call)
    findings: list[Finding] = []
    with fitting_threads(exam.target):
        for name in _chosen(checks):
            if on_check is not None:
                on_check(name)
            findings += _run(exam, name)
    subject = "the built-in port" if port is None else type(port).__name__
    return Report(
        subject=f"{subject} on {material.pair.name}",
        verdict=verdict(findings, exam),
        findings=tuple(findings),
        kinds=tuple(exam.kinds),
        num_forwards=material.truth.num_forwards - forwards,
        seconds=time.perf_counter() - began,
    )


def _chosen(checks: Sequence[str] | None) -> list[str]:
    unknown = [name for name in checks or () if name not in CHECKS]
    if unknown:
        raise ValueError(f"checks has {unknown}, which are no checks; choose from {', '.join(CHECKS)}.")
    return [name for name in CHECKS if checks is None or name in checks]


def _check_port(port: Any) -> None:
    if port is None:
        return
    lacking = [name for name in ("prefill", "verify", "commit") if not callable(getattr(port, name, None))]
    if lacking:
        raise TypeError(
            f"port is a {type(port).__name__} without {', '.join(lacking)}; see ddtree_lab.Port for its methods."
        )


def _prompt(pair: Pair, prompt: Any) -> tuple[list[int], str | None]:
    """Token ids, and the message they were made of, if any."""
    if prompt is None and pair.tokenizer is None:
        prompt = [7 * i % pair.embeddings.vocab_size for i in range(1, 25)]
    if prompt is None:
        prompt = bundled_prompts("chat")[0] if pair.name == "embedded" else GENERIC_PROMPT
    ids = pair.encode(prompt)[0].tolist()
    if len(ids) < 2:
        raise ValueError(
            "prompt has one token; the doctor needs two at least, the last one is the first anchor."
        )
    message = prompt.text if isinstance(prompt, Prompt) else prompt
    return ids, message if isinstance(message, str) else None


def _other_prompts(pair: Pair, prompt: Any) -> list[list[int]]:
    """More prompts for the acceptance, where there are bundled ones."""
    if prompt is not None or pair.name != "embedded":
        return []
    return [pair.encode(each)[0].tolist() for each in bundled_prompts("chat")[1 : 1 + NUM_OTHER_PROMPTS]]


def _run(exam: Examination, name: str) -> list[Finding]:
    check = CHECKS[name]
    hindrance = check.hindrance(exam)
    if hindrance:
        return [Finding(name, "skipped", check.stage, symptom=hindrance)]
    try:
        with torch.no_grad():
            return list(check.run(exam))
    except PortError as failure:
        finding = failed(name, failure)
        return [follows(exam, finding) if exam.known else finding]


def verdict(findings: Sequence[Finding], exam: Examination) -> str:
    """One sentence: the drafter, the port, both or neither, with the numbers."""
    problems = [finding for finding in findings if finding.status == "problem"]
    intrinsic, achieved = exam.intrinsic, exam.achieved
    numbers = ""
    if intrinsic is not None and achieved is not None:
        low, high = intrinsic.interval()
        numbers = (
            f": {achieved.emitted_tokens:.2f} emitted tokens a round, where the drafter on clean states gives "
            f"{intrinsic.emitted_tokens:.2f} [{low:.2f}, {high:.2f}]"
        )
    if exam.tokens_a_pass is not None:
        numbers += f"; the port's own loop gives {exam.tokens_a_pass:.2f}"
    is_low = intrinsic is not None and intrinsic.emitted_tokens < LOW_EMITTED_TOKENS
    if not problems:
        if is_low:
            return f"The drafter: the port is exact, and the drafter can do no more{numbers}."
        return f"Neither: the port is exact{numbers}."
    where = "; ".join(dict.fromkeys(_where(finding, exam) for finding in problems))
    blame = "Both, the port and a weak drafter" if is_low else "The port"
    return f"{blame}: {where}{numbers}."


def _where(finding: Finding, exam: Examination) -> str:
    what = ", ".join(finding.bugs) or finding.check
    if not finding.layers:
        return f"{finding.stage} ({what})"
    kinds = ", ".join(sorted({exam.kinds[i] for i in finding.layers if i < len(exam.kinds)}))
    return f"{finding.stage} in {kinds} layers {ranges(finding.layers)} ({what})"
