"""How far rounding alone moves a tensor of a run's reference: its permuted repeats, and its dtype.

A sum of few numbers may come out the same in every order, by chance: seed 2 of a mean of 48 losses
did, in 20 orders, and N ranks were one unit in the last place away from it. Numbers in float64 are
never known better than to that unit, so no floor lies below it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.floor import EPS, Floor, permutation_floor

if TYPE_CHECKING:
    from harness.tables import Tables, Vector


def rounding(t: Tables, arm: str, name: str, *, step: int, phase: str = "") -> Floor:
    """Return the floor of a snapshot from the permuted repeats of its arm.

    A unit in the last place stands in for a permutation that moved less, where two things are
    certain: the tensor is in float64, and permutations did move something that the arm recorded.

    Raises:
        MissingRecord: with fewer than 20 permuted repeats, one that is not finite, or if no
            repeat differs from the first in anything: then rounding was not exercised.
    """
    distances = t.permuted(arm, name, step=step, phase=phase)
    if _in_float64(t.snapshot(arm, name, step=step, phase=phase)) and t.repeats_differ(arm):
        # Not max(unit, gap), which would lose a NaN.
        unit = EPS["float64"]
        distances = [unit if gap < unit else gap for gap in distances]
    return permutation_floor(distances)


def _in_float64(values: Vector) -> bool:
    """Say whether a narrower dtype would have lost something: then it was not held in one."""
    import numpy as np

    with np.errstate(over="ignore"):
        return bool((values.astype(np.float32) != values).any())
