"""What a trace's data may be: every entry is checked before it is used, and nothing in it is run."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

MAX_TOKEN_ID = 2**31 - 1
MAX_NODES = 2**16  # of a round
MAX_NESTING = 8  # of settings and environment
# A log-probability of -inf as JSON can say it: impossible, but not unknown, which is null.
LEAST_LOG_PROB = -9999.0
ROUNDING = 1e-3  # how far above 0 the rounding of a log-softmax may lift a log-probability
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


def entry(data: Any, name: str) -> Any:
    """An entry that must be there."""
    if not isinstance(data, dict):
        raise ValueError(f"it is {kind(data)}, not an object.")
    if name not in data:
        raise ValueError(f"{name} is missing.")
    return data[name]


def integers(data: Any, name: str, count: int | None = None, least: int = 0) -> np.ndarray:
    """A list of whole numbers from `least` to the largest token id."""
    values = _column(entry(data, name), name, count)
    if values.size and values.dtype.kind not in "iu":
        raise ValueError(f"{name} is not a list of whole numbers.")
    if values.size and (values.min() < least or values.max() > MAX_TOKEN_ID):
        bad = values.min() if values.min() < least else values.max()
        raise ValueError(f"{name} has {bad}; its numbers are from {least} to {MAX_TOKEN_ID}.")
    return values.astype(np.int64)


def integer(data: Any, name: str) -> int:
    """A whole number from 0 to the largest token id."""
    value = entry(data, name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKEN_ID:
        raise ValueError(f"{name} is {short(value)}; give a whole number from 0 to {MAX_TOKEN_ID}.")
    return value


def log_probs(data: Any, name: str, count: int) -> np.ndarray:
    """A list of log-probabilities; null where one is not known, which becomes NaN."""
    values = entry(data, name)
    if isinstance(values, list) and None in values:
        values = [np.nan if value is None else value for value in values]
    return _checked_log_probs(_column(values, name, count), name)


def _checked_log_probs(values: np.ndarray, name: str) -> np.ndarray:
    if values.size and values.dtype.kind not in "iuf":
        raise ValueError(f"{name} is not a list of numbers.")
    values = values.astype(np.float64)
    if (values > ROUNDING).any() or np.isinf(values).any():
        bad = values[(values > ROUNDING) | np.isinf(values)][0]
        raise ValueError(f"{name} has {bad}; a log-probability is finite and at most 0.")
    return values


def top_tokens(data: Any, count: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The target's best tokens at each node and their log-probabilities, two of [count, k], if they are there."""
    if data.get("target_top_ids") is None:
        return None
    columns: list[np.ndarray] = []
    for name in ("target_top_ids", "target_top_log_probs"):
        rows = entry(data, name)
        if not isinstance(rows, list) or len(rows) != count or not all(isinstance(row, list) for row in rows):
            raise ValueError(f"{name} is not a list of {count} lists.")
        if len({len(row) for row in rows}) != 1:
            raise ValueError(f"{name} has lists of different lengths.")
        flat = {name: [value for row in rows for value in row]}
        width = len(rows[0])
        values = integers(flat, name) if not columns else log_probs(flat, name, count * width)
        columns.append(values.reshape(count, width))
    if columns[0].shape != columns[1].shape:
        raise ValueError("target_top_ids and target_top_log_probs are not of one shape.")
    return columns[0], columns[1]


def texts(value: Any, name: str) -> dict[int, str]:
    """Token id → text."""
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"{name} is not an object of texts.")
    if not all(re.fullmatch(r"\d{1,10}", token, re.ASCII) for token in value):
        raise ValueError(f"{name} has a key that is no token id.")
    return {int(token): string(text) for token, text in value.items()}


def byte_texts(value: Any, name: str) -> dict[int, bytes]:
    """Token id → bytes, from hexadecimal digits."""
    found = texts(value, name)
    if not all(re.fullmatch(r"([0-9a-f]{2})+", digits, re.ASCII) for digits in found.values()):
        raise ValueError(f"{name} is not an object of hexadecimal bytes.")
    return {token: bytes.fromhex(digits) for token, digits in found.items()}


def string(value: Any, name: str = "text") -> str:
    """A text that can be written out: JSON can also hold half a surrogate pair."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {kind(value)}, not a text.")
    return _LONE_SURROGATES.sub("\ufffd", value)


def plain(value: Any, name: str, nesting: int = MAX_NESTING) -> Any:
    """JSON values of limited nesting, their texts made writable."""
    if nesting == 0:
        raise ValueError(f"{name} is nested more than {MAX_NESTING} deep.")
    if isinstance(value, dict):
        return {string(key): plain(part, name, nesting - 1) for key, part in value.items()}
    if isinstance(value, list):
        return [plain(part, name, nesting - 1) for part in value]
    return string(value) if isinstance(value, str) else value


def plain_object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {kind(value)}, not an object.")
    return plain(value, name)


def seconds(value: Any, name: str) -> dict[str, float]:
    """Stage → duration."""
    durations = plain_object(value, name)
    for stage, duration in durations.items():
        is_number = isinstance(duration, (int, float)) and not isinstance(duration, bool)
        if not is_number or not 0 <= duration < 1e9:
            raise ValueError(f"{name} of {stage} is {short(duration)}; give seconds.")
    return {stage: float(duration) for stage, duration in durations.items()}


def _column(values: Any, name: str, count: int | None) -> np.ndarray:
    if not isinstance(values, list):
        raise ValueError(f"{name} is {kind(values)}, not a list.")
    if count is not None and len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries; {count} are needed.")
    try:
        column = np.array(values)
    except (ValueError, OverflowError) as fault:  # lists of different lengths
        raise ValueError(f"{name} is not a list of numbers.") from fault
    if column.ndim != 1:
        raise ValueError(f"{name} is not a list of numbers.")
    return column


def kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def short(value: Any) -> str:
    text = kind(value) if isinstance(value, (dict, list)) else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
