"""Is a text the target's own, rounding allowed: each token must be the target's choice after the tokens before it.

Two right programs may part at a near tie, and then write different texts to the end. So a text is not
compared with another one but scored: at each place the chosen token's score may fall behind the best by what
rounding explains there, and no more. The gaps are reported, never one cut-off for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.doctor.checks.base import REGISTER, judge
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.report import Finding
from ddtree_lab.doctor.truth import Known, Truth
from ddtree_lab.sampling import Sampler, gumbel_noise


@dataclass(frozen=True)
class Scored:
    """A text beside the target's choices along it.

    Args:
        gaps: how far each token's score is below the best one's; 0 where it is the target's choice.
        allowed: the gap that rounding explains at each token.
        reason: why its length is wrong, if it is.
    """

    gaps: tuple[float, ...]
    allowed: tuple[float, ...]
    reason: str = ""

    @property
    def first_wrong(self) -> int | None:
        return next((i for i, gap in enumerate(self.gaps) if gap > self.allowed[i]), None)

    @property
    def ties(self) -> list[float]:
        """Gaps of tokens that are not the target's choice and may be for rounding."""
        return [gap for gap, limit in zip(self.gaps, self.allowed, strict=True) if 0 < gap <= limit]

    @property
    def ok(self) -> bool:
        return self.first_wrong is None and not self.reason


def score_text(
    exam: Examination,
    truth: Truth,
    tokens: Sequence[int],
    limit: int,
    temperature: float,
    seed: int,
    ends: frozenset[int],
) -> Scored:
    """Score a text that was to be `limit` tokens long unless an end of sequence comes first."""
    prompt = exam.material.prompt
    stop = next((i + 1 for i, token in enumerate(tokens) if token in ends), limit)
    reason = (
        "" if len(tokens) == min(stop, limit) else f"{len(tokens)} tokens where {min(stop, limit)} are right"
    )
    outside = next((token for token in tokens if not 0 <= token < exam.material.vocab_size), None)
    if outside is not None or not tokens:
        return Scored((), (), reason or f"token id {outside} is outside the vocabulary")
    known = truth.after([[*prompt, *tokens[:i]] for i in range(len(tokens))])
    scores = Sampler.from_settings(temperature, seed=seed).scores(known.values)
    if temperature > 0:
        noise = [gumbel_noise(seed, len(prompt) + i, scores.shape[-1]) for i in range(len(tokens))]
        scores = scores + torch.stack(noise)
    gaps = scores.amax(-1) - scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    allowed = 2 * known.slack / (temperature or 1.0)  # both scores may move
    return Scored(tuple(gaps.tolist()), tuple(allowed.tolist()), reason)


def judge_texts(
    exam: Examination,
    name: str,
    texts: Callable[[Any], list[list[int]]],
    limit: int,
    stages: Sequence[str],
    *,
    expected: list[list[int]],
    right: str,
    wrong: str,
    cause: str,
    fix: str,
    temperature: float = 0.0,
    seed: int = 0,
    truth: Truth | None = None,
    ends: frozenset[int] = frozenset(),
    key: str = "",
) -> Finding:
    """Score the texts that a port writes, and find the cause where one is not the target's.

    Args:
        texts: of a port.
        limit: new tokens of each.
        expected: what plain decoding writes, for the evidence.
        truth: about the target as it is now, where hooks make it say something else.
        ends: end-of-sequence tokens, at which a text must stop.
        key: names the probe where a check has several.
    """
    truth = exam.material.truth if truth is None else truth
    known = Known.exactly(torch.cat([_row(text, limit) for text in expected]))
    scored: list[Scored] = []

    def passes(answer: Tensor) -> bool:
        scored[:] = [
            score_text(exam, truth, tokens, limit, temperature, seed, ends)
            for tokens in _rows_as_texts(answer, limit)
        ]
        return all(each.ok for each in scored)

    def finding(answer: Tensor) -> Finding:
        which = next(i for i, each in enumerate(scored) if not each.ok)
        written = _rows_as_texts(answer, limit)[which]
        evidence = _evidence(scored[which], written, expected[which])
        return Finding(
            name,
            "problem",
            REGISTER[name].stage,
            symptom=wrong + _first_divergence(scored[which]),
            evidence=evidence,
            cause=cause,
            fix=fix,
        )

    judged = judge(
        exam, name, lambda port: torch.cat([_row(text, limit) for text in texts(port)]).double(), known, stages,
        right=right, wrong=finding, key=key, passes=passes,
    )  # fmt: skip
    ties = [gap for each in scored for gap in each.ties]
    if judged.status != "ok" or not ties:
        return judged
    said = f"{right}; {len(ties)} tokens differ from the control's choice at near ties (gaps up to {max(ties):.2g})"
    return Finding(name, "ok", judged.stage, symptom=said, evidence={"near_tie_gaps": sorted(ties)})


def _first_divergence(scored: Scored) -> str:
    index = scored.first_wrong
    if index is None:
        return f": {scored.reason}"
    return (
        f": new token {index} scores {scored.gaps[index]:.2g} below the target's choice, rounding explains "
        f"{scored.allowed[index]:.2g}"
    )


def _evidence(scored: Scored, written: list[int], expected: list[int]) -> dict[str, Any]:
    evidence: dict[str, Any] = {"tokens": len(written), "expected_tokens": len(expected)}
    if scored.reason:
        evidence["length"] = scored.reason
    index = scored.first_wrong
    if index is not None:
        evidence |= {
            "first_wrong_new_token": index,
            "token": written[index],
            "gap": scored.gaps[index],
            "rounding_explains": scored.allowed[index],
        }
    wrong = sorted(gap for gap, limit in zip(scored.gaps, scored.allowed, strict=True) if gap > limit)
    if wrong:
        evidence["gaps_no_rounding_explains"] = {
            "tokens": len(wrong), "least": wrong[0], "median": wrong[len(wrong) // 2], "most": wrong[-1]
        }  # fmt: skip
    return evidence


MORE = 64  # tokens beyond the limit that are kept, so that a text that is too long shows


def _row(tokens: Sequence[int], limit: int) -> Tensor:
    """Token ids as a row of fixed width; −1 where there is none, the number of tokens last."""
    kept = list(tokens)[: limit + MORE]
    return torch.tensor([[*kept, *[-1] * (limit + MORE - len(kept)), len(kept)]])


def _rows_as_texts(answer: Tensor, limit: int) -> list[list[int]]:
    return [[int(token) for token in row[: int(row[-1])]] for row in answer]
