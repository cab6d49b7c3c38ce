"""`ddtree-lab survey`: what is exact on which architecture of the installed library."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_lab.cli import UsageError

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", metavar="NAME[,NAME]", help="model types or class names (default: all)")
    parser.add_argument(
        "--multimodal", action="store_true", help="the multimodal classes that are no causal LM, too"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="keep results here as they are found; run again to go on where it stopped",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds an architecture may take (default 60)",
    )
    parser.add_argument(
        "--memory",
        default="2GB",
        metavar="SIZE",
        help="of data an architecture may hold (default 2GB; Linux)",
    )
    parser.add_argument("--markdown", metavar="FILE", help="write the survey as a page, as docs/survey.md is")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def execute(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ddtree_lab.survey.page import to_markdown
    from ddtree_lab.survey.run import survey
    from ddtree_lab.trace import write_atomically

    console = Console(stderr=args.json)
    try:
        architectures, memory_bytes = _architectures(args), _size(args.memory)
        if args.markdown and not Path(args.markdown).parent.is_dir():
            raise ValueError(f"--markdown {args.markdown}: there is no folder {Path(args.markdown).parent}.")
        with _progress(console) as advance:
            found = survey(
                architectures,
                out=args.out,
                seconds=args.timeout,
                memory_bytes=memory_bytes,
                on_progress=advance,
            )
        if args.markdown:
            write_atomically(args.markdown, to_markdown(found))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        console.print(found)
        console.print(f"\n{found.seconds:.0f} s", highlight=False)
    return 0


def _architectures(args: argparse.Namespace) -> dict[str, str]:
    from ddtree_lab.survey.architectures import causal_architectures, multimodal_architectures
    from ddtree_lab.survey.run import choose

    if args.timeout <= 0:
        raise ValueError(f"--timeout is {args.timeout:g}; give a number of seconds above 0.")
    known = causal_architectures()
    if args.only:
        wanted = [name.strip() for name in args.only.split(",") if name.strip()]
        return choose({**multimodal_architectures(), **known}, wanted)
    return {**known, **multimodal_architectures()} if args.multimodal else known


def _size(text: str) -> int:
    from accelerate.utils import convert_file_size_to_int

    try:
        size = int(convert_file_size_to_int(text))
    except ValueError as error:
        raise ValueError(f"--memory is {text!r}; give a size such as 2GB.") from error
    return size


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<40.40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def advance(name: str, step: str, done: int, total: int) -> None:
            progress.update(task, description=f"{name} {step}", completed=done, total=total)

        yield advance
