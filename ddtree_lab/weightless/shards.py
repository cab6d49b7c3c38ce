"""Random weights written shard by shard: bounded memory, resumable, the same bytes every time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn

from ddtree_lab.checkpoint import INDEX_NAME
from ddtree_lab.trace import write_atomically

Initialise = Callable[[str, nn.Module], None]
OnTensor = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Shards:
    """A model's checkpoint files, planned.

    Args:
        model: on the meta device.
        folder: where they go.
        shard_bytes: largest file; a tensor above it gets one of its own. One file if not given.
    """

    model: nn.Module
    folder: Path
    shard_bytes: int | None = None
    tensors: dict[str, Tensor] = field(init=False)
    split: StateDictSplit = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", _stored_tensors(self.model))
        limit = self.shard_bytes or self.num_bytes() + 1
        object.__setattr__(
            self, "split", split_torch_state_dict_into_shards(self.tensors, max_shard_size=limit)
        )

    def num_bytes(self, names: Iterable[str] | None = None) -> int:
        """Bytes of some tensors, or of all."""
        return sum(self.tensors[name].nbytes for name in (self.tensors if names is None else names))

    @property
    def finished(self) -> list[str]:
        """Files that are there: written whole, since each is renamed into place."""
        return [name for name in self.split.filename_to_tensors if (self.folder / name).is_file()]

    @property
    def missing_bytes(self) -> int:
        files, finished = self.split.filename_to_tensors, set(self.finished)
        return sum(self.num_bytes(names) for file, names in files.items() if file not in finished)

    def write(self, initialise: Initialise, seed: int, on_tensor: OnTensor = lambda num_bytes: None) -> None:
        """Write what is missing: random tensors, one shard in memory at a time, and the index.

        A module is initialised from a seed of its own, so that no tensor depends on what was made before
        it, and a resumed run gives the bytes of an uninterrupted one.

        Args:
            initialise: fills the parameters of one module, called with its name.
            on_tensor: told the bytes of each tensor, also of those in finished files.
        """
        for file, names in sorted(self.split.filename_to_tensors.items()):
            if (self.folder / file).is_file():
                on_tensor(self.num_bytes(names))
            else:
                _save(self._make(names, initialise, seed, on_tensor), self.folder / file)
        if self.split.is_sharded:
            index = {"metadata": self.split.metadata, "weight_map": self.split.tensor_to_filename}
            write_atomically(self.folder / INDEX_NAME, json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _make(
        self, names: Sequence[str], initialise: Initialise, seed: int, on_tensor: OnTensor
    ) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name in names:
            if name not in made:
                found = _random_parameters(self.model, name.rpartition(".")[0], initialise, seed)
                made.update({key: value for key, value in found.items() if key in names})
            on_tensor(made[name].nbytes)
        return made


def _stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds, by name; tied tensors once, under their first name."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return {name: state[name] for name in first.values()}


def _random_parameters(model: nn.Module, name: str, initialise: Initialise, seed: int) -> dict[str, Tensor]:
    """The own parameters of the module called `name`, initialised from a seed of its own."""
    for dtype in (None, torch.float32):  # some versions of the library initialise nothing in half precision
        made = _initialised(model, name, initialise, seed, dtype)
        unfilled = [f"{name}.{key}" for key, value in made.items() if value.sum().isnan()]
        if not unfilled:
            break
    else:
        raise RuntimeError(
            f"the library does not initialise {', '.join(unfilled)} of {type(model).__name__}."
        )
    planned = model.get_submodule(name)
    return {f"{name}.{key}": value.to(planned.get_parameter(key).dtype) for key, value in made.items()}


def _initialised(
    model: nn.Module, name: str, initialise: Initialise, seed: int, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """A module's own parameters in real memory; the module itself has those on the meta device again afterwards.

    The modules around it are asked after it, since some fill their children's parameters (a router's, say).
    What nobody fills stays not a number.
    """
    module = model.get_submodule(name)
    planned = dict(module.named_parameters(recurse=False))
    made = {key: torch.full_like(t, torch.nan, device="cpu", dtype=dtype) for key, t in planned.items()}
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    parts = name.split(".")
    module._parameters.update({key: nn.Parameter(tensor, False) for key, tensor in made.items()})
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:8], "little"))
            for depth in range(len(parts), -1, -1):
                around = ".".join(parts[:depth])
                initialise(around, model.get_submodule(around))
    finally:
        module._parameters.update(planned)
    return made


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Written beside its place and renamed, so that a file with its name is whole."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.touch()
        mode = part.stat().st_mode  # the user's; safetensors would leave it to its owner alone
        save_file(tensors, part, metadata={"format": "pt"})
        part.chmod(mode)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
