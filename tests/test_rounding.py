"""The floor of a run's reference: when a unit in the last place stands in for a permutation."""

from __future__ import annotations

import math

import pytest

from harness.errors import MissingRecord
from harness.findings import matches
from harness.floor import EPS, PERMUTATIONS
from harness.rounding import rounding
from harness.scenario import Outcome
from harness.tables import Tables
from tests import streams

UNIT = EPS["float64"]
LOSS = 0.1
"""Not to be had in float32."""


def recorded(tmp_path, losses, digests=None, mine=()):
    """Return a run whose reference recorded these losses, one a repeat, and a tensor beside."""
    rows = [
        (
            "one_process",
            0,
            {
                "repeat": repeat,
                "step": 0,
                "metrics": {"loss.digest": str(loss), "beside.digest": digest},
                "tensors": {"loss": [loss]},
            },
        )
        for repeat, (loss, digest) in enumerate(
            zip(losses, digests or map(str, range(len(losses))), strict=False)
        )
    ]
    rows += [
        ("many", rank, {"step": 0, "metrics": {"loss.digest": str(x)}, "tensors": {"loss": [x]}})
        for rank, x in enumerate(mine)
    ]
    arms = {"one_process": 1, "many": max(1, len(mine))}
    plan = streams.plan(arms, repeats={"one_process": len(losses)})
    return Tables.read(streams.write(tmp_path, plan, rows))


def floor(t):
    return rounding(t, "one_process", "loss", step=0)


def test_a_sum_that_no_order_moved_is_known_to_its_last_place(tmp_path):
    assert floor(recorded(tmp_path, [LOSS] * (PERMUTATIONS + 1))).values == (UNIT,) * PERMUTATIONS


def test_what_an_order_moved_further_counts_as_it_is(tmp_path):
    moved = LOSS * (1 + 40 * UNIT)
    found = floor(recorded(tmp_path, [LOSS] * PERMUTATIONS + [moved]))

    assert found.smallest == UNIT
    assert found.value == pytest.approx(40 * UNIT, rel=0.1)


def test_repeats_that_are_the_first_one_again_measured_nothing(tmp_path):
    """The unit does not hide a permutation that somebody forgot."""
    t = recorded(tmp_path, [LOSS] * (PERMUTATIONS + 1), ["same"] * (PERMUTATIONS + 1))

    with pytest.raises(MissingRecord, match="no permutation moved"):
        floor(t)


def test_a_narrower_dtype_has_a_unit_of_its_own(tmp_path):
    """A loss in float32 that no order moved may be 1e-8 off, which is no fault."""
    with pytest.raises(MissingRecord, match="no permutation moved"):
        floor(recorded(tmp_path, [0.5] * (PERMUTATIONS + 1)))


def test_the_unit_stands_in_for_no_repeat_that_is_missing_or_not_finite(tmp_path):
    with pytest.raises(MissingRecord, match="needs 20 permutations"):
        floor(recorded(tmp_path / "few", [LOSS] * PERMUTATIONS))
    with pytest.raises(MissingRecord, match="not finite"):
        floor(recorded(tmp_path / "nan", [LOSS] * PERMUTATIONS + [math.nan]))


@pytest.mark.parametrize(
    ("units", "outcome"),
    [(0, Outcome.HOLDS), (3, Outcome.HOLDS), (20, Outcome.UNKNOWN), (200, Outcome.REFUTED)],
)
def test_ranks_are_compared_with_it(tmp_path, units, outcome):
    other = LOSS * (1 + units * UNIT)
    t = recorded(tmp_path, [LOSS] * (PERMUTATIONS + 1), mine=[LOSS, other])

    assert matches(t, "many", "one_process", "loss", step=0).outcome is outcome
