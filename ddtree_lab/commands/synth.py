"""`ddtree-lab synth`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ddtree_lab.cli import UsageError

if TYPE_CHECKING:
    from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--like", required=True, metavar="PRESET", help="e.g. qwen3.6-27b")
    parser.add_argument("--out", required=True, metavar="DIR", help="gets the folders target and drafter")
    parser.add_argument(
        "--scale",
        choices=("tiny", "small", "full"),
        default="tiny",
        help="tiny: a few MB; small: real widths, few layers; full (default tiny)",
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="target layers, instead of the scale's own number"
    )
    parser.add_argument(
        "--multimodal", action="store_true", help="the target in its published multimodal wrapper"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default 0")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def execute(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ddtree_lab.weightless.models import quiet_libraries
    from ddtree_lab.weightless.synth import synthesise

    quiet_libraries()
    console = Console(stderr=args.json)
    try:
        with _progress(console) as advance:
            synthesis = synthesise(
                args.like,
                args.out,
                scale=args.scale,
                num_layers=args.layers,
                multimodal=args.multimodal,
                seed=args.seed,
                on_progress=advance,
            )
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if args.json:
        print(json.dumps(synthesis.to_dict(), indent=2))
    else:
        console.print(synthesis)
        console.print(f"\n{_next_command(args)}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _next_command(args: argparse.Namespace) -> str:
    """Narrow random logits are nearly tied; in bfloat16 rounding would decide between them."""
    dtype = " --dtype float32" if args.scale == "tiny" else ""
    return f"ddtree-lab run --target {args.out}/target --drafter {args.out}/drafter{dtype}"


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("writing", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
