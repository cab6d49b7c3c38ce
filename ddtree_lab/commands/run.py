"""`ddtree-lab run`: the same prompt with every method, side by side."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_lab.cli import UsageError
from ddtree_lab.commands.pair_arguments import USER_ERRORS, add_pair_arguments, load_pair_named

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

    from ddtree_lab.decode import Generation
    from ddtree_lab.pair import Pair, Prompt

NUMBERS_WIDTH = 95  # columns of the table without the text
WIDE = NUMBERS_WIDTH + 15  # from here on there is room for it
YES_NO = {True: "✓ yes", False: "✗ NO"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", metavar="ID", help="hub id or folder, or smollm2 (default: the embedded pair)"
    )
    parser.add_argument(
        "--drafter",
        metavar="ID",
        help="hub id or folder of its DFlash drafter, or ngram, which drafts for any target",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="the user's message")
    source.add_argument(
        "--prompt-file", metavar="FILE", help="read the message from a file, - for standard input"
    )
    source.add_argument(
        "--bundled", metavar="ID", help="a bundled held-out prompt (--list-prompts shows them)"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before it")
    parser.add_argument(
        "--raw", action="store_true", help="take the text as it is, without the chat template"
    )
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="enable_thinking of the chat template (default: the template's own)",
    )
    parser.add_argument("--list-prompts", action="store_true", help="list the bundled prompts and stop")
    parser.add_argument(
        "--method",
        choices=("autoregressive", "dflash", "ddtree"),
        help="only this one, beside plain decoding",
    )
    parser.add_argument("--max-new-tokens", type=_positive, default=100, metavar="N", help="default 100")
    parser.add_argument(
        "--tree-budget",
        type=_budgets,
        default=[32, 64],
        metavar="N[,N]",
        help="drafted nodes, or auto: every round its own (default 32,64)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy")
    parser.add_argument("--top-k", type=_positive, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default 0")
    parser.add_argument("--trace", metavar="FILE", help="save the rounds of the largest tree budget as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_pair_arguments(parser)


def _positive(text: str) -> int:
    number = int(text) if text.strip().isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return number


def _budgets(text: str) -> list[int | str]:
    """Numbers rising, then `auto`."""
    parts = {part.strip() for part in text.split(",")}
    numbers: list[int | str] = sorted({_positive(part) for part in parts - {"auto"}})
    return [*numbers, "auto"] if "auto" in parts else numbers


@dataclass(frozen=True)
class Result:
    """One method's row."""

    generation: Generation
    speedup: float
    lossless: bool

    @property
    def label(self) -> str:
        budget = self.generation.tree_budget
        return self.generation.method if budget is None else f"{self.generation.method} {budget}"

    def to_dict(self) -> dict[str, Any]:
        g = self.generation
        return {
            "method": g.method,
            "tree_budget": g.tree_budget,
            "text": g.text,
            "token_ids": list(g.token_ids),
            "num_emitted_tokens": g.num_emitted_tokens,
            "num_rounds": g.num_rounds,
            "mean_emitted_tokens": g.mean_emitted_tokens,
            "mean_accepted_drafts": g.mean_accepted_drafts,
            "tokens_per_second": g.tokens_per_second,
            "speedup": self.speedup,
            "lossless": self.lossless,
        }


