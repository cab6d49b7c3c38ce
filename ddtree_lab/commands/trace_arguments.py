"""What the commands that read saved traces share. None of them needs torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_lab.cli import UsageError

if TYPE_CHECKING:
    from ddtree_lab.trace import Trace


def positive(text: str) -> int:
    """A number that counts from 1."""
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return number


def load(path: str, run: int | None = None) -> Trace:
    """A saved trace, or a one-line usage error.

    Args:
        run: of a file that holds several, counted from 1.
    """
    from ddtree_lab.trace import Trace

    try:
        return Trace.load(path, 0 if run is None else run - 1)
    except (OSError, ValueError) as fault:
        raise UsageError(str(fault)) from fault


RUN_HELP = (
    "which run of a file that the published code saved with several, counted from 1 (default: the first)"
)


def round_index(trace: Trace, number: int | None) -> int | None:
    """The index of the round that is called `number` in every picture."""
    if number is not None and number > len(trace.rounds):
        raise UsageError(f"--round {number}: the trace has {len(trace.rounds)} rounds.")
    return None if number is None else number - 1


def check_target(path: str) -> None:
    """Complain about a file that cannot be written before anything is drawn."""
    if Path(path).is_dir():
        raise UsageError(f"{path} is a folder; name a file.")
    if not Path(path).parent.is_dir():
        raise UsageError(f"{path}: there is no folder {Path(path).parent}.")
