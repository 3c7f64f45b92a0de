"""The rounding floor, measured in the run that is judged: permuted reduction order, dtype scaling.

Two facts carry every decision. Rounding moves when the order of a reduction is permuted, and it
shrinks by about 2^29 from float32 to float64; a bug does neither.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from harness.errors import MissingRecord

CLEAN = 4.0
"""An effect up to this many floors is rounding: a deeper reduction tree costs a small factor."""
FAULT = 100.0
"""An effect of this many floors or more is no rounding; between the two nothing is said."""
PERMUTATIONS = 20
"""Fewer permutations miss the tail: one of six once gave 3,000 times the median."""
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Distance from 1 to the next number, by dtype."""


class Size(str, Enum):
    """How large an effect is beside its floor."""

    CLEAN = "clean"
    BETWEEN = "between"
    FAULT = "fault"


@dataclass(frozen=True, kw_only=True)
class Floor:
    """How far the reference moves when nothing but the rounding changes."""

    values: tuple[float, ...]
    """One distance to the unpermuted reference for each permutation."""

    @property
    def value(self) -> float:
        """The largest of them: what an effect has to clear."""
        return max(self.values)

    @property
    def median(self) -> float:
        """The middle one; far below `value` where the distribution has a tail."""
        return statistics.median(self.values)

    @property
    def smallest(self) -> float:
        """The smallest of them."""
        return min(self.values)

    def size(self, effect: float) -> Size:
        """Say whether an effect in the same unit is rounding, a fault, or neither.

        An effect that is not finite is a fault.
        """
        if math.isnan(effect) or effect >= FAULT * self.value:
            return Size.FAULT
        return Size.CLEAN if effect <= CLEAN * self.value else Size.BETWEEN

    def __str__(self) -> str:
        """Show the whole range, not only the maximum."""
        if len(self.values) == 1:
            return f"{self.value:.2g}"
        return (
            f"{self.value:.2g} (smallest {self.smallest:.2g}, median {self.median:.2g}, "
            f"n={len(self.values)})"
        )


def permutation_floor(distances: Sequence[float]) -> Floor:
    """Return the floor from one distance per permuted repeat of the reference.

    Raises:
        MissingRecord: with fewer than 20 permutations, one that is not finite, or if no
            permutation moved anything: then rounding was not exercised and nothing is decided.
    """
    if len(distances) < PERMUTATIONS:
        raise MissingRecord(
            f"rounding floor needs {PERMUTATIONS} permutations, this run has {len(distances)}"
        )
    if not all(math.isfinite(distance) for distance in distances):
        raise MissingRecord("a permuted repeat of the reference is not finite: it has no floor")
    if max(distances) == 0.0:
        raise MissingRecord("no permutation moved the reference: the rounding floor is unmeasured")
    return Floor(values=tuple(distances))


def dtype_floor(distance: float) -> Floor:
    """Return the floor of a dtype that permutations do not exercise, from one distance.

    Autocast accumulates in float32 and rounds the sum to bfloat16: the order of the rows then
    moves nothing (measured: 0.0 in 20 permutations), yet N ranks round N partial sums. What one
    process loses to the dtype, its distance to itself in a finer one, is the size of that.

    Raises:
        MissingRecord: if the distance is zero or not finite.
    """
    if not math.isfinite(distance) or distance <= 0.0:
        raise MissingRecord(f"the two dtypes are {distance} apart: no floor to be had from that")
    return Floor(values=(distance,))


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A measured size beside the floor that it has to clear."""

    value: float
    floor: Floor

    @property
    def clean(self) -> bool:
        """True if it is rounding."""
        return self.floor.size(self.value) is Size.CLEAN

    @property
    def fault(self) -> bool:
        """True if it cannot be rounding."""
        return self.floor.size(self.value) is Size.FAULT

    @property
    def multiple(self) -> float:
        """How many floors it is."""
        return self.value / self.floor.value

    def __str__(self) -> str:
        """Show the size and how many floors that is."""
        return f"{self.value:.2g} ({self.multiple:.2g} floors)"


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The same effect in two dtypes."""

    coarse: float
    fine: float
    coarse_dtype: str = "float32"
    fine_dtype: str = "float64"

    @property
    def ratio(self) -> float:
        """How many times smaller the effect is in the finer dtype."""
        return math.inf if self.fine == 0.0 else self.coarse / self.fine

    @property
    def eps_ratio(self) -> float:
        """How many times smaller rounding would be: the ratio of the machine epsilons."""
        return EPS[self.coarse_dtype] / EPS[self.fine_dtype]

    @property
    def shrinks_like_rounding(self) -> bool:
        """True within a factor of 32 of the ratio of epsilons (measured: 0.7 to 2 times)."""
        return self.eps_ratio / 32 <= self.ratio <= self.eps_ratio * 32

    @property
    def stays(self) -> bool:
        """True if the dtype does not move the effect by more than 1 %."""
        return abs(self.ratio - 1.0) <= 0.01
