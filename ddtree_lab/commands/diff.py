"""`ddtree-lab diff`: two saved traces side by side, to their first difference."""

from __future__ import annotations

import argparse
import json

from ddtree_lab.cli import UsageError
from ddtree_lab.commands.trace_arguments import RUN_HELP, check_target, load, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a saved trace")
    parser.add_argument("b", metavar="B", help="another one, or the same file with another run")
    for side in "ab":
        parser.add_argument(
            f"--run-{side}", type=positive, metavar="N", help=f"of {side.upper()}: {RUN_HELP}"
        )
    parser.add_argument("--html", metavar="FILE", help="also a page with both, step by step")
    parser.add_argument("--ascii", action="store_true", help="ASCII characters only")
    parser.add_argument("--json", action="store_true", help="where they part, as JSON")


def execute(args: argparse.Namespace) -> int:
    from ddtree_lab.view.payload import divergence
    from ddtree_lab.view.view import View, print_text

    if args.html:
        check_target(args.html)
    a, b = load(args.a, args.run_a), load(args.b, args.run_b)
    found = divergence(a, b)
    if args.json:
        print(json.dumps({"same": found is None, "divergence": found}, ensure_ascii=False, indent=2))
    view = View((a, b))
    if not args.json:
        print_text(view.drawing(), ascii=args.ascii)
    if args.html:
        try:
            view.save_html(args.html)
        except OSError as fault:
            raise UsageError(str(fault)) from fault
    return 0 if found is None else 1
