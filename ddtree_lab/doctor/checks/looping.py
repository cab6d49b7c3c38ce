"""Checks of the loop around the stages: the text itself, its end, its randomness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ddtree_lab.decode import generate
from ddtree_lab.doctor.bugs.base import dflash, replaced
from ddtree_lab.doctor.checks.base import Unseen, check, judge, needs, needs_dflash
from ddtree_lab.doctor.checks.texts import judge_texts
from ddtree_lab.doctor.examination import Examination
from ddtree_lab.doctor.loop import cut
from ddtree_lab.doctor.material import NUM_TEXT_TOKENS
from ddtree_lab.doctor.report import Finding
from ddtree_lab.doctor.truth import Known, Truth

STAGES = ("walk", "commit", "verify", "mask", "cache", "draft")
NUM_TOKENS = NUM_TEXT_TOKENS
SEED = 20
TEMPERATURE = 3.0  # high: at 1 a confident target may draw what the argmax would be


def no_end(exam: Examination) -> str:
    return "" if exam.pair.eos_token_ids else "the pair has no end-of-sequence token"


def _text_check(
    exam: Examination, name: str, max_new_tokens: int, *, right: str, wrong: str, cause: str, fix: str,
    temperature: float = 0.0, truth: Truth | None = None,
) -> Finding:  # fmt: skip
    """A text written by the port's own loop."""
    expected = (
        _plain(exam, max_new_tokens, temperature) if truth or temperature else _greedy(exam, max_new_tokens)
    )
    prompt = torch.tensor([exam.material.prompt])
    return judge_texts(
        exam, name, lambda port: [port.generate(prompt, max_new_tokens, temperature, SEED)], max_new_tokens, STAGES,
        expected=[expected], right=right, wrong=wrong, cause=cause, fix=fix, temperature=temperature,
        seed=SEED, truth=truth, ends=exam.pair.eos_token_ids, key=f"{name} {max_new_tokens}",
    )  # fmt: skip


def _greedy(exam: Examination, max_new_tokens: int) -> list[int]:
    return cut(exam.material.text, max_new_tokens, exam.pair.eos_token_ids)


def _plain(exam: Examination, max_new_tokens: int, temperature: float) -> list[int]:
    """What plain decoding writes, under the hooks of the moment."""
    plain = generate(
        exam.pair, exam.material.prompt, method="autoregressive", max_new_tokens=max_new_tokens,
        temperature=temperature, seed=SEED,
    )  # fmt: skip
    exam.material.truth.num_forwards += max_new_tokens
    return list(plain.token_ids)


@check(
    "greedy_text", "walk", "D16 D26", "is the greedy text the target's own, token for token", cost=30,
    unless=[needs("generate")],
)  # fmt: skip
def greedy_text(exam: Examination) -> Iterator[Finding]:
    yield _text_check(
        exam, "greedy_text", NUM_TOKENS,
        right="the text is plain decoding's",
        wrong="the greedy text is not the target's own",
        cause="the walk takes other tokens than the target's, or the loop hands on a wrong anchor",
        fix="emit the target's token at each node of the path; the last one is the next anchor",
    )  # fmt: skip


@check(
    "executed_paths", "draft", "D17", "does the loop draft at all: do its passes hold more than one token", cost=12,
    unless=[needs("generate"), needs("draft")],
)  # fmt: skip
def executed_paths(exam: Examination) -> Iterator[Finding]:
    """Rows of every pass of the target while the port writes; speculation that never starts raises no error."""
    prompt, tokens_a_pass = torch.tensor([exam.material.prompt]), list[float]()

    def probe(port: Any) -> Tensor:
        with counted_rows(exam.target) as passes:
            written = port.generate(prompt, 8, 0.0, SEED)
        read = accumulate(
            passes, initial=0
        )  # tokens before each pass; the last prompt token may be an anchor
        after = [rows for rows, before in zip(passes, read, strict=False) if before >= prompt.shape[1] - 1]
        if not after:
            raise Unseen("generate", "ran nothing on the target after the prompt")
        tokens_a_pass.append(len(written) / len(after))
        return torch.tensor([[float(max(after))]])

    finding = judge(
        exam, "executed_paths", probe, Known.exactly(torch.tensor([[0]])), ("draft",),
        right="passes verify drafted tokens",
        passes=lambda answer: bool(answer.max() > 1),
        wrong=lambda answer: Finding(
            "executed_paths", "problem", "draft",
            symptom=f"no pass after the prompt holds more than one token: {tokens_a_pass[0]:.2f} tokens a pass",
            cause="the loop decodes plainly: drafting is switched off, refused or fell back without a word",
            fix="log the number of drafted tokens a round; a fallback to plain decoding must say so",
        ),
    )  # fmt: skip
    if finding.status == "problem" and tokens_a_pass:
        exam.tokens_a_pass = tokens_a_pass[0]
    yield finding


