"""`ddtree-lab env`."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def execute(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ddtree_lab.environment import describe_environment

    environment = describe_environment()
    if args.json:
        print(json.dumps(environment.to_dict(), indent=2))
    else:
        Console().print(environment)
    return 0
