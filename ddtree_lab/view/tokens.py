"""Token texts as something to look at: spaces and controls visible, characters split over tokens put together."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache

TextOf = Callable[[int], str]
BytesOf = Callable[[int], bytes | None]

EMPTY, SPACE = "∅", "␣"
MARKS = {" ": SPACE, "\n": "↵", "\t": "⇥", "\r": "␍"}
CONTROL_PICTURES = 0x2400  # U+2400 … U+241F show U+0000 … U+001F


@lru_cache(maxsize=2**16)
def visible_text(text: str) -> str:
    r"""A token's text with nothing in it that cannot be seen.

    What steers a display (controls, direction overrides, lone surrogates) becomes a picture or a code point.

    >>> visible_text(" a\n")
    '␣a↵'
    >>> visible_text("\x07\u202e")
    '␇‹U+202E›'
    """
    if text.isascii() and text.isprintable() and " " not in text:
        return text or EMPTY
    shown = "".join(map(_visible, text))
    # An accent of its own would be drawn over whatever stands before it.
    return f"◌{shown}" if unicodedata.category(text[0]).startswith("M") else shown


def _visible(character: str) -> str:
    if character in MARKS:
        return MARKS[character]
    code = ord(character)
    if code < 0x20:
        return chr(CONTROL_PICTURES + code)
    return character if character.isprintable() else f"‹U+{code:04X}›"


def path_texts(
    token_ids: Sequence[int], parents: Sequence[int], text_of: TextOf, bytes_of: BytesOf = lambda token: None
) -> list[str]:
    r"""The visible text of each node of a tree; a character split over a path stands at its last token.

    Args:
        parents: index of each node's parent, smaller than its own; -1 for none.
        bytes_of: token id → its UTF-8 bytes, where they are not whole characters; else None.

    >>> pieces = {1: b"\xe2\x9c", 2: b"\x93"}
    >>> path_texts([1, 2, 3], [-1, 0, 0], {3: " a"}.get, pieces.get)
    ['‹e2 9c›', '✓', '␣a']
    """
    texts: list[str] = []
    unfinished: list[bytes] = []  # at each node: the beginning of a character that a child may end
    for token, parent in zip(token_ids, parents, strict=True):
        piece = bytes_of(token)
        if piece is None:
            texts.append(visible_text(text_of(token)))
            unfinished.append(b"")
            continue
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode((unfinished[parent] if parent >= 0 else b"") + piece)
        unfinished.append(decoder.getstate()[0])
        texts.append(visible_text(text) if text else f"‹{piece.hex(' ')}›")
    return texts


def line_texts(
    token_ids: Sequence[int], text_of: TextOf, bytes_of: BytesOf = lambda token: None
) -> list[str]:
    """The visible text of each token of a line of them."""
    return path_texts(token_ids, range(-1, len(token_ids) - 1), text_of, bytes_of)
