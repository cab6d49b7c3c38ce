"""A survey as a document in Markdown: `docs/survey.md` is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from ddtree_lab.survey.results import COLUMNS, OUTCOMES, Row, Survey, by_reason

INTRODUCTION = """# Which architectures are exact, and how

Written by `ddtree-lab survey --markdown docs/survey.md`; do not edit. Every causal-LM class of the installed
transformers is shrunk to a tiny config (widths, heads, experts, vocabulary and windows small, at least one whole
pattern of layer kinds kept), filled with random weights in float32, and compared on the CPU with the slowest obvious
method: a forward of each text of its own, without any cache. The tolerance is 30 times what two cache-free forwards
of one text differ by, or 1e-5 of the logits' scale if that is more; an architecture in whose logits a wrong token would
not show ten times that is not judged. Each runs in its own process, with limits of time and memory.

What is shown is a statement about code, not about trained weights: that the tree pass (or paths) gives the logits of
every path alone, and that the cache after a commit is right, on an architecture's layers as the library runs them.
Windows are 8 tokens, texts at most 24, so both sides of a window are seen; what starts later (long-context rotary
scaling, sparse selection beyond 64 tokens) is not.
"""

QUESTIONS = """## What is asked

* **layers**: kinds of cache layers (`describe_cache`), and how many the tiny model has.
* **multi**: is a cached forward of six tokens right, as verifying needs it? Where it is not, the stages run such
  rows one by one.
* **mask**: is a causal 4-D mask a no-op, and does a flipped bit change its own row and no other?
* **rollback**: what was seen to undo three tokens: the library's `crop`, or only a fork made before them (`snapshot`).
* **method**: what `method="auto"` takes. Verified on trees of nine nodes after 5 and 13 tokens, and after two commits
  in a row, with nothing and with four drafts accepted. Where the library's own decoding of one token at a time
  is off its forward without a cache (listed at the end), right means equal to that decoding.
* **error**: the largest error of the verify pass, as a share of the logits' scale.

✓ right, ✗ wrong, ! raises, – does not apply.
"""

TABLED = ("tree", "paths")  # outcomes with a table; of the others the reasons say all


def to_markdown(survey: Survey) -> str:
    """The document."""
    return "\n".join(
        chain([INTRODUCTION], _summary(survey), ["", QUESTIONS], _outcomes(survey), _library(survey))
    )


def _summary(survey: Survey) -> Iterator[str]:
    versions = ", ".join(sorted({row.transformers for row in survey.rows}))
    peak = max((row.peak_bytes or 0 for row in survey.rows), default=0)
    yield f"## Summary: {len(survey.rows)} architectures of transformers {versions}\n"
    yield "| outcome | architectures | |"
    yield "|---|---|---|"
    for outcome, count in survey.counts().items():
        yield f"| {outcome} | {count} | {OUTCOMES[outcome]} |"
    total = sum(row.seconds for row in survey.rows)
    yield f"\n{total:.0f} s in all on one core; the largest process held {peak / 2**20:.0f} MiB."


def _outcomes(survey: Survey) -> Iterator[str]:
    for outcome, meaning in OUTCOMES.items():
        rows = survey.of(outcome)
        if not rows:
            continue
        yield f"## {outcome}: {meaning}\n"
        yield from _reasons(rows)
        if outcome in TABLED:
            yield from _table(rows)
        yield ""


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    groups = [(reason, names) for reason, names in by_reason(rows) if reason]
    for reason, names in groups:
        yield f"* {_listed(names)}: {_escaped(reason)}"
    if groups:
        yield ""


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|" + "---|" * len(COLUMNS)
    for row in rows:
        name, *cells = row.cells()
        yield f"| `{name}` | {' | '.join(cells)} |"


def _library(survey: Survey) -> Iterator[str]:
    """What a port of one's own has to know: where the library's own ways are wrong without a word."""
    yield "## What the library does without a word\n"
    cases: list[tuple[str, Callable[[Row], bool]]] = [
        ("`crop` leaves a wrong state", lambda row: row.verdict("crop") == "no"),
        ("a cached forward of several tokens is wrong", lambda row: row.verdict("multi_token") == "no"),
        ("a cached forward of one token is wrong", lambda row: row.verdict("one_token") == "no"),
        ("the cache stays empty", lambda row: row.verdict("prefill") == "no"),
        ("a 4-D mask is not honoured", lambda row: row.verdict("mask") == "no"),
    ]
    for what, holds in cases:
        names = [row.name for row in survey.rows if holds(row)]
        yield f"* {what}: {_listed(names) if names else 'nowhere'}."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
