"""Stages against their floor: each function times one stage and gives its rows.

The floor of a verify pass is the library's own forward of the same tokens on the same cache, which a tree pass
replaces in the recurrent layers and otherwise calls.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ddtree_lab.bench.rows import Row
from ddtree_lab.bench.subjects import DEPTH, Subject, random_marginals
from ddtree_lab.bench.timing import Prepare, Spread, Timings, interleaved, peak_bytes
from ddtree_lab.pair import Pair
from ddtree_lab.pipeline import STAGES
from ddtree_lab.stages import tree as tree_stage
from ddtree_lab.stages.cache import fork_cache
from ddtree_lab.stages.commit import commit_path
from ddtree_lab.stages.forward import continue_target
from ddtree_lab.stages.mask import build_mask
from ddtree_lab.stages.tree import DraftTree, build_tree, build_tree_heap, top_log_probs
from ddtree_lab.stages.verify import verify_tree

PUBLISHED_VOCABULARY = 248_320  # of Qwen3.6


def ready(call: Callable[[], Any]) -> Prepare:
    """A case that needs nothing before it."""
    return lambda: call


def spread_fields(name: str, spread: Spread) -> Row:
    return {name: spread.median, f"{name}_low": spread.low, f"{name}_high": spread.high}


def timing_rows(timings: Timings, to: str, **common: Any) -> Iterator[Row]:
    """A row a case: its seconds, and its ratio to the case `to`."""
    for case in timings.seconds:
        row = {**common, "case": case, **spread_fields("seconds", timings.of(case))}
        if case != to:
            row |= {**spread_fields("ratio", timings.ratio(case, to)), "ratio_to": to}
        yield row


def bench_verify(
    subject: Subject,
    num_nodes: int,
    methods: Sequence[str] = ("tree",),
    repeats: int = 20,
    *,
    with_floor: bool = False,
) -> Iterator[Row]:
    """A tree pass against the library's forward of the same tokens, and against the slow exact methods.

    Args:
        with_floor: also the linear layers alone, which every pass over these rows runs.
    """
    tree = subject.tree(num_nodes)
    ids = torch.from_numpy(tree.token_ids)[None]

    def plain() -> Callable[[], Any]:
        fork = fork_cache(subject.cache)  # which the library's forward overwrites
        return lambda: continue_target(subject.target, ids, fork)

    def verify(method: str) -> Callable[[], Any]:
        return lambda: verify_tree(subject.target, subject.cache, tree, method)

    cases: dict[str, Prepare] = {"plain": plain, **{method: ready(verify(method)) for method in methods}}
    if with_floor:
        cases["linear layers"] = ready(_linear_layers(subject.target, tree.num_nodes))
    timings = interleaved(cases, repeats)
    there = subject.tensors()
    bound = {"bound": timings.ratio("linear layers", "plain").median} if with_floor else {}
    for row in timing_rows(timings, "plain", bench="verify", subject=subject.label, nodes=tree.num_nodes):
        peak = peak_bytes(cases[row["case"]](), there)
        yield {**row, **bound, "peak_bytes": peak, "context": subject.num_prompt_tokens}


def _linear_layers(target: Any, num_rows: int) -> Callable[[], None]:
    """Every linear layer of a target, head included, on so many rows."""
    layers = [module for module in target.modules() if isinstance(module, torch.nn.Linear)]
    rows = {
        layer.in_features: torch.randn(1, num_rows, layer.in_features).to(target.dtype) for layer in layers
    }

    def run() -> None:
        for layer in layers:
            layer(rows[layer.in_features])

    return run


def bench_tree(budget: int, vocab_size: int = PUBLISHED_VOCABULARY, repeats: int = 5) -> Iterator[Row]:
    """The builder against the published heap: the whole, and what comes after top-k."""
    logits = random_marginals(DEPTH, vocab_size)
    narrow = min(budget, tree_stage.NARROW)

    def grown(width: int, heap: Callable[..., Any] = tree_stage.best_first_heap) -> Prepare:
        log_probs, _ = top_log_probs(logits, width)
        return ready(lambda: heap(log_probs, budget, width < budget))

    common: Row = dict(bench="tree", subject=f"vocabulary {vocab_size:,}", budget=budget)
    whole = {
        "heap": ready(lambda: build_tree_heap(logits, budget)),
        "build_tree": ready(lambda: build_tree(logits, budget)),
        "top-k": ready(lambda: top_log_probs(logits, budget)),
    }
    yield from timing_rows(interleaved(whole, repeats), "heap", part="whole", **common)
    after = {"heap": grown(budget), "build_tree": grown(narrow)}
    if compiled := tree_stage.compiled_heap():
        after["compiled"] = grown(narrow, compiled)
    yield from timing_rows(interleaved(after, 5 * repeats), "heap", part="after top-k", **common)


def bench_mask_and_commit(subject: Subject, num_nodes: int, repeats: int = 20) -> Iterator[Row]:
    """The stages around the verify pass, as shares of it."""
    target, cache, tree = subject.target, subject.cache, subject.tree(num_nodes)
    dtype = target.get_input_embeddings().weight.dtype
    verification = verify_tree(target, cache, tree)
    path = _deepest_path(tree)

    def fresh() -> DraftTree:
        """Without what the tree remembers once it has been asked."""
        return DraftTree(tree.token_ids, tree.parents, tree.depths, tree.ranks, tree.log_probs)

    def mask() -> Callable[[], Any]:
        unseen = fresh()
        return lambda: build_mask(unseen, subject.num_prompt_tokens, dtype)

    def commit() -> Callable[[], Any]:
        fork = fork_cache(cache, clone_states=False)
        return lambda: commit_path(target, fork, verification, path)

    cases = {"verify": ready(lambda: verify_tree(target, cache, tree)), "mask": mask, "commit": commit}
    yield from timing_rows(
        interleaved(cases, repeats), "verify", bench="stage", subject=subject.label, nodes=tree.num_nodes
    )


def bench_round(pair: Pair, prompt: Any, tree_budget: int = 32, repeats: int = 3) -> Iterator[Row]:
    """How a round's time divides between its stages, over whole decodes."""
    from ddtree_lab.decode import generate

    generate(pair, prompt, tree_budget=tree_budget, max_new_tokens=12)  # the trial pass is behind us
    rounds = [
        summary.stage_seconds
        for _ in range(repeats)
        for summary in generate(pair, prompt, tree_budget=tree_budget).rounds
    ]
    common: Row = dict(bench="round", subject=pair.name, budget=tree_budget)
    for stage in STAGES:
        shares = [seconds[stage] / sum(seconds.values()) for seconds in rounds]
        yield {
            **common, "case": stage, **spread_fields("seconds", Spread.of([s[stage] for s in rounds])),
            **spread_fields("ratio", Spread.of(shares)), "ratio_to": "round",
        }  # fmt: skip
    for without in (("draft", "verify"), ("verify",)):
        yield {
            **common, "case": f"all but {' and '.join(without)}", "ratio_to": "round",
            **spread_fields("ratio", Spread.of([_python_share(s, without) for s in rounds])),
        }  # fmt: skip


