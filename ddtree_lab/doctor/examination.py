"""One port under examination: what it is tried on, what is known about it so far."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ddtree_lab.compat import text_config
from ddtree_lab.doctor.bugs import BUGS, Bug, BuggyPort
from ddtree_lab.doctor.guarded import SECONDS_PER_CALL, Guarded, PortError
from ddtree_lab.doctor.material import Material
from ddtree_lab.doctor.port import TransformersPort

if TYPE_CHECKING:
    from ddtree_lab.doctor.acceptance import Acceptance
    from ddtree_lab.doctor.hypotheses import Outcome


class Examination:
    """One port of one pair under examination.

    Args:
        material: the pair, its prompt, and the truth about them.
        port: None for the built-in one.

    Attributes:
        known: bugs that explain what was found so far; later checks start from them.
        unexplained: what probes gave that no bug explains; behind it the search is shorter.
        intrinsic, achieved: set by the check `acceptance`.
        tokens_a_pass: what the port's own loop writes in a pass that drafts nothing; set by `executed_paths`.
    """

    def __init__(
        self, material: Material, port: Any = None, seconds_per_call: float = SECONDS_PER_CALL
    ) -> None:
        self.material = material
        self.pair = material.pair
        inner = TransformersPort(self.pair) if port is None else port
        self.port = Guarded(inner, material.vocab_size, seconds_per_call)
        self.known: list[Bug] = []
        self.unexplained: list[Outcome] = []
        self.intrinsic: Acceptance | None = None
        self.achieved: Acceptance | None = None
        self.tokens_a_pass: float | None = None
        self.is_builtin = isinstance(inner, TransformersPort)

    @property
    def target(self) -> Any:
        return self.pair.target

    @property
    def config(self) -> Any:
        return text_config(self.target)

    @property
    def kinds(self) -> list[str]:
        return self.material.kinds

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.kinds) if "linear" in kind)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(
            i for i, kind in enumerate(self.kinds) if kind in ("full_attention", "sliding_attention")
        )

    def layers_of(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, found in enumerate(self.kinds) if found == kind)

    @property
    def has_keyed_noise(self) -> bool:
        """Whether the port keys its noise by (seed, position) as this package does; it may say so itself."""
        return bool(getattr(self.port.inner, "keyed_noise", self.is_builtin))

    def prefilled(self, port: Any, offset: int = 0) -> Any:
        """A port's state after the text before token `offset`."""
        return port.prefill(torch.tensor([self.material.before(offset)]))

    def hypothesis(self, bugs: Sequence[Bug]) -> Guarded:
        """The built-in port with these bugs, new for every use and with a run behind it: bugs carry memory."""
        port = Guarded(BuggyPort(self.pair, bugs), self.material.vocab_size)
        with suppress(PortError):
            self.prefilled(port)
        return port

    def candidates(self, stages: Sequence[str]) -> list[Bug]:
        """Bugs of these stages that can be made on this pair, in the order of the stages."""
        able = [bug for bug in BUGS.values() if bug.stage in stages and not bug.hindrance(self.pair)]
        return sorted(able, key=lambda bug: stages.index(bug.stage))
