"""Rows of results: lines of JSON that survive whatever ends the process."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Key = tuple[Any, ...]


def method_label(method: str, tree_budget: int | str | None) -> str:
    """How results name a way to decode."""
    return method if tree_budget is None else f"{method} {tree_budget}"


KEY_OF_MICRO = ("bench", "subject", "case", "part", "nodes", "budget", "value")


@lru_cache(maxsize=1)
def machine() -> dict[str, Any]:
    """What a time depends on besides the code: the processor, its cores, the memory."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "system": platform.system(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Versions, threads and the machine, as they stand beside every result."""
    import torch

    return _environment(torch.get_num_threads())


@lru_cache(maxsize=8)
def _environment(num_threads: int) -> dict[str, Any]:
    """Versions do not change while a process runs; the number of threads may."""
    from ddtree_lab.environment import environment_summary

    return {**environment_summary(), **machine(), "num_threads": num_threads}


class RowFile:
    """A file of rows that is only ever appended to, each line in one write.

    A process that is killed leaves whole lines and at most one broken one at the end, which is cut off
    when the file is opened for writing again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __iter__(self) -> Iterator[Row]:
        yield from read_rows(self.path)

    def append(self, row: Row) -> None:
        """Add a row; when this returns it is on the disk.

        Raises:
            OSError: naming the file, which is as it was before.
        """
        line = json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            end = _end_of_whole_lines(handle)
            os.lseek(handle, end, os.SEEK_SET)
            try:
                _write_all(handle, line.encode())
                os.fsync(handle)
            except BaseException as error:  # a full disk, Ctrl-C: half a line is no row
                os.ftruncate(handle, end)
                if isinstance(error, OSError):
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
                raise
            os.ftruncate(handle, end + len(line.encode()))
        finally:
            os.close(handle)


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _end_of_whole_lines(handle: int) -> int:
    """The place after the last line break: what follows was cut off by the end of a process."""
    end = os.lseek(handle, 0, os.SEEK_END)
    while end:
        begin = max(0, end - 4096)
        os.lseek(handle, begin, os.SEEK_SET)
        found = os.read(handle, end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def read_rows(*paths: str | Path) -> list[Row]:
    """The rows of files, in order; a broken last line is left out.

    Raises:
        ValueError: a line in the middle that is no JSON object.
    """
    rows: list[Row] = []
    for path in map(Path, paths):
        if not path.exists():
            continue
        *lines, _broken = path.read_bytes().split(b"\n")  # the last is empty unless its line was cut off
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is no row of results; is it another file?")
            rows.append(row)
    return rows


def keyed(rows: Iterable[Row], names: tuple[str, ...]) -> dict[Key, Row]:
    """Rows by the values that name them; of two with one name the first counts."""
    found: dict[Key, Row] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in names), row)
    return found