def _read(args: Any, kwargs: Any) -> Tensor:
    """What a call of a decoder reads: ids [batch, rows], or their embeddings [batch, rows, hidden]."""
    named = (kwargs.get(name) for name in ("inputs_embeds", "input_ids"))
    found = next((read for read in named if read is not None), None)
    return args[0] if found is None else found


@contextmanager
def counted_rows(target: Any) -> Iterator[list[int]]:
    """Tokens in each pass of the target's decoder, those of all batch rows together."""
    passes: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        read = _read(args, kwargs)
        passes.append(read.shape[0] * read.shape[1])

    handle = target.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


@check("length", "walk", "D21", "is max_new_tokens exact", cost=12, unless=[needs("generate")])
def length(exam: Examination) -> Iterator[Finding]:
    """A limit that falls into the middle of rounds."""
    findings = [
        _text_check(
            exam, "length", limit,
            right="a limit inside a round is kept",
            wrong=f"max_new_tokens={limit} is not kept",
            cause="a round's tokens are all emitted before the limit is looked at",
            fix="cut the last round to the tokens that are left",
        )
        for limit in (2, 5)
    ]  # fmt: skip
    yield next((finding for finding in findings if finding.status != "ok"), findings[0])


@check(
    "end_of_sequence", "walk", "D21", "does the text stop at its first end of sequence", cost=30,
    unless=[needs("generate"), no_end],
)  # fmt: skip
def end_of_sequence(exam: Examination) -> Iterator[Finding]:
    """An end of sequence that is drafted and accepted in the middle of a path."""
    end, at = min(exam.pair.eos_token_ids), len(exam.material.prompt) + 6
    with saying(exam, {at: end} | {at + i: exam.material.text[0] for i in range(1, NUM_TOKENS)}):
        yield _text_check(
            exam, "end_of_sequence", NUM_TOKENS, truth=Truth(exam.target, len(exam.material.prompt)),
            right="nothing comes after it",
            wrong="the text goes on after an end of sequence, or stops before it",
            cause="accepted drafts after an end of sequence are emitted, or only the bonus token is looked at",
            fix="look at every emitted token in order and stop at the first end of sequence",
        )  # fmt: skip


@check(
    "token_values", "walk", "D26", "is any token dropped for its value", cost=40,
    unless=[needs("generate"), needs_dflash],
)  # fmt: skip
def token_values(exam: Examination) -> Iterator[Finding]:
    """The drafter's mask token, which is a token like any other, in the middle of the text."""
    mask_token_id, at = dflash(exam.pair).config.mask_token_id, len(exam.material.prompt) + 3
    with saying(exam, {at: mask_token_id, at + 1: mask_token_id}):
        yield _text_check(
            exam, "token_values", 12, truth=Truth(exam.target, len(exam.material.prompt)),
            right="also the mask token is emitted if the target says it",
            wrong="tokens the target wrote are missing",
            cause="output tokens that equal the mask id are deleted",
            fix="never filter by value; noise rows are not among the emitted tokens",
        )  # fmt: skip


