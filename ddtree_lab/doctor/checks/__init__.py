"""The checks, in the order in which they run: static, drafter-free, with drafter, the whole loop, measurements."""

from __future__ import annotations

from ddtree_lab.doctor.checks import (
    committing,
    drafting,
    library,
    looping,
    measuring,
    observing,
    states,
    static,
    verifying,
)
from ddtree_lab.doctor.checks.base import REGISTER, Check

__all__ = ["CHECKS", "Check"]

ROOMS = (static, library, observing, verifying, states, committing, drafting, looping, measuring)
CHECKS: dict[str, Check] = {
    name: check for room in ROOMS for name, check in REGISTER.items() if check.run.__module__ == room.__name__
}
