"""How much is looked at after which update: the same on all ranks, from its number alone."""

from __future__ import annotations

PARTS = 4
"""Parts of a large parameter, of which one is read after an update."""


def is_sparse(update: int) -> bool:
    """Say whether this is one of the updates at which a look may cost something."""
    return update < 8 or update & (update - 1) == 0


def part_at(update: int) -> int | None:
    """Return which part of large parameters is read after an update; None for all of them."""
    return None if is_sparse(update) else update % PARTS


def earliest(update: int) -> int:
    """Return the first update that can have made what is first seen after `update`, in any part."""
    window = range(update - 1, update - PARTS, -1)
    last_full = next((one for one in window if is_sparse(one)), -1)
    return max(0, last_full + 1, update - PARTS + 1)
