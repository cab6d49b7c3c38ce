"""How predictable a text is without a drafter: stands beside acceptance, because loops flatter it."""

from collections.abc import Sequence

LONGEST_SUFFIX = 3


def distinct_4(token_ids: Sequence[int]) -> float:
    """Share of different 4-grams among all 4-grams (1.0: nothing repeats)."""
    grams = [tuple(token_ids[i : i + 4]) for i in range(len(token_ids) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def lookup_rounds(prompt_ids: Sequence[int], new_ids: Sequence[int], num_drafted: int = 7) -> int:
    """Rounds an n-gram look-up chain needs for `new_ids`; the first token comes from prefill.

    It drafts what followed the latest earlier occurrence of the longest suffix (3, 2 or 1 tokens).
    """
    text = [*prompt_ids, *new_ids]
    position, rounds = len(prompt_ids) + 1, 0
    while position < len(text):
        drafted = lookup_draft(text[:position], num_drafted)
        kept = 0
        while kept < len(drafted) and position + kept < len(text) and drafted[kept] == text[position + kept]:
            kept += 1
        position += kept + 1
        rounds += 1
    return rounds


def lookup_draft(text: Sequence[int], num_drafted: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest known suffix of `text`."""
    for size in range(LONGEST_SUFFIX, 0, -1):
        suffix = list(text[-size:])
        for start in range(len(text) - size - 1, -1, -1):
            if list(text[start : start + size]) == suffix:
                return list(text[start + size : start + size + num_drafted])
    return []