def _python_share(seconds: Mapping[str, float], without: Sequence[str]) -> float:
    total = sum(seconds.values())
    return (total - sum(seconds[stage] for stage in without)) / total


def bench_back(pair: Pair, prompt: Any, repeats: int = 20) -> Iterator[Row]:
    """Going back in a session, beside the step it undoes."""
    from ddtree_lab.session import Session

    session = Session(pair, prompt, tree_budget=32)
    while session.next_stage != "verify":
        session.step()

    def back() -> Callable[[], Any]:
        ahead = session.fork()
        ahead.step()
        return ahead.back

    def step() -> Callable[[], Any]:
        return session.fork().step

    yield from timing_rows(
        interleaved({"step": step, "back": back}, repeats), "step", bench="session", subject=pair.name
    )


def bench_start(repeats: int = 5) -> Iterator[Row]:
    """Importing the package and showing a trace, each in a process of its own, beside a bare interpreter's."""

    def process(*args: str) -> Prepare:
        return ready(lambda: subprocess.run([sys.executable, *args], check=True, capture_output=True))

    with tempfile.TemporaryDirectory() as folder:
        trace = _small_trace(Path(folder))
        cases = {
            "python": process("-c", "pass"),
            "import ddtree_lab": process("-c", "import ddtree_lab"),
            "show a trace": process("-m", "ddtree_lab", "show", str(trace)),
        }
        yield from timing_rows(interleaved(cases, repeats), "python", bench="start", subject="process")


def _small_trace(folder: Path) -> Path:
    from ddtree_lab.decode import generate
    from ddtree_lab.loading import load_pair
    from ddtree_lab.pair import bundled_prompts

    path = folder / "trace.json"
    trace = generate(load_pair(), bundled_prompts()[0], tree_budget=32, max_new_tokens=40, record=True).trace
    assert trace is not None
    trace.save(path)
    return path


def _deepest_path(tree: DraftTree) -> list[int]:
    return tree.path(int(tree.depths.argmax()))
