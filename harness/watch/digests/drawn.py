"""Random numbers that depend on a name alone: the same ones on all ranks, in every version."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


def random_bytes(name: str, count: int) -> bytes:
    """Return bytes that depend on the name alone; a longer string starts with the shorter one."""
    # Not torch's generator: its numbers may change between versions, digests must not.
    return hashlib.shake_256(f"crossrank digest: {name}".encode()).digest(count)


def salt(dtype: torch.dtype | None, shape: Sequence[int] = ()) -> int:
    """Tell apart what has no bytes to tell apart: absent (None), empty, zeros of another shape.

    Returns:
        A signed number of 64 bits.
    """
    text = "absent" if dtype is None else f"{dtype} {tuple(shape)}"
    return int.from_bytes(random_bytes(text, 8), "little", signed=True)
