"""A few numbers for a tensor from which the distance between two tensors can be told.

Digests say whether tensors are equal; here it has to be known how far they are apart. Random
signs do that: the squared difference of two projections is on average the squared distance. A
projection is linear, so those of the parts of a sharded tensor add up to that of the whole.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

PROJECTIONS = 16
"""Random signs: the distance is known to about 1 in sqrt(8), at half or twice hardly ever."""
_BLOCK = 4096


@lru_cache(maxsize=64)
def _signs(name: str, count: int) -> torch.Tensor:
    """Return `count` x PROJECTIONS signs that depend on nothing but the name."""
    bits = torch.frombuffer(
        bytearray(
            hashlib.shake_256(f"crossrank: {name}".encode()).digest(count * PROJECTIONS // 8)
        ),
        dtype=torch.uint8,
    )
    spread = bits.unsqueeze(1).bitwise_right_shift(torch.arange(8, dtype=torch.uint8)) & 1
    return spread.view(count, PROJECTIONS).to(torch.float64) * 2 - 1


def project(tensor: torch.Tensor, first: int = 0) -> tuple[float, list[float]]:
    """Return the sum of squares and the projections of a tensor, in float64.

    Args:
        tensor: values of any floating dtype, on any device; only read.
        first: place of its first element in the whole tensor, row by row.
    """
    flat = tensor.detach().to("cpu", torch.float64).reshape(-1)
    before = first % _BLOCK
    padded = -(-(before + len(flat)) // _BLOCK) * _BLOCK
    blocks = torch.zeros(padded, dtype=torch.float64, device="cpu")
    blocks[before : before + len(flat)] = flat
    skipped = first // _BLOCK
    rows = padded // _BLOCK
    # Products of two signs are signs, independent in pairs, which is all that the mean needs.
    across = blocks.view(rows, _BLOCK) @ _signs("columns", _BLOCK)
    down = _signs("rows", 1 << max(6, (skipped + rows - 1).bit_length()))[skipped : skipped + rows]
    return float(flat.square().sum()), (across * down).sum(0).tolist()
