"""`ddtree-lab export`: a saved trace as a page, a picture or a graph."""

from __future__ import annotations

import argparse
from typing import Any

from ddtree_lab.cli import UsageError
from ddtree_lab.commands.trace_arguments import RUN_HELP, check_target, load, positive, round_index

FACES = ("html", "svg", "png", "dot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a file that run --trace or Trace.save wrote")
    parser.add_argument("--run", type=positive, metavar="N", help=RUN_HELP)
    parser.add_argument("--html", metavar="FILE", help="a self-contained page with every round")
    parser.add_argument("--svg", metavar="FILE", help="a picture of one round")
    parser.add_argument("--png", metavar="FILE", help="the same in pixels")
    parser.add_argument("--dot", metavar="FILE", help="the tree of one round for Graphviz")
    parser.add_argument(
        "--round", type=positive, metavar="N", help="the round of the picture (default: one that kept much)"
    )
    parser.add_argument(
        "--theme", choices=("auto", "light", "dark"), help="of the picture (default: SVG follows the reader)"
    )
    parser.add_argument(
        "--all", action="store_true", help="every node, also those that large trees leave out"
    )


def execute(args: argparse.Namespace) -> int:
    from ddtree_lab.view.svg import MAX_NODES
    from ddtree_lab.view.view import View

    files = {face: path for face in FACES if (path := getattr(args, face))}
    if not files:
        raise UsageError("nothing to write; give --html FILE, --svg FILE, --png FILE or --dot FILE.")
    for path in files.values():
        check_target(path)
    trace = load(args.trace, args.run)
    view, index = View(trace), round_index(trace, args.round)
    options: dict[str, Any] = dict(round_index=index, max_nodes=None if args.all else MAX_NODES)
    fixed = args.theme if args.theme != "auto" else None
    write = {
        "html": lambda path: view.save_html(path),
        "svg": lambda path: view.save_svg(path, theme=args.theme or "auto", **options),
        "png": lambda path: view.save_png(path, theme=fixed or "light", **options),
        "dot": lambda path: view.save_dot(path, round_index=index),
    }
    try:
        for face, path in files.items():
            write[face](path)
            print(f"wrote {path}")
    except (OSError, ValueError, RuntimeError) as fault:
        raise UsageError(str(fault)) from fault
    return 0
