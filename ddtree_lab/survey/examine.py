"""What is asked of a target, each question answered against the slowest obvious method.

The truth is a forward of the whole text without any cache. How far two right ways to it may differ is measured
on the target itself, and so is whether a wrong context would show at all.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import ddtree_lab
from ddtree_lab.compat import get_state, is_recurrent, iter_states, set_state
from ddtree_lab.stages.cache import (
    CacheReport,
    cache_length,
    describe_cache,
    fork_cache,
    make_cache,
    sliding_windows,
)
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.embedding import resolve_embeddings
from ddtree_lab.stages.forward import prefill, run_target
from ddtree_lab.stages.mask import TreeMask, build_mask
from ddtree_lab.stages.tree import DraftTree
from ddtree_lab.stages.verify import verify_tree, why_no_tree_pass
from ddtree_lab.survey.subject import (
    LONG,
    MOST_NOISE,
    RIGHT_PATH,
    SHORT,
    SIGNAL,
    TEXT,
    Answer,
    Subject,
    worst,
)

Tell = Callable[[str], None]


def examine_target(target: PreTrainedModel, tell: Tell = lambda step: None) -> dict[str, Any]:
    """Every question asked of a target.

    Args:
        tell: called with the name of each step before it is taken.

    Returns:
        `answers` by question, the cache's layers, the embedding path, and the measured tolerance. Where a first
        question is answered with no, the later ones are not asked.
    """
    subject = Subject(target)
    answers: dict[str, Answer] = {}
    found: dict[str, Any] = {"answers": answers}
    for name, question in QUESTIONS:
        tell(name)
        answers[name] = _ask(question, subject)
        if name in ESSENTIAL and answers[name].verdict != "yes":
            break
    tell("describing")
    found["caches"] = _describe(lambda: _cache_rows(describe_cache(target)))
    found["embeddings"] = _describe(lambda: repr(resolve_embeddings(target)))
    if answers["causal"].verdict == "yes":
        found.update({name: getattr(subject, name) for name in ("scale", "noise", "tolerance", "signal")})
    return {**found, "answers": {name: asdict(answer) for name, answer in answers.items()}}


def _ask(question: Callable[[Subject], Answer], subject: Subject) -> Answer:
    try:
        return question(subject)
    except Exception as error:  # an architecture may raise anything, and that is an answer
        return Answer("raises", told(error))


def told(error: Exception) -> str:
    """An exception as one line: this package's refusals as they are, others with the class and where they are from."""
    message = " ".join(str(error).split()) or "no message"
    message = message if len(message) <= 300 else message[:299] + "…"
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(ddtree_lab.__file__).parent)
    if frames and frames[-1].filename.startswith(here):
        return message
    place = next(
        (f for f in reversed(frames) if "transformers" in f.filename), frames[-1] if frames else None
    )
    where = f" in {Path(place.filename).stem}.{place.name}" if place else ""
    return f"{type(error).__name__}{where}: {message}"


