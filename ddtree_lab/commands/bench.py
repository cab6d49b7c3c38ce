"""`ddtree-lab bench`: whole decodes swept, or stages against their floor."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_lab.cli import UsageError
from ddtree_lab.commands.pair_arguments import (
    USER_ERRORS,
    add_pair_arguments,
    load_pair_named,
    pair_options,
)
from ddtree_lab.commands.run import _budgets, _positive

if TYPE_CHECKING:
    from rich.console import Console

    from ddtree_lab.bench.rows import Row
    from ddtree_lab.bench.sweep import Sweep

WHAT = {
    "sweep": "prompts × methods × budgets × temperatures (the default)",
    "micro": "stages against their floor, with the goals they have",
    "advise": "the budget that pays on these prompts, predicted and then run",
    "soak": "rounds over mixed prompts, budgets and temperatures, every token checked",
    "page": "docs/performance.md from the rows of a folder",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", default="sweep", choices=WHAT, help="; ".join(f"{k}: {v}" for k, v in WHAT.items())
    )
    parser.add_argument(
        "--target", metavar="ID", help="hub id or folder, or smollm2 (default: the embedded pair)"
    )
    parser.add_argument("--drafter", metavar="ID", help="of its DFlash drafter, or ngram")
    parser.add_argument(
        "--prompts",
        default="bundled",
        metavar="FILE",
        help="bundled, chat, docs, code; humaneval or gsm8k, by the package datasets; a text file (a prompt a line) or "
        "JSON lines (default bundled)",
    )
    parser.add_argument(
        "--methods",
        type=_names,
        default=None,
        metavar="M[,M]",
        help="of library, autoregressive, dflash, ddtree (default all)",
    )
    parser.add_argument(
        "--tree-budgets",
        type=_budgets,
        default=[4, 8, 16, 32, 64, "auto"],
        metavar="N[,N]",
        help="drafted nodes, or auto (default 4,8,16,32,64,auto)",
    )
    parser.add_argument("--temperatures", type=_floats, default=[0.0], metavar="T[,T]", help="default 0")
    parser.add_argument("--max-new-tokens", type=_positive, default=100, metavar="N", help="default 100")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default 0")
    parser.add_argument("--limit", type=_positive, metavar="N", help="prompts at most, of each domain")
    parser.add_argument(
        "--repeats",
        type=_positive,
        default=1,
        metavar="N",
        help="sweep: time each decode so often (default 1)",
    )
    parser.add_argument(
        "--rounds", type=_positive, default=10_000, metavar="N", help="of a soak (default 10000)"
    )
    parser.add_argument("--quick", action="store_true", help="micro: few repeats, small sizes")
    parser.add_argument(
        "--out", default="build/bench", metavar="DIR", help="where rows and plots go (default build/bench)"
    )
    parser.add_argument(
        "--threads", type=_positive, default=1, metavar="N", help="of the processor (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print rows as JSON lines instead of tables")
    add_pair_arguments(parser)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def execute(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    torch.set_num_threads(args.threads)
    console = Console(stderr=args.json)
    run = {"sweep": _sweep, "micro": _micro, "advise": _advise, "soak": _soak, "page": _page}[args.what]
    try:
        return run(args, console)
    except USER_ERRORS as error:
        raise UsageError(str(error)) from error


def _show(args: argparse.Namespace, console: Console, rows: list[Row], *tables: Any) -> None:
    if args.json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
        return
    for table in tables:
        console.print(table)


def _chosen_prompts(args: argparse.Namespace) -> list[Any]:
    from ddtree_lab.bench.prompts import read_prompts

    prompts = read_prompts(args.prompts)
    if args.limit is None:
        return prompts
    counts: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        counts[prompt.domain] = counts.get(prompt.domain, 0) + 1
        kept += [prompt] if counts[prompt.domain] <= args.limit else []
    return kept


def _sweep_of(args: argparse.Namespace) -> Sweep:
    from ddtree_lab.bench.sweep import METHODS, Sweep

    methods = args.methods or METHODS
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        raise UsageError(f"--methods has {', '.join(unknown)}; choose of {', '.join(METHODS)}.")
    return Sweep(
        tuple(methods), tuple(args.tree_budgets), tuple(args.temperatures), args.seed, args.max_new_tokens,
        args.drafter or "", _setup(args), args.repeats,
    )  # fmt: skip


def _setup(args: argparse.Namespace) -> str:
    """Options of the pair that are not what they are by default: rows of another set-up are other rows."""
    options = pair_options(args).items()
    return ", ".join(f"{name} {value}" for name, value in options if value not in (None, "auto", []))


def _sweep(args: argparse.Namespace, console: Console) -> int:
    from ddtree_lab.bench.papers import paper_table
    from ddtree_lab.bench.plots import plot_sweep
    from ddtree_lab.bench.processes import Processes, own_device
    from ddtree_lab.bench.sweep import run_sweep
    from ddtree_lab.bench.tables import sweep_table

    sweep, prompts = _sweep_of(args), _chosen_prompts(args)
    processes = Processes(are_one=args.tp_plan is not None)
    if processes.count > 1 and args.target and not args.device_map:
        args.device_map = own_device()  # a copy of the model each
    pair = load_pair_named(args)
    per_prompt = sweep.repeats * sum(len(sweep.jobs(temperature)) for temperature in sweep.temperatures)
    with _progress(console, shown=processes.is_first) as progress:
        task = progress.add_task("decodes", total=len(processes.share(prompts)) * per_prompt)
        rows = run_sweep(pair, prompts, sweep, args.out, lambda row: progress.advance(task), processes)
    if processes.is_first:
        _show(args, console, rows, sweep_table(rows), paper_table(rows))
        plot_sweep(rows, args.out)
    return 0 if all(row["lossless"] is not False for row in rows) else 1


def _progress(console: Console, shown: bool) -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))


def _micro(args: argparse.Namespace, console: Console) -> int:
    from ddtree_lab.bench.goals import GOALS
    from ddtree_lab.bench.rows import RowFile, environment
    from ddtree_lab.bench.tables import goals_table, micro_table

    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    file, rows = RowFile(folder / "micro.jsonl"), []
    for row in _micro_rows(args):
        rows.append({**row, "environment": environment()})
        file.append(rows[-1])
    _show(args, console, rows, micro_table(rows), goals_table(rows, GOALS))
    return 0


def _micro_rows(args: argparse.Namespace) -> Iterator[Row]:
    from ddtree_lab.bench import micro
    from ddtree_lab.bench.growth import bench_growth
    from ddtree_lab.bench.subjects import make_subject
    from ddtree_lab.pair import bundled_prompts

    repeats = 3 if args.quick else 40
    pair = load_pair_named(args)
    if args.target is not None:
        yield from micro.bench_verify(make_subject(pair.name, pair.target), 65, repeats=max(3, repeats // 8))
        return
    subject = make_subject("embedded", pair.target)
    yield from micro.bench_verify(subject, 33, repeats=3 * repeats)
    for nodes in (8, 32) if args.quick else (8, 16, 32, 64, 128, 256, 512, 1024):
        slow = ("tree", "scan", "paths")
        yield from micro.bench_verify(subject, nodes, slow, repeats=3 if nodes > 100 else 5)
    for budget in (16, 64) if args.quick else (16, 64, 256, 1024):
        yield from micro.bench_tree(budget, repeats=max(3, repeats // 4))
    yield from micro.bench_mask_and_commit(subject, 33, repeats)
    prompt = bundled_prompts()[0]
    for budget in (32,) if args.quick else (16, 32, 64, 128):
        yield from micro.bench_round(pair, prompt, budget)
    yield from micro.bench_back(pair, prompt, repeats)
    yield from micro.bench_start(3 if args.quick else 7)
    if not args.quick:
        yield from bench_growth(pair)
        for label, target, repeats in _wider_targets():
            wider = make_subject(label, target)
            yield from micro.bench_verify(wider, 65, repeats=repeats, with_floor=True)
            yield from micro.bench_mask_and_commit(wider, 65, repeats)
            del wider, target  # the next one is larger


def _wider_targets() -> Iterator[tuple[str, Any, int]]:
    """Random targets of real widths, with how often to run them; the last one where there is the memory for it."""
    import torch

    from ddtree_lab.bench.micro import PUBLISHED_VOCABULARY
    from ddtree_lab.bench.rows import machine
    from ddtree_lab.bench.subjects import random_hybrid

    yield "hidden 1024", random_hybrid(), 12
    if machine()["memory_gib"] >= 16:
        yield "27B width", random_hybrid(5120, 4, PUBLISHED_VOCABULARY, torch.bfloat16), 15


def _advise(args: argparse.Namespace, console: Console) -> int:
    from ddtree_lab.bench.advisor import advise_on
    from ddtree_lab.bench.rows import RowFile, environment

    pair = load_pair_named(args)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    file = RowFile(Path(args.out) / "advice.jsonl")
    by_domain: dict[str, list[Any]] = {}
    for prompt in _chosen_prompts(args):
        by_domain.setdefault(prompt.domain, []).append(prompt)
    rows, advices = [], []
    for domain, prompts in by_domain.items():
        for temperature in args.temperatures:
            advice = advise_on(pair, prompts, temperature, max_new_tokens=args.max_new_tokens, seed=args.seed)
            advices.append(advice)
            rows.append(
                {
                    "domain": domain,
                    "temperature": temperature,
                    **advice.to_dict(),
                    "environment": environment(),
                }
            )
            file.append(rows[-1])
    _show(args, console, rows, *advices)
    return 0


def _soak(args: argparse.Namespace, console: Console) -> int:
    from ddtree_lab.bench.rows import RowFile, environment
    from ddtree_lab.bench.soak import soak

    pair = load_pair_named(args)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    report = soak(pair, _chosen_prompts(args), args.rounds)
    row = {**report.to_dict(), "environment": environment()}
    RowFile(Path(args.out) / "soak.jsonl").append(row)
    _show(args, console, [row], report)
    return 0 if report.ok else 1


def _page(args: argparse.Namespace, console: Console) -> int:
    from ddtree_lab.bench.page import write_page

    console.print(f"wrote {write_page(args.out)}", highlight=False)
    return 0
