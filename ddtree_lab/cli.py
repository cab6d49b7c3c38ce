"""The command line: `ddtree-lab` and `python -m ddtree_lab`.

Each command is a module with `add_arguments` and `execute`; here is only what they share: one-line usage
errors (exit 2), a clean end on Ctrl-C, on a closed pipe and on a full disk.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ddtree_lab import __version__
from ddtree_lab.records import PLAIN_ERRORS

COMMANDS = {
    "run": "decode with every method, compare, and draw a round's tree",
    "show": "a saved trace in the terminal",
    "export": "a saved trace as a page, a picture or a graph",
    "diff": "two saved traces to their first difference",
    "doctor": "is it the drafter or the port, and where",
    "inspect": "a model from its config alone: layers, caches, bytes, the exact verify method",
    "survey": "what is exact on which architecture of the installed transformers",
    "plan": "would a pair fit, how would it be split, with which quantization",
    "synth": "random checkpoints of a target and its drafter in the published format",
    "bench": "sweeps of whole decodes, stages against their floor, the budget that pays",
    "env": "versions, kernels, devices, and what each implies",
}
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class UsageError(Exception):
    """Something the user can mend: shown as one line, exit 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ddtree-lab", description="Tree speculative decoding, step by step, exact on hybrids."
    )
    parser.add_argument("--version", action="version", version=f"ddtree-lab {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        module = importlib.import_module(f"ddtree_lab.commands.{name}")
        module.add_arguments(command)
        command.set_defaults(execute=module.execute)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        args = make_parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=PLAIN_ERRORS)  # a token's text may have what the terminal cannot show
    try:
        status = int(args.execute(args))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _complain(args.command, "interrupted", EXIT_INTERRUPTED)
    except (UsageError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        number = cause.errno if isinstance(cause, OSError) else None
        if number in (errno.EPIPE, *NO_ROOM):
            # Python would complain once more when it closes a stdout that takes nothing.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if number == errno.EPIPE:  # the reader is gone
            return 1
        if isinstance(error, UsageError) or number in NO_ROOM:
            return _complain(args.command, str(error), EXIT_USAGE)
        raise
    return status


def _complain(command: str, message: str, status: int) -> int:
    line = " ".join(message.split())
    print(f"ddtree-lab {command}: error: {line}", file=sys.stderr)
    return status