def _describe(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return told(error)


def _cache_rows(report: CacheReport) -> list[dict[str, Any]]:
    """Equal layers together, in the order in which they come first."""
    rows: dict[tuple[str, str, str], int] = {}
    for layer in report.layers:
        key = (layer.kind, layer.class_name, layer.rollback)
        rows[key] = rows.get(key, 0) + 1
    return [
        {"kind": kind, "class": name, "rollback": rollback, "layers": count}
        for (kind, name, rollback), count in rows.items()
    ]


# The questions: what is to be confirmed


def causal(subject: Subject) -> Answer:
    """The logits at a token are a function of the text up to it, but for rounding."""
    if not torch.isfinite(subject.truth(subject.text)).all():
        return Answer("no", "the tiny random model's logits are not finite")
    expected = (TEXT, subject.target.get_input_embeddings().weight.shape[0])
    shape = tuple(subject.truth(subject.text).shape)
    if shape[0] != expected[0]:
        return Answer("no", f"a text of {TEXT} tokens gets {shape[0]} rows of logits")
    if subject.noise > MOST_NOISE * subject.scale:
        return Answer(
            "no",
            "the logits of a token depend on the tokens after it, or on how many there are",
            subject.noise,
        )
    return Answer("yes", error=subject.noise)


def sensitive(subject: Subject) -> Answer:
    """A wrong context would show in the logits of the tiny random model."""
    if subject.signal < SIGNAL * subject.tolerance:
        return Answer("no", f"another token in the context moves the logits by {subject.signal:.2g} only, "
                      f"rounding by up to {subject.tolerance:.2g}")  # fmt: skip
    return Answer("yes")


def prefilled(subject: Subject) -> Answer:
    """A forward that fills the cache gives the same logits, and the cache is filled."""
    cache = make_cache(subject.target)
    found = run_target(subject.target, torch.tensor([subject.text[:LONG]]), cache).logits[0].float()
    answer = subject.compare(found, subject.truth(subject.text)[:LONG])
    held = cache_length(cache)
    if not any(is_recurrent(layer) for layer in cache.layers) and held != LONG:
        return Answer("no", f"after {LONG} tokens the cache holds {held}", answer.error)
    return answer


def one_token(subject: Subject) -> Answer:
    """Cached forwards of one token each are right."""
    cache, truth = subject.filled(LONG), subject.truth(subject.text)
    rows = [subject.run([token], cache) for token in subject.text[LONG : LONG + 6]]
    return subject.compare(torch.cat(rows), truth[LONG : LONG + 6])


def states(subject: Subject) -> Answer:
    """Wrong recurrent states would show: those after another text, in place of its own, each kind by itself."""
    other = make_cache(subject.target)
    prefill(subject.target, torch.tensor([subject.others[:LONG]]), other)
    moved = {}
    for name in {name for layer in other.layers for name, _, _ in iter_states(layer)}:
        cache = subject.filled(LONG)
        for layer, source in zip(cache.layers, other.layers, strict=True):
            if any(name == held for held, _, _ in iter_states(layer)):
                set_state(layer, name, get_state(source, name))
        found = subject.run(subject.text[LONG : LONG + 1], cache)
        moved[name] = float((found - subject.truth(subject.text)[LONG]).abs().max())
    if not moved:
        return Answer("none", "no recurrent layer")
    name, least = min(moved.items(), key=lambda item: item[1])
    if least < SIGNAL * subject.tolerance:
        return Answer("no", f"the {name} of another text move the logits by {least:.2g} only, rounding by up to "
                      f"{subject.tolerance:.2g}", least)  # fmt: skip
    return Answer("yes", error=least)


def multi_token(subject: Subject) -> Answer:
    """A cached forward of several tokens is right."""
    truth = subject.truth(subject.text)
    answers = [
        subject.compare(subject.run(subject.text[n : n + 6], subject.filled(n)), truth[n : n + 6])
        for n in (SHORT, LONG)
    ]
    return worst(answers)


def crop(subject: Subject) -> Answer:
    """The library's `crop` undoes three tokens."""
    cache = subject.filled(LONG)
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()
    subject.run(subject.others[:3], cache)
    cache.crop(-3)
    return _goes_on(subject, cache)


def snapshot(subject: Subject) -> Answer:
    """A cache is as it was after its fork has gone on with other tokens."""
    cache = subject.filled(LONG)
    for token in subject.others[:3]:
        subject.run([token], fork_cache(cache))
    fork = fork_cache(cache)
    for token in subject.others[:3]:
        subject.run([token], fork)
    return _goes_on(subject, cache)


def _goes_on(subject: Subject, cache: Cache) -> Answer:
    """The next token of the text after a cache that should hold the ones before."""
    found = subject.run(subject.text[LONG : LONG + 1], cache)
    return subject.judge(found, [subject.text[: LONG + 1]], LONG)


def mask(subject: Subject) -> Answer:
    """A 4-D mask says who sees whom: a causal one is a no-op, a flipped bit changes its row and no other."""
    cache = subject.filled(LONG)
    if all(is_recurrent(layer) and not hasattr(layer, "keys") for layer in cache.layers):
        return Answer("none", "no attention layer")
    chain = DraftTree.from_parents(subject.text[LONG : LONG + 4], [-1, 0, 1, 2])
    plain = build_mask(chain, LONG, subject.target.dtype, windows=sliding_windows(cache))

    def run(given: TreeMask) -> Tensor:
        return verify_tree(subject.target, cache, chain, "flattened", mask=given).logits.float()

    base = run(plain)
    answer = subject.compare(base, subject.truth(subject.text)[LONG : LONG + 4])
    if answer.verdict != "yes":
        return replace(answer, detail=f"a causal mask changes the logits by {answer.error:.2g}")
    for column in (-2, -3, -4 - 2):  # two nodes and a committed token, counted from the last key
        moved = (run(_hidden(plain, column)) - base).abs().amax(-1)
        others, row = float(moved[:-1].max()), float(moved[-1])
        if others > subject.tolerance:
            return Answer("no", f"a bit flipped in one row moves other rows by {others:.2g}")
        if row <= subject.tolerance:
            return Answer("no", "a flipped bit changes nothing")
    return answer


def _hidden(mask: TreeMask, column: int) -> TreeMask:
    """The mask with one key hidden from the last row."""

    def hide(additive: Tensor) -> Tensor:
        hidden = additive.clone()
        hidden[..., -1, column] = torch.finfo(additive.dtype).min
        return hidden

    windowed = {window: hide(additive) for window, additive in mask.windowed.items()}
    return replace(mask, additive=hide(mask.additive), windowed=windowed)


def auto(subject: Subject) -> Answer:
    """The tree pass is exact by the package's own judgement."""
    reason = why_no_tree_pass(subject.target)
    return Answer("no", reason) if reason else Answer("yes")


def verified(subject: Subject) -> Answer:
    """The logits at every node are right by the method that auto picks."""
    return worst(list(_verified(subject, "auto")))


def paths(subject: Subject) -> Answer:
    """They are right by paths."""
    return worst(list(_verified(subject, "paths")))


def _verified(subject: Subject, method: str) -> Iterator[Answer]:
    for length in (SHORT, LONG):
        tree = subject.tree(length)
        found = verify_tree(subject.target, subject.filled(length), tree, method)
        paths = [tree.token_ids[tree.path(node)].tolist() for node in range(tree.num_nodes)]
        yield subject.judge(found.logits, [[*subject.text[:length], *path] for path in paths], length)


def committed(subject: Subject) -> Answer:
    """After two rounds, with nothing and with four drafts accepted, the next token is scored right."""
    answers = []
    for length in (SHORT, LONG):
        for path in ([0], RIGHT_PATH):
            cache, start = subject.filled(length), length
            for _ in range(2):
                verification = verify_tree(subject.target, cache, subject.tree(start))
                commit_path(subject.target, cache, verification, path)
                start += len(path)
            found = subject.run(subject.text[start : start + 1], cache)
            answers.append(subject.judge(found, [subject.text[: start + 1]], length))
    return worst(answers)


QUESTIONS: list[tuple[str, Callable[[Subject], Answer]]] = [
    ("causal", causal),
    ("sensitive", sensitive),
    ("prefill", prefilled),
    ("one_token", one_token),
    ("states", states),
    ("multi_token", multi_token),
    ("crop", crop),
    ("snapshot", snapshot),
    ("mask", mask),
    ("tree_pass", auto),
    ("verify", verified),
    ("paths", paths),
    ("commit", committed),
]
ESSENTIAL = ("causal", "sensitive")  # without them nothing else can be judged
