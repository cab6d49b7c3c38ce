"""`ddtree-lab doctor`: is it the drafter or the port, and where."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from ddtree_lab.cli import UsageError
from ddtree_lab.commands.pair_arguments import USER_ERRORS, add_pair_arguments, load_pair_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", metavar="ID", help="preset, hub id or folder (default: the embedded pair)"
    )
    parser.add_argument("--drafter", metavar="ID", help="hub id or folder of its DFlash drafter, or ngram")
    parser.add_argument(
        "--port",
        metavar="MODULE:CLASS",
        help="examine this port (called with the pair) instead of the built-in one",
    )
    parser.add_argument(
        "--inject", metavar="BUG[,BUG]", help="make these mistakes in the built-in port on purpose"
    )
    parser.add_argument("--list-bugs", action="store_true", help="explain the known bugs and stop")
    parser.add_argument("--list-checks", action="store_true", help="explain the checks and stop")
    parser.add_argument(
        "--check", action="append", metavar="NAME", help="run only this check (may be repeated)"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="examine it on this message")
    parser.add_argument("--html", metavar="FILE", help="save the report as a page")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_pair_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    from rich.console import Console

    if args.list_bugs or args.list_checks:
        _list(args)
        return 0
    if args.port and args.inject:
        raise UsageError("--inject makes mistakes in the built-in port; leave out --port.")
    console = Console(stderr=args.json)
    try:
        report = _diagnose(args, console)
        if args.html:
            report.save_html(args.html)
    except USER_ERRORS as error:
        raise UsageError(str(error)) from error
    if args.json:
        print(report.to_json())
    else:
        console.print(report)
        if args.html:
            console.print(f"page saved to {args.html}", highlight=False)
    return 0 if report.ok else 1


def _diagnose(args: argparse.Namespace, console: Any) -> Any:
    from ddtree_lab.doctor.diagnose import diagnose

    if args.html and not Path(args.html).parent.is_dir():
        raise UsageError(f"--html {args.html}: there is no folder {Path(args.html).parent}.")
    with console.status("loading the pair") as status:
        pair = load_pair_named(args)
        port = _port(args, pair)
        return diagnose(pair, port, args.check, prompt=args.prompt, on_check=status.update)


def _port(args: argparse.Namespace, pair: Any) -> Any:
    if args.inject:
        from ddtree_lab.doctor.bugs import BuggyPort, find_bug

        bugs = [find_bug(name.strip()) for name in args.inject.split(",")]
        for bug in bugs:
            if bug.hindrance(pair):
                raise UsageError(
                    f"--inject {bug.name}: it cannot be made on this pair: {bug.hindrance(pair)}."
                )
        return BuggyPort(pair, bugs)
    return None if args.port is None else load_port(args.port, pair)


def load_port(name: str, pair: Any) -> Any:
    """The port `module:Class`, made with the pair; modules of the working directory count.

    Raises:
        UsageError: no such module or class, or it could not be made.
    """
    module_name, _, class_name = name.partition(":")
    if not class_name:
        raise UsageError(f"--port {name!r} is not of the form module:Class.")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
        return getattr(module, class_name)(pair)
    except ImportError as error:
        raise UsageError(f"--port {name}: {error}") from error
    except AttributeError as error:
        raise UsageError(
            f"--port {name}: {module_name} has no {class_name} that takes a pair ({error})."
        ) from error
    finally:
        sys.path.remove(here)


def _list(args: argparse.Namespace) -> None:
    import json

    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from ddtree_lab.doctor.bugs import BUGS
    from ddtree_lab.doctor.checks import CHECKS

    if args.list_bugs:
        columns = ("bug", "stage", "what one sees", "what it is")
        rows = [(bug.name, bug.stage, bug.symptom, bug.cause) for bug in BUGS.values()]
    else:
        columns = ("check", "stage", "question", "forwards, about")
        rows = [(check.name, check.stage, check.question, str(check.cost)) for check in CHECKS.values()]
    if args.json:
        print(
            json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2, ensure_ascii=False)
        )
        return
    console = Console()
    for name, stage, said, last in rows:
        aside = stage if args.list_bugs else f"{stage}; {'no' if last == '0' else 'about ' + last} forwards"
        console.print(Text.assemble((name, "bold"), (f"  {aside}", "dim")))
        for line in (f"seen: {said}", f"cause: {last}") if args.list_bugs else (said,):
            console.print(Padding(Text(line), (0, 0, 0, 4)))
