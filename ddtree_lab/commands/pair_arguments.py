"""Options of the commands that load a pair: in which form it is read, and where it goes."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_lab.pair import Pair

# What a bad model name, prompt or setting raises, or one that needs a package that is not installed; anything
# else is a fault of ours and keeps its traceback.
USER_ERRORS = (ValueError, TypeError, OSError, ImportError)

_OPTIONS = (
    "dtype", "device_map", "max_memory", "offload_folder", "quantization", "attn_implementation", "tp_plan",
    "revision", "drafter_revision", "local_files_only", "allow",
)  # fmt: skip


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loading the pair")
    add = group.add_argument
    add("--dtype", default="auto", help="of the target, e.g. bfloat16 (default: the checkpoint's)")
    add(
        "--device-map",
        metavar="MAP",
        help="as in from_pretrained (default: auto where there is an accelerator)",
    )
    add(
        "--max-memory", type=_memory, metavar="SIZES",
        help="for weights: of each GPU in turn, then cpu=SIZE, e.g. 40GiB,40GiB,cpu=100GiB; the rest goes to disk",
    )  # fmt: skip
    add(
        "--offload-folder",
        metavar="DIR",
        help="for weights on disk that the checkpoint holds in another form",
    )
    add("--quantization", choices=("4bit", "8bit"), help="of the target, by bitsandbytes")
    add("--attn-implementation", metavar="NAME", help="sdpa, eager or flash_attention_2")
    add("--tp-plan", choices=("auto",), help="under torchrun: split every layer over its processes")
    add("--revision", metavar="REV", help="branch, tag or commit of the target")
    add("--drafter-revision", metavar="REV", help="the same for the drafter")
    add("--local-files-only", action="store_true", default=None, help="never use the network")
    add(
        "--allow", action="append", default=[], choices=("pickle", "remote_code"),
        help="what is refused otherwise: pickled weights, a model class that comes with the checkpoint",
    )  # fmt: skip


def pair_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `load_pair`."""
    return {name: getattr(args, name) for name in _OPTIONS}


def load_pair_named(args: argparse.Namespace) -> Pair:
    """The pair that `--target`, `--drafter` and the options here name; the libraries keep quiet about it."""
    from transformers.utils import logging

    from ddtree_lab.loading import load_pair

    logging.set_verbosity_error()  # missing kernels are what `env` tells about
    logging.disable_progress_bar()
    return load_pair(args.target, args.drafter, **pair_options(args))


def _memory(text: str) -> dict[int | str, int | str]:
    found: dict[int | str, int | str] = {}
    for part in text.split(","):
        name, _, size = part.strip().rpartition("=")
        if not re.fullmatch(r"\d+(\.\d+)?[KMG]i?B|\d+", size) or (name not in ("", "cpu", "disk")):
            raise argparse.ArgumentTypeError(f"{part!r} is not a size such as 40GiB or cpu=100GiB")
        key = name or sum(isinstance(device, int) for device in found)
        found[key] = int(size) if size.isdigit() else size
    return found
