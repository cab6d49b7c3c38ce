"""`ddtree-lab plan`."""

from __future__ import annotations

import argparse
import json

from ddtree_lab.cli import UsageError
from ddtree_lab.commands.pair_arguments import USER_ERRORS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a preset such as qwen3.6-27b, smollm2, a folder, or a hub id"
    )
    parser.add_argument("--drafter", metavar="D", help="the same for its drafter (default: the preset's)")
    parser.add_argument(
        "--memory",
        metavar="SIZE[,SIZE]",
        help="of each device, e.g. 48GB,48GB (default: the devices of this machine)",
    )
    parser.add_argument("--dtype", help="of unquantised weights (default: the checkpoint's)")
    parser.add_argument("--tree-budget", type=int, default=64, metavar="N", help="drafted nodes (default 64)")
    parser.add_argument(
        "--context", type=int, default=4096, metavar="N", help="tokens of prompt and text (default 4096)"
    )
    parser.add_argument(
        "--reserve", default="0.5GB", metavar="SIZE", help="left alone on each device (default 0.5GB)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def execute(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ddtree_lab.weightless.models import quiet_libraries
    from ddtree_lab.weightless.plan import plan_memory

    quiet_libraries()
    try:
        plan = plan_memory(
            args.model,
            args.memory.split(",") if args.memory else _devices_here(),
            args.drafter,
            dtype=args.dtype,
            tree_budget=args.tree_budget,
            context=args.context,
            reserve=args.reserve,
        )
    except USER_ERRORS as error:
        raise UsageError(str(error)) from error
    if args.json:
        print(json.dumps(plan.to_dict(), indent=2))
    else:
        Console().print(plan)
    return 0 if plan.fits else 1


def _devices_here() -> list[int]:
    import torch

    sizes = [torch.cuda.mem_get_info(i)[1] for i in range(torch.cuda.device_count())]
    if not sizes:
        raise UsageError("this machine has no CUDA device; say what to plan for, e.g. --memory 48GB,48GB.")
    return sizes
