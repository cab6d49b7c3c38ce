"""A checkpoint folder before anything is built from it: its config, its files, the shapes in their headers.

Whatever is broken is said here, in one sentence that names the file, before a byte of weights is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder by name; only their headers have been read.

    Args:
        role: `"target"` or `"drafter"`, for messages.
        shapes: shape of each tensor.
        files: where each tensor is.
    """

    folder: Path
    role: str
    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, Path]

    def check(self, expected: Mapping[str, Sequence[int]]) -> None:
        """Compare names and shapes with those that the config asks for.

        Raises:
            ValueError: listing what is missing, unexpected or of another shape.
        """
        missing, unexpected = (
            ", ".join(sorted(set(a) - set(b))) or "none"
            for a, b in ((expected, self.shapes), (self.shapes, expected))
        )
        if (missing, unexpected) != ("none", "none"):
            raise ValueError(
                f"{self.role}: the tensors in {self.folder} do not fit its config.json. "
                f"Missing: {missing}. Unexpected: {unexpected}."
            )
        wrong = [name for name in sorted(expected) if tuple(expected[name]) != self.shapes[name]]
        if wrong:
            name, more = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise ValueError(
                f"{self.role}: {name}{more} in {self.folder} has shape {list(self.shapes[name])}, its config.json "
                f"asks for {list(expected[name])}; the two are not of one checkpoint."
            )

    def read(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Every tensor, converted one at a time."""
        return {
            name: tensor if dtype is None else tensor.to(dtype)
            for file in sorted(set(self.files.values()))
            for name, tensor in _tensors(file)
        }


def read_json(file: Path, role: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a JSON object, saying where it breaks.
    """
    if not file.is_file():
        raise FileNotFoundError(
            f"{role}: {file.parent} has no {file.name}; give a hub id or a folder with a checkpoint."
        )
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # also bytes that are not UTF-8
        raise ValueError(f"{role}: {file} is not valid JSON ({error}); download it again.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{role}: {file} holds a {type(value).__name__}, a JSON object is expected.")
    return value


def open_checkpoint(folder: Path, role: str, allow_pickle: bool = False) -> Checkpoint:
    """Read the headers of a folder's weights.

    Raises:
        FileNotFoundError: no safetensors (pickles are named, not read), or shards are absent.
        ValueError: a file is corrupt or cut short.
    """
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder, role, allow_pickle):
        try:
            found = _shapes(file)
        except SafetensorError as error:
            raise ValueError(
                f"{role}: {file} is not a whole safetensors file ({error}); it is cut short, corrupt or a "
                "Git LFS pointer: download it again."
            ) from None
        shapes |= found
        files |= dict.fromkeys(found, file)
    return Checkpoint(folder, role, shapes, files)


def check_weights(folder: Path, role: str, allow_pickle: bool = False) -> None:
    """What `open_checkpoint` would complain about; pickles that are allowed are not opened for it."""
    if weight_files(folder, role, allow_pickle)[0].suffix not in PICKLE_SUFFIXES:
        open_checkpoint(folder, role)


def weight_files(folder: Path, role: str, allow_pickle: bool = False) -> list[Path]:
    """One file, the shards an index names, or what safetensors files there are; looked for in this order."""
    if (folder / WEIGHTS_NAME).is_file():
        return [folder / WEIGHTS_NAME]
    if (folder / INDEX_NAME).is_file():
        return _shards(folder / INDEX_NAME, role)
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(file for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles and allow_pickle:
        return pickles
    hint = (
        f" It holds {', '.join(file.name for file in pickles)}; pickled weights are refused, as they can run "
        "code: convert them to safetensors, or pass allow='pickle'."
    )
    raise FileNotFoundError(f"{role}: {folder} has no .safetensors file.{hint if pickles else ''}")


def _shards(index: Path, role: str) -> list[Path]:
    weight_map = read_json(index, role).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{role}: {index} has no weight_map, so it names no shards; download it again.")
    shards = [index.parent / name for name in sorted(set(weight_map.values()))]
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise FileNotFoundError(
            f"{role}: {index} names {', '.join(absent)}, absent from the folder; download the rest of the checkpoint."
        )
    return shards


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    if file.suffix in PICKLE_SUFFIXES:
        return {name: tuple(tensor.shape) for name, tensor in _tensors(file)}
    with safe_open(file, framework="pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 (no dict)


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.suffix in PICKLE_SUFFIXES:
        yield from torch.load(file, map_location="cpu", weights_only=True).items()
        return
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (no dict)
            yield name, opened.get_tensor(name)