def execute(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ddtree_lab.threads import fitting_threads

    console = Console(stderr=args.json)
    if args.list_prompts:
        _list_prompts(args.json)
        return 0
    try:
        _check_drafter(args)
        if args.trace:
            _check_trace(args)
        with _progress(console) as progress:
            pair, prompt = _load(args, progress)
            with fitting_threads(pair.target):
                results = _decode(args, pair, prompt, progress)
        trace = results[-1].generation.trace
        if args.trace and trace is not None:
            trace.save(args.trace)
    except USER_ERRORS as error:
        raise UsageError(str(error)) from error
    if args.json:
        print(json.dumps(_report(pair, prompt, results), ensure_ascii=False, indent=2))
    else:
        show(console, prompt, results)
        if args.trace:
            console.print(f"trace saved to {args.trace}", highlight=False)
    return 0 if all(result.lossless for result in results) else 1


def _load(args: argparse.Namespace, progress: Any) -> tuple[Pair, Prompt]:
    task = progress.add_task("loading the pair", total=None)
    pair = load_pair_named(args)
    prompt = _prompt(args)
    progress.remove_task(task)
    return pair, prompt


def _prompt(args: argparse.Namespace) -> Prompt:
    from ddtree_lab.pair import Prompt, bundled_prompts

    text = args.prompt
    if args.prompt_file == "-":
        text = sys.stdin.read()
    elif args.prompt_file is not None:
        text = Path(args.prompt_file).read_text(encoding="utf-8")
    if text is not None:
        return Prompt("given", "chat", "given", text)
    prompts = {prompt.id: prompt for prompt in bundled_prompts()}
    wanted = args.bundled or next(iter(prompts))
    if wanted not in prompts:
        raise UsageError(f"--bundled {wanted!r} is no bundled prompt; run with --list-prompts to see them.")
    return prompts[wanted]


def compare(
    pair: Pair,
    input_ids: Tensor,
    *,
    tree_budgets: Sequence[int | str],
    methods: Sequence[str] = ("dflash", "ddtree"),
    max_new_tokens: int = 100,
    on_progress: Callable[[str, int], None] | None = None,
    **sampling: Any,
) -> list[Result]:
    """Plain decoding first, then each method (DDTree at each budget), measured one after the other.

    The last run is recorded. `on_progress` is told the run's name and how many tokens came.
    """
    from ddtree_lab.decode import AUTOREGRESSIVE, generate

    runs: list[dict[str, Any]] = [dict(method=AUTOREGRESSIVE)]
    for method in methods:
        budgets = [dict(tree_budget=budget) for budget in tree_budgets] if method == "ddtree" else [{}]
        runs += [dict(method=method, **budget) for budget in budgets if method != AUTOREGRESSIVE]
    for run in runs:  # the first pass of a kind pays for lazy set-up, here and not in a measured run
        generate(pair, input_ids, max_new_tokens=3, **run, **sampling)
    results: list[Result] = []
    for run in runs:
        name = " ".join(map(str, run.values()))

        def tell(tokens: Sequence[int], name: str = name) -> None:
            if on_progress is not None:
                on_progress(name, len(tokens))

        is_recorded = run is runs[-1] and run["method"] != AUTOREGRESSIVE
        generation = generate(
            pair,
            input_ids,
            max_new_tokens=max_new_tokens,
            record=is_recorded,
            on_tokens=tell,
            **run,
            **sampling,
        )
        plain = results[0].generation if results else generation
        speedup = generation.tokens_per_second / plain.tokens_per_second
        results.append(Result(generation, speedup, generation.token_ids == plain.token_ids))
    return results


def _decode(args: argparse.Namespace, pair: Pair, prompt: Prompt, progress: Any) -> list[Result]:
    tasks: dict[str, Any] = {}

    def advance(name: str, num_tokens: int) -> None:
        if name not in tasks:
            for task in tasks.values():
                progress.update(task, visible=False)
            tasks[name] = progress.add_task(name, total=args.max_new_tokens)
        progress.advance(tasks[name], num_tokens)

    raw = True if args.raw else None  # a bundled prompt knows itself whether it is raw
    return compare(
        pair,
        pair.encode(prompt, system=args.system, raw=raw, enable_thinking=args.thinking),
        tree_budgets=args.tree_budget,
        methods=("dflash", "ddtree") if args.method is None else (args.method,),
        max_new_tokens=args.max_new_tokens,
        on_progress=advance,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )


def _check_drafter(args: argparse.Namespace) -> None:
    from ddtree_lab.smollm2 import SMOLLM2

    if args.target not in (None, SMOLLM2) and args.drafter is None:
        raise UsageError(
            f"--target {args.target} needs a drafter: name its DFlash drafter with --drafter, or give "
            "--drafter ngram, which drafts for any target."
        )


def _check_trace(args: argparse.Namespace) -> None:
    """Complain before the decode, not after it."""
    path = Path(args.trace)
    if args.method == "autoregressive":
        raise UsageError("--trace needs rounds to record; run with --method dflash or ddtree, or with all.")
    if not path.parent.is_dir():
        raise UsageError(f"--trace {path}: there is no folder {path.parent}.")
    if path.is_dir():
        raise UsageError(f"--trace {path} is a folder; name a file.")


def _report(pair: Pair, prompt: Prompt, results: list[Result]) -> dict[str, Any]:
    from ddtree_lab.environment import environment_summary

    return {
        "pair": pair.name,
        "prompt": prompt.text,
        "results": [result.to_dict() for result in results],
        "environment": environment_summary(),
    }


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress


def show(console: Console, prompt: Prompt, results: list[Result]) -> None:
    """Prompt, text, the tree of a round, and the table."""
    from rich.panel import Panel
    from rich.text import Text

    from ddtree_lab.view.numbers import most_interesting, title
    from ddtree_lab.view.payload import trace_payload
    from ddtree_lab.view.text import draw_round

    console.print(Panel(Text(prompt.text), title="prompt", title_align="left"))
    console.print(Panel(Text(results[0].generation.text), title="plain decoding says", title_align="left"))
    trace = results[-1].generation.trace
    if trace is not None and trace.rounds:
        rounds = trace_payload(trace)["rounds"]
        shown = most_interesting(rounds)
        console.print(Text(title(rounds[shown], shown + 1, len(rounds)), "bold"))
        console.print(draw_round(rounds[shown]))
        console.print()
    console.print(results_table(results, console.width))
    if advice := _advice(results):
        console.print(Text(advice))
    for result in results:
        if not result.lossless:
            console.print(Text(first_difference(result, results[0]), "red"))


def _advice(results: list[Result]) -> str:
    """Which budget pays, foreseen from the recorded rounds and what rounds of each size took just now."""
    from ddtree_lab.bench.advisor import advise, costs_seen
    from ddtree_lab.bench.replay import replayed

    generations = [result.generation for result in results]
    costs, trace = costs_seen(generations), generations[-1].trace
    if costs is None or trace is None or not trace.rounds or generations[-1].method != "ddtree":
        return ""
    chain = [round_ for made in generations if made.method == "dflash" for round_ in replayed(made)]
    return advise(trace.rounds, costs, chain=chain).sentence


def results_table(results: list[Result], width: int = WIDE) -> Table:
    """One row a method; the text's beginning only where the page is wide enough."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    has_text = width >= WIDE
    table = Table(
        box=box.ROUNDED if has_text else box.SIMPLE_HEAD,
        padding=(0, 1) if has_text else 0,
        pad_edge=has_text,
        caption="accepted drafts and emitted tokens are means over rounds; a round emits its accepted drafts and "
        "one token of the target's own",
        caption_justify="left",
    )
    table.add_column("method", no_wrap=True)
    if has_text:
        table.add_column("text", no_wrap=True, max_width=min(40, width - NUMBERS_WIDTH))
    for name in ("tokens", "rounds", "accepted\ndrafts", "emitted\ntokens", "tokens/s", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("lossless", justify="center", no_wrap=True)
    for result in results:
        g = result.generation
        text = Text(" ".join(g.text.split()), overflow="ellipsis")
        table.add_row(
            result.label,
            *([text] if has_text else []),
            str(g.num_emitted_tokens),
            str(g.num_rounds),
            f"{g.mean_accepted_drafts:.2f}",
            f"{g.mean_emitted_tokens:.2f}",
            f"{g.tokens_per_second:.0f}",
            f"{result.speedup:.2f}×",
            Text(YES_NO[result.lossless], "bold green" if result.lossless else "bold red"),
        )
    return table


def first_difference(result: Result, plain: Result) -> str:
    """Where a text leaves plain decoding's, in words."""
    found, expected = result.generation.token_ids, plain.generation.token_ids
    pairs = zip(found, expected, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
    return (
        f"{result.label} leaves plain decoding at new token {index}: "
        f"token {found[index] if index < len(found) else 'none'} instead of "
        f"{expected[index] if index < len(expected) else 'none'}; it says: {result.generation.text!r}"
    )


def _list_prompts(as_json: bool) -> None:
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ddtree_lab.pair import bundled_prompts

    prompts = bundled_prompts()
    if as_json:
        print(json.dumps([asdict(prompt) for prompt in prompts], ensure_ascii=False, indent=2))
        return
    table = Table(title="bundled prompts, held out from training", title_justify="left")
    for name in ("id", "domain", "kind", "text"):
        table.add_column(name)
    for prompt in prompts:
        table.add_row(prompt.id, prompt.domain, prompt.kind, Text(prompt.text[:160], overflow="ellipsis"))
    Console().print(table)
