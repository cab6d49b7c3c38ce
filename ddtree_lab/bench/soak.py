"""A soak: rounds upon rounds over mixed prompts, budgets and temperatures, every token checked, memory watched."""

from __future__ import annotations

import gc
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ddtree_lab.decode import AUTOREGRESSIVE, generate
from ddtree_lab.pair import Pair, Prompt
from ddtree_lab.records import Record, format_bytes

TREE_BUDGETS: tuple[int | str, ...] = (0, 1, 7, 16, 33, 64, "auto")
TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True)
class SoakReport(Record):
    """What a soak found.

    Args:
        num_wrong: decodes whose tokens were not plain decoding's.
        tensor_bytes: of all tensors alive, after the first tenth and at the end.
        resident_bytes: of the process, at the same times.
        slowdown: mean seconds a round in the last tenth, over those in the second.
    """

    num_rounds: int
    num_decodes: int
    num_wrong: int
    tensor_bytes: tuple[int, int]
    resident_bytes: tuple[int, int]
    slowdown: float

    @property
    def ok(self) -> bool:
        return self.num_wrong == 0 and self.tensor_bytes[1] <= self.tensor_bytes[0] * 1.01

    def __rich__(self) -> str:
        tensors, resident = (
            f"{format_bytes(before)} → {format_bytes(after)}"
            for before, after in (self.tensor_bytes, self.resident_bytes)
        )
        return (
            f"{self.num_rounds} rounds in {self.num_decodes} decodes: {self.num_wrong} not lossless; "
            f"tensors {tensors}, process {resident}, a round takes {self.slowdown:.2f} of what it took"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def soak(pair: Pair, prompts: Sequence[Prompt], num_rounds: int, max_new_tokens: int = 40) -> SoakReport:
    """Decode until so many rounds are done."""
    done = wrong = decodes = 0
    level = (0, 0)
    times: list[tuple[int, float]] = []  # rounds done when it was measured, seconds a round
    while done < num_rounds:
        prompt = prompts[decodes % len(prompts)]
        temperature = TEMPERATURES[decodes % len(TEMPERATURES)]
        settings: dict[str, Any] = dict(temperature=temperature, seed=decodes, max_new_tokens=max_new_tokens)
        plain = generate(pair, prompt, AUTOREGRESSIVE, **settings)
        method = "dflash" if decodes % 5 == 4 else "ddtree"
        budget = TREE_BUDGETS[decodes % len(TREE_BUDGETS)]
        made = generate(pair, prompt, method, budget, **settings)
        wrong += made.token_ids != plain.token_ids
        done, decodes = done + made.num_rounds, decodes + 1
        times.append((done, made.seconds / max(1, made.num_rounds)))
        if level == (0, 0) and done >= num_rounds / 10:
            level = (_tensor_bytes(), _resident_bytes())
    end = (_tensor_bytes(), _resident_bytes())
    second = [s for at, s in times if 0.1 * done < at <= 0.2 * done] or [times[0][1]]
    last = [s for at, s in times if at > 0.9 * done]
    slowdown = (sum(last) / len(last)) / (sum(second) / len(second))
    return SoakReport(done, decodes, int(wrong), (level[0], end[0]), (level[1], end[1]), slowdown)


def _tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
