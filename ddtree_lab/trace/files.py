"""Files that hold traces: read with limits, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

# A parsed file takes about ten times its size; 1,000 rounds of 256 nodes are about 26 MB.
MAX_FILE_BYTES = 2**28


def read_json(path: str | Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: no JSON, too deep, or with NaN or Infinity in it.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is no trace: its JSON is nested too deeply.") from None
    except UnicodeDecodeError as fault:
        raise ValueError(f"it is not JSON: {fault.reason} at byte {fault.start}.") from fault
    except json.JSONDecodeError as fault:
        raise ValueError(f"it is not JSON: {fault}.") from fault


def check_size(path: str | Path) -> None:
    """Refuse a file that would fill the memory.

    Raises:
        ValueError: it is larger than `MAX_FILE_BYTES`.
    """
    size = Path(path).stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(
            f"the file has {size / 2**20:.0f} MiB; traces of more than {MAX_FILE_BYTES // 2**20} MiB are not read. "
            "Record fewer rounds or a smaller tree_budget."
        )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is no number of JSON.")


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file beside its place, then rename it into place."""
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        mode = path.stat().st_mode if path.exists() else 0o666 & ~_umask()
        temporary.chmod(mode & 0o777)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
