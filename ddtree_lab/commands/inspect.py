"""`ddtree-lab inspect`."""

from __future__ import annotations

import argparse
import json

from ddtree_lab.cli import UsageError
from ddtree_lab.commands.pair_arguments import USER_ERRORS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a preset such as qwen3.6-27b, smollm2, a folder, or a hub id"
    )
    parser.add_argument("--dtype", help="of the weights, e.g. float32 (default: the checkpoint's)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def execute(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ddtree_lab.weightless.inspection import inspect_model
    from ddtree_lab.weightless.models import quiet_libraries

    quiet_libraries()
    try:
        inspection = inspect_model(args.model, args.dtype)
    except USER_ERRORS as error:
        raise UsageError(str(error)) from error
    if args.json:
        print(json.dumps(inspection.to_dict(), indent=2))
    else:
        Console().print(inspection)
    return 0
