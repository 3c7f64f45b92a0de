"""How much is looked at after which update: the same on all ranks, from its number alone."""

from __future__ import annotations


def is_sparse(update: int) -> bool:
    """Say whether this is one of the updates at which a look may cost something."""
    return update < 8 or update & (update - 1) == 0


def part_at(update: int) -> int | None:
    """Return whose turn it is of the parts of large parameters; None for all of them."""
    return None if is_sparse(update) else update


def earliest(update: int, parts: int) -> int:
    """Return the first update that can have made what is first seen after `update`.

    Args:
        update: its number.
        parts: in how many parts it is read in turn; 0 = whole, every time.
    """
    if not parts:
        return update
    window = range(update - 1, update - parts, -1)
    last_full = next((one for one in window if is_sparse(one)), -1)
    return max(0, last_full + 1, update - parts + 1)
