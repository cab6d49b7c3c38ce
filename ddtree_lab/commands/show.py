"""`ddtree-lab show`: a saved trace in the terminal."""

from __future__ import annotations

import argparse
import json

from ddtree_lab.commands.trace_arguments import RUN_HELP, load, positive, round_index


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a file that run --trace or Trace.save wrote")
    parser.add_argument("--run", type=positive, metavar="N", help=RUN_HELP)
    parser.add_argument("--round", type=positive, metavar="N", help="only this round, counted from 1")
    parser.add_argument("--all", action="store_true", help="every node, also those that large trees fold")
    parser.add_argument("--ascii", action="store_true", help="ASCII characters only")
    parser.add_argument("--json", action="store_true", help="what the viewer is given, as JSON")


def execute(args: argparse.Namespace) -> int:
    from ddtree_lab.view.payload import trace_payload
    from ddtree_lab.view.text import MAX_NODES
    from ddtree_lab.view.view import View, print_text

    trace = load(args.trace, args.run)
    index = round_index(trace, args.round)
    if args.json:
        payload = trace_payload(trace, rounds=None if index is None else [index])
        print(json.dumps(payload, ensure_ascii=False, indent=None))
        return 0
    view = View(trace)
    if index is None and len(trace.rounds) > 1:
        print_text(view.overview, ascii=args.ascii)
    else:
        print_text(view.drawing(index, None if args.all else MAX_NODES), ascii=args.ascii)
    return 0
