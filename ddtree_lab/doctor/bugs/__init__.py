"""Known mistakes of ports, each a switch on the built-in port: for teaching, and as hypotheses."""

from __future__ import annotations

from ddtree_lab.doctor.bugs import committing, drafting, looping, masking, verifying
from ddtree_lab.doctor.bugs.base import Bug, BuggyPort

__all__ = ["BUGS", "Bug", "BuggyPort", "find_bug"]

BUGS: dict[str, Bug] = {
    bug.name: bug for room in (masking, verifying, committing, drafting, looping) for bug in room.BUGS
}


def find_bug(name: str) -> Bug:
    """A bug by its name.

    Raises:
        ValueError: no such bug; the message lists those with a similar name.
    """
    if name not in BUGS:
        from difflib import get_close_matches

        close = get_close_matches(name, BUGS, n=3) or sorted(BUGS)[:3]
        raise ValueError(f"{name!r} is no known bug; did you mean {', '.join(close)}? --list-bugs shows all.")
    return BUGS[name]
