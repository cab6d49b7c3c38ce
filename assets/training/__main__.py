"""Train the embedded pair from nothing: `python -m assets.training [STAGE ...]`.

Stages run in order and are resumable: a finished one is skipped, an interrupted training goes on
from its last checkpoint. `--fresh` throws earlier work away. Everything but the result goes to
`assets/training/build/`.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import train_drafter, train_target
from .data import ROWS_FILE, build_rows
from .export import export
from .model_card import write_model_card
from .settings import BUILD, ROLLOUTS_FILE, TOKENIZER_FOLDER
from .tokenizer import train_tokenizer

NUM_PROCESSES = 2


@dataclass(frozen=True)
class Stage:
    """A step of the way and what tells that it is done."""

    run: Callable[[], None]
    is_done: Callable[[], bool]


def in_processes(module: str) -> Callable[[], None]:
    """Run a module under `torchrun`, one thread a process."""

    def run() -> None:
        command = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(NUM_PROCESSES),
            "-m",
            f"assets.training.{module}",
        ]
        root = Path(__file__).resolve().parents[2]
        subprocess.run(
            [sys.executable, *command], check=True, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )

    return run


STAGES = {
    "tokenizer": Stage(train_tokenizer, TOKENIZER_FOLDER.exists),
    "rows": Stage(build_rows, ROWS_FILE.exists),
    "target": Stage(in_processes("train_target"), train_target.is_done),
    "rollouts": Stage(in_processes("rollouts"), ROLLOUTS_FILE.exists),
    "drafter": Stage(in_processes("train_drafter"), train_drafter.is_done),
    "export": Stage(export, lambda: False),
    "evaluate": Stage(in_processes("evaluate"), lambda: False),
    "card": Stage(write_model_card, lambda: False),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default all")
    parser.add_argument("--fresh", action="store_true", help="delete build/ first")
    arguments = parser.parse_args()
    unknown = set(arguments.stages) - set(STAGES)
    if unknown:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}; choose from {', '.join(STAGES)}")
    if arguments.fresh:
        shutil.rmtree(BUILD, ignore_errors=True)
    for name in arguments.stages or STAGES:
        if STAGES[name].is_done():
            print(f"{name}: done before", flush=True)
            continue
        print(f"{name}: running", flush=True)
        STAGES[name].run()


if __name__ == "__main__":
    main()
