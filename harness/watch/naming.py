"""How ranks are named in sentences."""

from __future__ import annotations

from collections.abc import Sequence


def ranks(members: Sequence[int]) -> str:
    """Name ranks: `rank 1`, `ranks 0 and 2`."""
    if len(members) == 1:
        return f"rank {members[0]}"
    return f"ranks {', '.join(map(str, members[:-1]))} and {members[-1]}"
