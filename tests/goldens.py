"""Files that hold what was looked at and found good. `GOLDEN=write pytest …` writes them anew; look again then."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, found: str) -> None:
    """Compare with the file of that name, line by line."""
    path = FOLDER / name
    found = found.rstrip("\n") + "\n"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert found.splitlines() == path.read_text(encoding="utf-8").splitlines(), f"{name} has changed"
