"""Several processes at one sweep: accelerate deals the prompts and gathers the rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
LONGEST_WAIT = timedelta(days=7)  # of the first to be done, for the last


class Processes:
    """The processes of one `accelerate launch` or `torchrun`; without a launcher, this one.

    Each has a copy of the model and its share of the prompts. They exchange nothing but rows, so they are joined
    on the CPU (gloo), wherever their models are.

    Args:
        are_one: the launcher's processes hold one model together (`tp_plan`), so none has prompts of its own.
    """

    def __init__(self, are_one: bool = False) -> None:
        launched = int(os.environ.get("WORLD_SIZE", 1)) > 1
        self._state = _join() if launched and not are_one else None
        self.index = int(os.environ.get("RANK", 0)) if launched else 0
        self.count: int = self._state.num_processes if self._state else 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def writes(self) -> bool:
        """Whether this process has rows of its own."""
        return self.is_first or self.count > 1

    def share(self, items: Sequence[Item]) -> list[Item]:
        """The items of this process, dealt one by one: neighbours are often of a kind, and equally long."""
        if self._state is None:
            return list(items)
        dealt = [item for first in range(self.count) for item in items[first :: self.count]]
        with self._state.split_between_processes(dealt) as mine:
            return list(mine)

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """The items of all processes; waits for the last.

        Raises:
            ConnectionError: one of the others has ended.
        """
        if self._state is None:
            return list(items)
        from accelerate.utils import gather_object

        try:
            return gather_object(list(items))
        except RuntimeError as error:
            raise ConnectionError(
                f"another of the {self.count} processes has ended; start the same sweep again and it goes on with "
                "what is missing."
            ) from error


def _join() -> Any:
    from accelerate import PartialState

    return PartialState(cpu=True, timeout=LONGEST_WAIT)


def own_device() -> str | None:
    """The accelerator of this process, by its number on this machine; None where there is none."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    number = int(os.environ.get("LOCAL_RANK", 0)) % torch.accelerator.device_count()
    return f"{device.type if device else 'cuda'}:{number}"
