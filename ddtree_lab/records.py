"""How a stage's record prints itself: one `__rich__`, lowered to terminal text and to HTML."""

from __future__ import annotations

import codecs
import html
import io
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

TEXT_WIDTH = 100
# What a mark becomes where only ASCII is allowed; always one column, so that tables stay in line. Anything else, such
# as a letter of a token's text, becomes its escape.
PLAIN = dict(zip("●○◆◌·×→–…✓✗★␣↵⇥␍‹›∅’“”█▒░−", '@o@o.x>-~+-*_$><<>0\'""#=:-', strict=True))


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(plain_mark, error.object[error.start : error.end])), error.end


def plain_mark(mark: str) -> str:
    r"""A character in ASCII.

    >>> plain_mark("✓"), plain_mark("é")
    ('+', '\\xe9')
    """
    return PLAIN.get(mark) or mark.encode("ascii", "backslashreplace").decode()


PLAIN_ERRORS = "ddtree_lab.plain"  # what to do with a character that an encoding does not have
codecs.register_error(PLAIN_ERRORS, _plain)


class Record:
    """Base of everything a stage returns.

    A subclass describes itself once, in `__rich__`. `print(record)` and a terminal show that as
    text, a notebook as preformatted HTML with the same text; `repr(record)` stays one line.
    """

    def __rich__(self) -> RenderableType:
        return repr(self)

    def to_text(self, *, width: int = TEXT_WIDTH, ascii: bool = False) -> str:  # noqa: A002
        """The record as plain text.

        Args:
            width: columns of the page.
            ascii: draw boxes and guides with ASCII characters only.
        """
        from rich.console import Console

        # An explicit encoding makes rich choose ASCII guides; width and colour do not depend on
        # the terminal the caller happens to have.
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii else "utf-8", errors=PLAIN_ERRORS)
        console = Console(
            file=stream, width=width, color_system=None, force_jupyter=False, legacy_windows=False
        )
        console.print(self)
        stream.seek(0)
        return stream.read().rstrip("\n")

    def __str__(self) -> str:
        return self.to_text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        text = self.to_text()
        style = "line-height:1.2;font-family:monospace;white-space:pre;overflow-x:auto"
        return {"text/plain": text, "text/html": f'<pre style="{style}">{html.escape(text)}</pre>'}


def format_bytes(num_bytes: float | int) -> str:
    """Binary units with three significant digits: `format_bytes(150994944)` → `'144 MiB'`.

    >>> format_bytes(150994944)
    '144 MiB'
    >>> format_bytes(12)
    '12 B'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def ranges(indices: Sequence[int], most: int | None = None) -> str:
    """Ascending indices as runs; with `most`, the middle left out where there are more runs than that.

    >>> ranges([0, 1, 2, 4, 5, 6, 8])
    '0–2, 4–6, 8'
    >>> ranges([3, 7, 11, 15, 19], most=3)
    '3, … 19'
    """
    grouped = groupby(enumerate(indices), key=lambda item: item[1] - item[0])
    runs = [[index for _, index in run] for _, run in grouped]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return ", ".join(words) if most is None or len(words) <= most else f"{words[0]}, … {words[-1]}"
