"""What a bug is: one known mistake of a port, as a switch on the built-in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from ddtree_lab.doctor.port import PortState, TransformersPort
from ddtree_lab.drafter import DFlashDrafter
from ddtree_lab.pair import Pair

RECURRENT, ATTENTION, SLIDING = "linear_attention", "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Bug:
    """A mistake that ports really make.

    Args:
        name: for `--inject` and for reports.
        stage: where it is made: `"cache"`, `"mask"`, `"verify"`, `"commit"`, `"draft"`, `"walk"`.
        symptom: what a user sees.
        cause: the mistake, in a sentence.
        fix: what to do about it.
        switch: makes the mistake on a built-in port for the length of a block.
        layer_kind: the kind of target layer it goes through, if it is one kind's affair.
        hindrance: why it cannot be made on a pair (its target has no such layer, say); empty if it can.
        references: ids of the port-bug log, see `references.py`.
    """

    name: str
    stage: str
    symptom: str
    cause: str
    fix: str
    switch: Callable[[BuggyPort], AbstractContextManager[None]]
    layer_kind: str = ""
    hindrance: Callable[[Pair], str] = lambda pair: ""
    references: tuple[str, ...] = ()


class BuggyPort(TransformersPort):
    """The built-in port with bugs switched on while its methods run, and only then.

    Args:
        memory: what bugs carry from one call to the next (an earlier tree, a run before).
    """

    def __init__(self, pair: Pair, bugs: Sequence[Bug]) -> None:
        super().__init__(pair)
        self.bugs = tuple(bugs)
        self.memory: dict[str, Any] = {}
        self._is_on = False

    @contextmanager
    def _switched_on(self) -> Iterator[None]:
        if self._is_on:  # `generate` calls the other methods: a mistake is made once
            yield
            return
        with ExitStack() as stack:
            self._is_on = True
            stack.callback(lambda: setattr(self, "_is_on", False))
            for bug in self.bugs:
                stack.enter_context(bug.switch(self))
            yield

    def prefill(self, input_ids: Any) -> PortState:
        with self._switched_on():
            return super().prefill(input_ids)

    def draft(self, state: PortState, anchor_token_id: int) -> Any:
        with self._switched_on():
            return super().draft(state, anchor_token_id)

    def verify(self, state: PortState, tree: Any) -> Any:
        with self._switched_on():
            return super().verify(state, tree)

    def commit(self, state: PortState, path: Sequence[int]) -> PortState:
        with self._switched_on():
            return super().commit(state, path)

    def generate(
        self, input_ids: Any, max_new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> list[int]:
        with self._switched_on():
            return super().generate(input_ids, max_new_tokens, temperature, seed)


def dflash(pair: Pair) -> DFlashDrafter:
    """The pair's drafter, for bugs and checks that only apply to a DFlash one."""
    assert isinstance(pair.drafter, DFlashDrafter)
    return pair.drafter


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `make(what it was)` for the length of a block."""
    is_own = name in vars(owner) or name in vars(owner).get("_modules", ())
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
