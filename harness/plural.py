"""Numbers with what they count."""

from __future__ import annotations


def number_of(count: int, one: str) -> str:
    """Return a number and its noun, "1 rank" or "2 ranks"; the plural only gains an s.

    Args:
        count: how many.
        one: the noun in the singular.
    """
    return f"{count} {one}{'' if count == 1 else 's'}"
