"""Would a pair fit, how would it be split, and which quantization makes it fit: told without weights.

Weights are placed by accelerate's own planner, as `device_map="auto"` does, into what the rest leaves free:
the caches at a given context, the drafter beside the target's embedding, and the widest stage of a round.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import CustomDtype, convert_file_size_to_int, get_balanced_memory
from transformers import PreTrainedModel

from ddtree_lab.loading import NGRAM
from ddtree_lab.records import Record
from ddtree_lab.stages.embedding import resolve_embeddings
from ddtree_lab.stages.forward import decoder_layers
from ddtree_lab.weightless.footprint import (
    QUANTIZATIONS,
    RoundNeeds,
    parameter_bytes,
    quantized_weights,
    round_needs,
)
from ddtree_lab.weightless.inspection import torch_dtype
from ddtree_lab.weightless.models import (
    build_weightless,
    build_weightless_drafter,
    read_blueprint,
    read_drafter_config,
)

if TYPE_CHECKING:
    from rich.console import Group

    from ddtree_lab.drafter import DFlashDrafter

RESERVE = "0.5GiB"
MAX_ATTEMPTS = 8
PLANNED_AS = {"8bit": torch.int8, "4bit": CustomDtype.INT4}
Device = int | str


@dataclass(frozen=True)
class DevicePlan:
    """What is put on one device, in bytes.

    Args:
        layers: decoder layers that live there.
        working: for the widest stage of a round; the same on every device, since stages run layer by layer.
        reserve: for the driver, the kernels and the allocator.
    """

    device: int
    memory: int
    layers: tuple[int, ...]
    weights: int
    caches: int
    drafter: int
    working: int
    reserve: int

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.drafter + self.working + self.reserve

    @property
    def free(self) -> int:
        return self.memory - self.total


@dataclass(frozen=True)
class Placement:
    """One quantization, placed.

    Args:
        quantization: `None`, `"8bit"` or `"4bit"`, as `load_pair` takes it.
        strategy: `"auto"` (balanced), `"sequential"` (each device filled before the next), or `"one"` device.
        weights: bytes of the target's weights.
        converted: share of the parameters that are quantised; experts that are kept as one tensor are not.
        needed: bytes of everything, on all devices together.
        device_map: module → device, from accelerate; a module that does not fit is on `"disk"`.
        max_memory: what to give to `from_pretrained` for the same split.
    """

    quantization: str | None
    strategy: str
    fits: bool
    weights: int
    converted: float
    needed: int
    devices: tuple[DevicePlan, ...]
    device_map: dict[str, Device]
    max_memory: dict[int, int]

    @property
    def name(self) -> str:
        return self.quantization or "none"


@dataclass(frozen=True)
class MemoryPlan(Record):
    """Every quantization, from none on, and what a round needs.

    Args:
        target, drafter: as `load_pair` takes them.
        needs: of the stages of a round, at `context` tokens and `tree_budget` drafted nodes.
    """

    name: str
    target: str
    drafter: str | None
    dtype: str
    context: int
    tree_budget: int
    memory: tuple[int, ...]
    placements: tuple[Placement, ...]
    needs: RoundNeeds

    @property
    def best(self) -> Placement | None:
        """The least quantization that fits; `None` if nothing does."""
        return next((placement for placement in self.placements if placement.fits), None)

    @property
    def fits(self) -> bool:
        return self.best is not None

    def to_dict(self) -> dict[str, Any]:
        verify = self.needs.verify
        return {
            **{
                key: getattr(self, key)
                for key in ("name", "target", "drafter", "dtype", "context", "tree_budget")
            },
            "memory": list(self.memory),
            "fits": self.fits,
            "quantization": self.best.name if self.best else None,
            "placements": [
                {**asdict(p), "devices": [{**asdict(d), "total": d.total, "free": d.free} for d in p.devices]}
                for p in self.placements
            ],
            "needs": {
                "prefill": self.needs.prefill,
                "verify": {**asdict(verify), "total": verify.total},
                "draft": self.needs.draft,
                "drafter_context": self.needs.drafter_context,
            },
        }

    def __repr__(self) -> str:
        fits = f"fits with quantization {self.best.name}" if self.best else "does not fit"
        return f"MemoryPlan({self.name} on {len(self.memory)} devices: {fits})"

    def __rich__(self) -> Group:
        from ddtree_lab.view.memory import draw_plan

        return draw_plan(self)


def plan_memory(
    target: str,
    memory: Sequence[str | int],
    drafter: str | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    tree_budget: int = 64,
    context: int = 4096,
    reserve: str | int = RESERVE,
    local_files_only: bool | None = None,
) -> MemoryPlan:
    """Plan a pair on devices of given sizes; nothing is downloaded but configs of hub ids.

    Args:
        target: a bundled preset, a folder or a hub id.
        memory: of each device, `"48GB"` or bytes; GB is read as cards are labelled, 1024³ bytes.
        drafter: the same kinds of names, or `"ngram"`, which takes no memory; a preset brings its own.
        dtype: of the target's unquantised weights; the checkpoint's own if not given.
        tree_budget: drafted nodes of a round.
        context: tokens of the prompt and the text so far.
        reserve: of each device, for what is no tensor of ours.

    Raises:
        ValueError: no such model, a size that is none, or a model that cannot be run without weights.
    """
    sizes = tuple(parse_size(size) for size in memory)
    if not sizes:
        raise ValueError("memory is empty; give the size of at least one device, e.g. '48GB'.")
    if tree_budget < 1 or context < 1:
        raise ValueError(f"tree_budget is {tree_budget} and context {context}; both are 1 or more.")
    blueprint = read_blueprint(target, local_files_only=local_files_only)
    dtype = torch_dtype(dtype) or blueprint.dtype
    model = build_weightless(blueprint.config, dtype)
    preset = blueprint.preset
    drafter = drafter or (preset.drafter_id if preset else None)
    draft_model = None
    if drafter not in (None, NGRAM):
        draft_model = build_weightless_drafter(
            read_drafter_config(drafter, local_files_only=local_files_only)
        )
    needs = round_needs(model, draft_model, tree_budget=tree_budget, context=context)
    site = _Site(model, draft_model, needs, context, sizes, parse_size(reserve))
    return MemoryPlan(
        name=blueprint.name,
        target=preset.target_id if preset else blueprint.name,
        drafter=drafter,
        dtype=str(dtype).removeprefix("torch."),
        context=context,
        tree_budget=tree_budget,
        memory=sizes,
        placements=tuple(site.place(quantization) for quantization in QUANTIZATIONS),
        needs=needs,
    )


def parse_size(size: str | int) -> int:
    """Bytes of `"48GB"`, `"512MB"`, … in binary units, as cards are labelled.

    >>> parse_size("24GB") == parse_size("24GiB") == 24 * 1024**3
    True

    Raises:
        ValueError: it is no size.
    """
    text = str(size).strip().upper()
    if text.isdigit():
        return int(text)
    try:
        return int(convert_file_size_to_int(text if text.endswith("IB") else f"{text.removesuffix('B')}IB"))
    except ValueError:
        raise ValueError(f"{size!r} is no size of memory; give e.g. '48GB', '512MB' or bytes.") from None


@dataclass(frozen=True)
class _Site:
    """Everything that is the same for every quantization."""

    target: PreTrainedModel
    drafter: DFlashDrafter | None
    needs: RoundNeeds
    context: int
    memory: tuple[int, ...]
    reserve: int

    def place(self, quantization: str | None) -> Placement:
        """Balanced where that fits; devices of unequal size may have to be filled one after the other."""
        balanced = self._place(quantization, "auto")
        return balanced if balanced.fits or len(self.memory) == 1 else self._place(quantization, "sequential")

    def _place(self, quantization: str | None, strategy: str) -> Placement:
        """Ask the planner with what the rest leaves free, until the whole fits or the planner gives up."""
        sizes = parameter_bytes(self.target, quantization)
        weights = round(sum(sizes.values()))
        shared = self.reserve + self._working(quantization)
        caches = sum(layer.bytes_at(self.context) for layer in self.needs.cache_layers)
        budget = {i: max(0, size - shared) for i, size in enumerate(self.memory)}
        budget[0] = max(0, budget[0] - self._drafter_bytes())  # the planner begins with the embedding, there
        for _ in range(MAX_ATTEMPTS):
            device_map = self._device_map(budget, quantization, strategy)
            devices = self._devices(device_map, sizes, quantization)
            is_placed = set(device_map.values()) <= set(budget)
            if not is_placed or all(device.free >= 0 for device in devices):
                break
            budget = {d.device: max(0, budget[d.device] + min(0, d.free)) for d in devices}
        return Placement(
            quantization=quantization,
            strategy=strategy if len(self.memory) > 1 else "one",
            fits=is_placed and all(device.free >= 0 for device in devices),
            weights=weights,
            converted=self._share_converted() if quantization else 0.0,
            needed=weights + caches + self._drafter_bytes() + shared * len(self.memory),
            devices=devices,
            device_map=device_map,
            max_memory=budget,
        )

    def _device_map(
        self, budget: Mapping[int, int], quantization: str | None, strategy: str
    ) -> dict[str, Device]:
        if len(budget) == 1:
            return {"": 0}  # nothing to split; the planner would keep a layer's room for offloading
        smaller = quantized_weights(self.target) if quantization else ()
        special = {name: PLANNED_AS[str(quantization)] for name in smaller}
        kept_whole = list(self.target._no_split_modules or ())
        options = dict(no_split_module_classes=kept_whole, special_dtypes=special)
        with _devices_elsewhere():
            share = dict(budget)
            if strategy == "auto":
                share = get_balanced_memory(self.target, max_memory=share, **options)
            return dict(infer_auto_device_map(self.target, max_memory=share, **options))

    def _devices(
        self, device_map: Mapping[str, Device], sizes: Mapping[str, float], quantization: str | None
    ) -> tuple[DevicePlan, ...]:
        homes = [device_of(name, device_map) for name in self._layer_names()]
        embedding = device_of(f"{resolve_embeddings(self.target).input_path}.weight", device_map)
        return tuple(
            DevicePlan(
                device=i,
                memory=memory,
                layers=tuple(index for index, home in enumerate(homes) if home == i),
                weights=round(sum(size for n, size in sizes.items() if device_of(n, device_map) == i)),
                caches=sum(
                    layer.bytes_at(self.context)
                    for layer in self.needs.cache_layers
                    if homes[layer.layer_idx] == i
                ),
                drafter=self._drafter_bytes() if embedding == i else 0,
                working=self._working(quantization),
                reserve=self.reserve,
            )
            for i, memory in enumerate(self.memory)
        )

    def _layer_names(self) -> list[str]:
        """Of each decoder layer its first parameter: a layer that was split has its caches with it."""
        names = {parameter: name for name, parameter in self.target.named_parameters()}
        return [names[next(layer.parameters())] for layer in decoder_layers(self.target)]

    def _share_converted(self) -> float:
        sizes = {name: parameter.numel() for name, parameter in self.target.named_parameters()}
        return sum(sizes[name] for name in quantized_weights(self.target)) / sum(sizes.values())

    def _drafter_bytes(self) -> int:
        if self.drafter is None:
            return 0
        return sum(p.nbytes for p in self.drafter.parameters()) + self.needs.drafter_context

    def _working(self, quantization: str | None) -> int:
        """The widest stage, and in 4 bit the one weight that is being multiplied, dequantised."""
        if quantization != "4bit":
            return self.needs.working
        weights = dict(self.target.named_parameters())
        largest = max((weights[name].nbytes for name in quantized_weights(self.target)), default=0)
        return self.needs.working + largest


def device_of(name: str, device_map: Mapping[str, Device]) -> Device:
    """The device of a parameter: that of its longest prefix in the map.

    >>> device_of("model.layers.1.mlp.weight", {"model.layers.1": 1, "model": 0})
    1
    """
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), -1, -1))
    return next(device_map[prefix] for prefix in prefixes if prefix in device_map)


@contextmanager
def _devices_elsewhere() -> Iterator[None]:
    """The planner warns of devices that this machine has not; they are not meant to be here."""
    logger = logging.getLogger("accelerate.utils.modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
