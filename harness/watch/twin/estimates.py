"""Distance and factor of two tensors, from their projections. Pure, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Estimate the Euclidean distance of two tensors from their projections."""
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))


def factor(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the number by which `a` has to be multiplied to come closest to `b`."""
    square = sum(x * x for x in a)
    return sum(x * y for x, y in zip(a, b, strict=True)) / square if square else math.nan
