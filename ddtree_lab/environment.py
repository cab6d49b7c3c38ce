"""Versions, kernels and devices, and what each implies for a run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddtree_lab.records import Record, format_bytes

if TYPE_CHECKING:
    from rich.table import Table

PACKAGES = ("ddtree-lab", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "numpy")
# Import name → what it changes when it is there, and when it is not.
KERNELS = {
    "fla": (
        "fused gated-delta kernels in plain forwards",
        "plain forwards of Gated DeltaNet use the reference code",
    ),
    "causal_conv1d": ("fused causal convolution in plain forwards", "the convolution runs as torch.conv1d"),
    "flash_attn": ("flash-attention can be asked for", "attention runs as sdpa, which takes the tree mask"),
    "bitsandbytes": ("quantization='4bit' and '8bit' work", "targets load unquantised only"),
}


@dataclass(frozen=True)
class EnvironmentItem:
    name: str
    value: str
    implies: str = ""


@dataclass(frozen=True)
class Environment(Record):
    """What a run depends on besides the pair."""

    items: tuple[EnvironmentItem, ...]

    def __repr__(self) -> str:
        return "Environment(" + ", ".join(f"{item.name} {item.value}" for item in self.items[:4]) + ")"

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title="environment", title_justify="left")
        for column in ("what", "found", "implies"):
            table.add_column(column)
        for item in self.items:
            table.add_row(item.name, item.value, item.implies)
        return table

    def to_dict(self) -> dict[str, Any]:
        return {item.name: {"value": item.value, "implies": item.implies} for item in self.items}


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def environment_summary() -> dict[str, Any]:
    """The part that belongs beside a result: versions, device, threads."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        **{package: version_of(package) for package in PACKAGES},
        "devices": gpus or ["cpu"],
        "num_threads": torch.get_num_threads(),
    }


def describe_environment() -> Environment:
    """Everything `ddtree-lab env` shows."""
    import torch

    items = [EnvironmentItem("python", platform.python_version(), "needs 3.11 or newer")]
    items += [EnvironmentItem(package, version_of(package), _package_note(package)) for package in PACKAGES]
    for module, (there, absent) in KERNELS.items():
        found = importlib.util.find_spec(module) is not None
        items.append(
            EnvironmentItem(module, version_of(module) if found else "absent", there if found else absent)
        )
    count = torch.cuda.device_count()
    for i in range(count):
        free, total = torch.cuda.mem_get_info(i)
        name = torch.cuda.get_device_name(i)
        items.append(
            EnvironmentItem(f"cuda:{i}", name, f"{format_bytes(free)} of {format_bytes(total)} free")
        )
    if not count:
        items.append(
            EnvironmentItem("device", "cpu", "no CUDA device: extra tree nodes cost time, not only memory")
        )
    threads = torch.get_num_threads()
    items.append(
        EnvironmentItem("threads", str(threads), f"of {os.cpu_count()} cores; OMP_NUM_THREADS changes it")
    )
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    items.append(
        EnvironmentItem(
            "hub", "offline" if offline else "reachable if asked", "used only when a hub id is given"
        )
    )
    return Environment(tuple(items))


def _package_note(package: str) -> str:
    if package != "transformers":
        return ""
    from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

    if not hasattr(LinearAttentionLayer, "is_croppable"):
        return "its caches do not say whether they can be cropped; recurrent layers cannot"
    return (
        "hybrid caches are not croppable; the library's own assisted decoding refuses them"
        if hasattr(DynamicLayer, "is_croppable")
        else ""
    )
