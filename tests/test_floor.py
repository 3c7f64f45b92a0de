"""The floor decides every verdict: its edges, its refusals, and what it says about rounding."""

from __future__ import annotations

import math
import random

import pytest

from harness.errors import MissingRecord
from harness.floor import (
    CLEAN,
    EPS,
    FAULT,
    PERMUTATIONS,
    Effect,
    Floor,
    Scaling,
    Size,
    dtype_floor,
    permutation_floor,
)

ENOUGH = [1e-16 * (1 + k / 100) for k in range(PERMUTATIONS)]


def test_the_floor_is_the_largest_permutation_not_a_typical_one():
    heavy = permutation_floor([8e-8] * 19 + [2.7e-4])
    assert heavy.value == 2.7e-4
    assert heavy.median == 8e-8
    assert heavy.smallest == 8e-8
    assert heavy.size(1e-4) is Size.CLEAN, "the tail belongs to rounding"


def test_the_floor_does_not_depend_on_the_order_of_the_permutations():
    shuffled = random.Random(1).sample(ENOUGH, len(ENOUGH))
    assert permutation_floor(shuffled).value == permutation_floor(ENOUGH).value == max(ENOUGH)


@pytest.mark.parametrize("count", [0, 1, PERMUTATIONS - 1])
def test_too_few_permutations_decide_nothing(count):
    with pytest.raises(MissingRecord, match=f"needs {PERMUTATIONS} permutations.* has {count}"):
        permutation_floor(ENOUGH[:count])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_permutation_that_is_not_finite_decides_nothing(broken):
    with pytest.raises(MissingRecord, match="not finite"):
        permutation_floor([*ENOUGH, broken])


def test_permutations_that_move_nothing_measured_no_floor():
    with pytest.raises(MissingRecord, match="no permutation moved"):
        permutation_floor([0.0] * PERMUTATIONS)
    assert permutation_floor([0.0] * (PERMUTATIONS - 1) + [1e-17]).value == 1e-17


@pytest.mark.parametrize(
    ("floors", "size"),
    [
        (0.0, Size.CLEAN),
        (CLEAN, Size.CLEAN),
        (math.nextafter(CLEAN, math.inf), Size.BETWEEN),
        (math.nextafter(FAULT, 0.0), Size.BETWEEN),
        (FAULT, Size.FAULT),
        (math.inf, Size.FAULT),
        (math.nan, Size.FAULT),
    ],
)
def test_sizes_at_their_very_edges(floors, size):
    assert Floor(values=(1.0,)).size(floors) is size
    effect = Effect(value=floors, floor=Floor(values=(1.0,)))
    assert effect.clean == (size is Size.CLEAN)
    assert effect.fault == (size is Size.FAULT)


def test_an_effect_counts_in_floors():
    effect = Effect(value=6e-16, floor=permutation_floor([1e-16] * 19 + [2e-16]))
    assert effect.multiple == pytest.approx(3.0)
    assert str(effect) == "6e-16 (3 floors)"


def test_the_whole_range_is_shown():
    assert str(permutation_floor([1e-16] * 19 + [2e-16])) == (
        "2e-16 (smallest 1e-16, median 1e-16, n=20)"
    )
    assert str(dtype_floor(5e-4)) == "0.0005"


@pytest.mark.parametrize("distance", [0.0, -1.0, math.nan, math.inf])
def test_two_dtypes_that_do_not_differ_give_no_floor(distance):
    with pytest.raises(MissingRecord, match="no floor"):
        dtype_floor(distance)


def test_epsilons_are_those_of_the_formats():
    import torch

    assert {name: torch.finfo(getattr(torch, name)).eps for name in EPS} == EPS


def test_rounding_shrinks_by_the_ratio_of_epsilons():
    measured = Scaling(coarse=8.6e-8, fine=1.6e-16)
    assert measured.eps_ratio == 2.0**29
    assert measured.shrinks_like_rounding
    assert not measured.stays


def test_a_bug_does_not_shrink():
    measured = Scaling(coarse=5.47e-2, fine=5.4701e-2)
    assert measured.stays
    assert not measured.shrinks_like_rounding


@pytest.mark.parametrize("ratio", [1.02, 0.98, 3.0, 1e4, 2.0**29 / 33, 2.0**29 * 33])
def test_what_is_neither_is_called_neither(ratio):
    scaling = Scaling(coarse=ratio, fine=1.0)
    assert not scaling.stays
    assert not scaling.shrinks_like_rounding


@pytest.mark.parametrize(("coarse", "fine"), [(1e-8, 0.0), (math.nan, 1.0), (1.0, math.nan)])
def test_a_scaling_that_cannot_be_formed_says_neither(coarse, fine):
    scaling = Scaling(coarse=coarse, fine=fine)
    assert not scaling.stays
    assert not scaling.shrinks_like_rounding


def test_other_dtypes_scale_by_their_own_epsilons():
    assert (
        Scaling(coarse=1.0, fine=1.0, coarse_dtype="bfloat16", fine_dtype="float32").eps_ratio
        == 2.0**16
    )


def test_real_rounding_clears_neither_edge():
    """Sums in another order: what the floor is about, on numbers whose error is known to exist."""
    import numpy as np

    draw = np.random.default_rng(0)
    terms = draw.standard_normal(4096).astype(np.float32)
    base = float(np.cumsum(terms)[-1])
    moved = [abs(float(np.cumsum(draw.permutation(terms))[-1]) - base) for _ in range(40)]
    floor = permutation_floor(moved[:20])
    assert all(floor.size(distance) is Size.CLEAN for distance in moved[20:])
    assert floor.size(abs(float(np.cumsum(terms[1:])[-1]) - base)) is Size.FAULT, (
        "a term is missing"
    )
