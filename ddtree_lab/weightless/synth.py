"""Random checkpoints of a target and its drafter in the exact published layout, at any scale.

What is random is only the numbers: files, names, shapes, dtypes, configs and index are those that the
published checkpoints have, so that every loading path can be walked without downloading one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig, PreTrainedModel

from ddtree_lab.drafter_config import DFlashConfig
from ddtree_lab.environment import version_of
from ddtree_lab.pair import assets_folder
from ddtree_lab.records import Record, format_bytes
from ddtree_lab.trace import write_atomically
from ddtree_lab.weightless.models import build_weightless_drafter
from ddtree_lab.weightless.presets import config_from_dict, find_preset
from ddtree_lab.weightless.scales import PairConfigs, pair_configs
from ddtree_lab.weightless.shards import Initialise, Shards

if TYPE_CHECKING:
    from rich.table import Table

MARKER = "synth.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SHARD_BYTES = {"tiny": 500_000, "small": 2 * 10**9, "full": 4 * 10**9}
SPARE_BYTES = 100 * 2**20  # left free on the disk
STD = 0.02  # of the drafter's matrices

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Synthesis(Record):
    """What was written.

    Args:
        target, drafter: the two checkpoint folders.
        num_bytes: of all weights; `kept_bytes` of them were there from an earlier, interrupted run.
    """

    preset: str
    scale: str
    target: Path
    drafter: Path
    num_target_tensors: int
    num_drafter_tensors: int
    num_shards: int
    num_bytes: int
    kept_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "target": str(self.target), "drafter": str(self.drafter)}

    def __repr__(self) -> str:
        return (
            f"Synthesis({self.preset} {self.scale}: {format_bytes(self.num_bytes)} in {self.target.parent})"
        )

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("target", str(self.target))
        table.add_row("", f"{self.num_target_tensors} tensors in {self.num_shards} shards")
        table.add_row("drafter", str(self.drafter))
        table.add_row("", f"{self.num_drafter_tensors} tensors")
        kept = f", {format_bytes(self.kept_bytes)} of them kept" if self.kept_bytes else ""
        table.add_row("weights", f"{format_bytes(self.num_bytes)}{kept}; random, like {self.preset}")
        return table


def synthesise(
    preset: str,
    folder: str | Path,
    *,
    scale: str = "tiny",
    num_layers: int | None = None,
    multimodal: bool = False,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Synthesis:
    """Write `folder`/target and `folder`/drafter: random weights in a preset's published layout.

    A second call with the same arguments continues an interrupted one and gives the same bytes. Never more
    than one shard is in memory.

    Args:
        preset: name of a bundled preset.
        scale: `"tiny"` (a few MB, all dimensions shrunk), `"small"` (real widths and vocabulary, few
            layers), `"full"`.
        num_layers: target layers, instead of the scale's own number.
        multimodal: the target in its published multimodal wrapper, with a stand-in for the vision tower.
        on_progress: told bytes done and bytes in all.

    Raises:
        ValueError: a preset or scale that does not exist, or a folder that holds something else.
        OSError: the disk has too little room; nothing is written then.
    """
    root = Path(folder)
    configs = pair_configs(find_preset(preset), scale, num_layers=num_layers, multimodal=multimodal)
    settings = {
        "preset": find_preset(preset).name,
        "scale": scale,
        "num_layers": num_layers,
        "multimodal": multimodal,
        "seed": seed,
        **{package: version_of(package) for package in ("ddtree-lab", "torch", "transformers")},
    }
    _check_folder(root, settings)
    target = _weightless(configs.target, multimodal)
    drafter = build_weightless_drafter(DFlashConfig.from_dict(configs.drafter))
    jobs = (
        (Shards(target, root / "target", SHARD_BYTES[scale]), _library_init(target)),
        (Shards(drafter, root / "drafter"), _init_drafter),
    )
    missing = sum(shards.missing_bytes for shards, _ in jobs)
    _check_disk(root, missing)
    for name in ("target", "drafter"):
        (root / name).mkdir(parents=True, exist_ok=True)
    write_atomically(root / MARKER, json.dumps(settings, indent=2) + "\n")
    _write_small_files(root, configs, target)
    total, done = sum(shards.num_bytes() for shards, _ in jobs), 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress(done, total)

    for shards, initialise in jobs:
        shards.write(initialise, seed, advance)
    (to_target, _), (to_drafter, _) = jobs
    return Synthesis(
        preset=str(settings["preset"]),
        scale=scale,
        target=root / "target",
        drafter=root / "drafter",
        num_target_tensors=len(to_target.tensors),
        num_drafter_tensors=len(to_drafter.tensors),
        num_shards=len(to_target.split.filename_to_tensors),
        num_bytes=total,
        kept_bytes=total - missing,
    )


def _weightless(config: dict[str, Any], multimodal: bool) -> PreTrainedModel:
    auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config_from_dict(config), dtype=torch.bfloat16)


def _check_folder(root: Path, settings: dict[str, Any]) -> None:
    """Go on only in an empty folder, or in one that was begun with the same settings."""
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root} is a file; name a folder.")
    if not root.is_dir() or not any(root.iterdir()):
        return
    if not (root / MARKER).is_file():
        raise ValueError(f"{root} is not empty and holds no {MARKER} of an earlier run; name another folder.")
    begun = json.loads((root / MARKER).read_text(encoding="utf-8"))
    other = [
        f"{key} {begun.get(key)}, not {value}" for key, value in settings.items() if begun.get(key) != value
    ]
    if other:
        raise ValueError(f"{root} was begun with {'; '.join(other)}; name another folder or delete it.")


def _check_disk(root: Path, num_bytes: int) -> None:
    place = next(path for path in (root.absolute(), *root.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    if num_bytes and num_bytes + SPARE_BYTES > free:
        raise OSError(
            f"{root} needs {format_bytes(num_bytes)} and {format_bytes(SPARE_BYTES)} to spare, but its disk has "
            f"{format_bytes(free)} free; choose a smaller scale, or another disk."
        )


def _write_small_files(root: Path, configs: PairConfigs, target: PreTrainedModel) -> None:
    target.config.architectures = configs.target["architectures"]
    write_atomically(root / "target" / "config.json", target.config.to_json_string())
    generation = GenerationConfig(**configs.generation)
    write_atomically(root / "target" / "generation_config.json", generation.to_json_string())
    for name in TOKENIZER_FILES:
        text = (assets_folder() / "embedded_pair" / "target" / name).read_text(encoding="utf-8")
        write_atomically(root / "target" / name, text)
    write_atomically(root / "drafter" / "config.json", json.dumps(configs.drafter, indent=2) + "\n")


def _library_init(target: PreTrainedModel) -> Initialise:
    """The library's own initialisation of a module, by the innermost model around it."""
    models = {name: module for name, module in target.named_modules() if isinstance(module, PreTrainedModel)}

    def initialise(name: str, module: nn.Module) -> None:
        around = [n for n in models if f"{name}.".startswith(f"{n}.") or not n]
        models[max(around, key=len)]._init_weights(module)

    return initialise


def _init_drafter(name: str, module: nn.Module) -> None:
    """As the library initialises a Qwen3: matrices normal, norms one."""
    for parameter in module.parameters(recurse=False):
        if parameter.ndim >= 2:
            parameter.normal_(std=STD)
        else:
            parameter.fill_(0.0 if name.endswith("_proj") else 1.0)  # a projection's vector is its bias