@contextmanager
def saying(exam: Examination, tokens: Mapping[int, int]) -> Iterator[None]:
    """Target and drafter say these tokens at these absolute positions, and what they please elsewhere.

    The target's head is biased by the position of each of its rows, which a hook on the decoder notes.
    """
    positions: list[Tensor] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        given = kwargs.get("position_ids")
        if given is None:  # the first forward of a text
            given = torch.arange(_read(args, kwargs).shape[1])[None]
        positions[:] = [given[0] if given.ndim == 3 else given]

    def bias_target(module: Any, args: Any, logits: Tensor) -> Tensor:
        if not positions or logits.ndim != 3:
            return logits
        rows = positions.pop()[:, -logits.shape[1] :]  # of the tokens read; the next one is said
        return _biased(logits, rows.expand(logits.shape[:2]) + 1, tokens)

    def bias_drafter(propose: Any) -> Any:
        def proposed(context: Any, *args: Any) -> Tensor:
            logits = propose(context, *args)
            return _biased(logits, torch.arange(len(logits)) + context.num_rows + 1, tokens)

        return proposed

    handles = [
        exam.target.get_decoder().register_forward_pre_hook(note, with_kwargs=True),
        exam.pair.embeddings.output.register_forward_hook(bias_target),
    ]
    try:
        with replaced(exam.pair.drafter, "propose", bias_drafter):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _biased(logits: Tensor, positions: Tensor, tokens: Mapping[int, int]) -> Tensor:
    """Logits in which each token stands far above the rest at its position; positions: one a row."""
    said = logits.clone()
    for position, token in tokens.items():
        said[..., token] += 1e3 * (positions.to(logits.device) == position).to(logits.dtype)
    return said


@check("sampled_text", "walk", "D21", "is sampled text the target's own draw, with the same noise", cost=80,
       unless=[needs("generate")])  # fmt: skip
def sampled_text(exam: Examination) -> Iterator[Finding]:
    """Token-identical for ports that key noise by (seed, position), as this package does.

    A port with its own randomness cannot be; its distribution is compared instead, see `distribution`.
    """
    if not exam.has_keyed_noise:
        yield Finding(
            "sampled_text",
            "skipped",
            "walk",
            symptom="the port has noise of its own (keyed_noise is not set)",
        )
        return
    yield _text_check(
        exam, "sampled_text", NUM_TOKENS, temperature=TEMPERATURE,
        right="identical to plain sampling with the same seed",
        wrong="sampled text is not plain sampling's with the same seed",
        cause="the temperature does not reach the verifier, or tokens are accepted by another rule than a draw",
        fix="draw one token from the target at each node and descend while it is a child",
    )  # fmt: skip


NUM_DRAWS = 300
SMALLEST_P = 1e-4


def not_own_noise(exam: Examination) -> str:
    keyed = "the port's noise is keyed by seed and position: sampled_text compares token for token"
    return keyed if exam.has_keyed_noise else ""


@check("distribution", "walk", "D21", "is the second sampled token distributed as the target says", cost=2 * NUM_DRAWS,
       unless=[needs("generate"), not_own_noise])  # fmt: skip
def distribution(exam: Examination) -> Iterator[Finding]:
    """χ² of the second new token against the target's own distribution, over seeds with the same first token."""
    prompt = torch.tensor([exam.material.prompt])
    drawn = [exam.port.generate(prompt, 2, 1.0, seed) for seed in range(NUM_DRAWS)]
    first = max({row[0] for row in drawn}, key=lambda token: sum(row[0] == token for row in drawn))
    seconds = [row[1] for row in drawn if row[0] == first and len(row) > 1]
    p_value = chi_square(seconds, exam.material.truth.logits([*exam.material.prompt, first]).softmax(-1))
    if p_value < SMALLEST_P:
        yield Finding(
            "distribution", "problem", "walk",
            symptom=f"{len(seconds)} sampled tokens do not follow the target's distribution (p = {p_value:.1g})",
            evidence={"p_value": p_value, "draws": len(seconds)},
            cause="the temperature does not reach the verifier, or tokens are accepted by another rule than the "
            "target's draw (p/q with drafts that were not drawn from q)",
            fix="draw one token from the target at each node and descend while it is a child",
        )  # fmt: skip
        return
    yield Finding("distribution", "ok", "walk", symptom=f"χ² over {len(seconds)} draws: p = {p_value:.2g}")


def chi_square(drawn: list[int], probabilities: Tensor) -> float:
    """p-value of draws under a distribution; tokens expected fewer than five times share a bin."""
    expected = probabilities.double() * len(drawn)
    common = (expected >= 5).nonzero()[:, 0]
    counts = torch.zeros_like(expected).index_add_(0, torch.tensor(drawn), torch.ones(len(drawn)).double())
    bins = [(float(counts[i]), float(expected[i])) for i in common]
    rest = (len(drawn) - sum(count for count, _ in bins), len(drawn) - sum(mean for _, mean in bins))
    if rest[1] >= 1:
        bins.append(rest)
    if len(bins) < 2:
        return 1.0
    statistic = sum((count - mean) ** 2 / mean for count, mean in bins)
    freedom = torch.tensor((len(bins) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
