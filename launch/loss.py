"""The loss of one run in one row per arm: its gap across ranks and to the reference, in floors.

Two figures, since one alone misleads. The gap is the largest minus the smallest loss of the ranks;
each rank sees other rows, so it is not zero in a sound run. The drift is how far the mean over the
ranks, which is what data parallelism minimises, stands from the loss of the arm's reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from harness.errors import MissingRecord
from harness.floor import permutation_floor
from harness.plan import ArmPlan
from harness.scenario import Arm, Role, Scenario
from harness.tables import Tables

METRIC = "loss"
COLUMNS: Mapping[str, type] = {
    "arm": str,
    "role": str,
    "ranks": int,
    "loss_steps": int,
    **{f"loss_gap_{when}": float for when in ("first", "last", "max")},
    "loss_reference": str,
    **{f"loss_drift_{when}": float for when in ("first", "last", "max")},
    "loss_floor": float,
    **{f"loss_gap_{when}_floors": float for when in ("first", "last", "max")},
    **{f"loss_drift_{when}_floors": float for when in ("first", "last", "max")},
    "loss_note": str,
}
"""Name -> type of what `rows` gives; None where there is nothing to say."""

Steps = Mapping[int, float]
Row = dict[str, Any]


def rows(tables: Tables, scenario: Scenario) -> list[Row]:
    """Return one row per arm of a run, in the order of its plan; see `COLUMNS`."""
    return [_Measure(tables, scenario, planned).row() for planned in tables.plan.arms]


def losses(tables: Tables, arm: str, *, repeat: int = 0) -> dict[int, list[float]]:
    """Return step -> loss of each rank.

    Raises:
        MissingRecord: if a rank did not come to its end, or lacks a loss that another has.
    """
    tables.require(arm)
    series = [tables.series(arm, METRIC, rank=r, repeat=repeat) for r in tables.ranks(arm)]
    steps = sorted(set().union(*series))
    for rank, found in enumerate(series):
        for step in steps:
            value = found.get(step)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise MissingRecord(f"rank {rank} has no {METRIC} at step {step}")
    return {step: [float(found[step]) for found in series] for step in steps}


def gap(values: list[float]) -> float:
    """Return largest minus smallest; NaN if one is NaN, 0 if all are the same infinity."""
    if any(math.isnan(value) for value in values):
        return math.nan
    low, high = min(values), max(values)
    return 0.0 if low == high else high - low


def mean(values: list[float]) -> float:
    """Return the mean, rounded once; NaN or an infinity if that is what the values come to."""
    if not all(map(math.isfinite, values)):
        return sum(values) / len(values)
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value * 2.0**-64 for value in values) / len(values) * 2.0**64


def reference_of(arm: Arm, scenario: Scenario) -> Arm | None:
    """Return the reference arm that an arm may be compared with; None if none or several fit.

    They have to agree in the dtype and in every option in which the references differ from each
    other: a float64 arm beside a float32 floor, or one loss beside another, says nothing.
    """
    references = [other for other in scenario.arms if other.role is Role.REFERENCE]
    names = {name for other in references for name in other.options}
    telling = {n for n in names if len({repr(other.get(n)) for other in references}) > 1}
    telling.add("dtype")
    fit = [r for r in references if all(arm.get(name) == r.get(name) for name in telling)]
    return fit[0] if len(fit) == 1 else None


def floors(tables: Tables, reference: str) -> dict[int, float]:
    """Return step -> how far permuted repeats of the reference had moved by then, at most.

    Rounding adds up, so a step's floor is never below that of a step before it. Steps up to
    which no permutation moved the loss have none.

    Raises:
        MissingRecord: if fewer than 20 repeats recorded their loss, or one is not finite.
    """
    base = {step: mean(values) for step, values in losses(tables, reference).items()}
    moved: list[list[float]] = []
    for repeat in range(1, tables.plan.arm(reference).repeats):
        try:
            again = losses(tables, reference, repeat=repeat)
        except MissingRecord as missing:
            raise MissingRecord(f"repeat {repeat} of {reference}: {missing}") from None
        if again.keys() != base.keys():
            raise MissingRecord(f"repeat {repeat} of {reference} recorded other steps")
        gaps = (abs(mean(again[step]) - value) for step, value in base.items())
        moved.append(list(accumulate(gaps, _largest)))
    permutation_floor([repeat[-1] for repeat in moved])
    by_step = zip(base, zip(*moved, strict=True), strict=True)
    return {step: max(values) for step, values in by_step if max(values) > 0.0}


@dataclass
class _Measure:
    """The row of one arm in the making."""

    tables: Tables
    scenario: Scenario
    planned: ArmPlan

    def row(self) -> Row:
        arm = self.scenario.arm(self.planned.name)
        found: Row = dict.fromkeys(COLUMNS)
        found |= {"arm": arm.name, "role": arm.role.value, "ranks": self.planned.ranks}
        notes: list[str] = []
        try:
            mine = losses(self.tables, arm.name)
        except MissingRecord as missing:
            return found | {"loss_note": str(missing)}
        found["loss_steps"] = len(mine)
        floor: dict[int, float] = {}
        reference = reference_of(arm, self.scenario)
        if reference is None:
            notes.append("no one reference arm shares the dtype and options of this arm")
        else:
            found["loss_reference"] = reference.name
            try:
                floor = floors(self.tables, reference.name)
            except MissingRecord as missing:
                notes.append(f"no floor: {missing}")
        if self.planned.ranks > 1:
            found |= _figures("gap", {step: gap(values) for step, values in mine.items()}, floor)
        if reference is not None and reference.name != arm.name:
            try:
                found |= _figures("drift", self._drift(mine, reference.name), floor)
            except MissingRecord as missing:
                notes.append(f"no drift: {missing}")
        found["loss_floor"] = floor.get(max(mine))
        odd = [step for step, values in mine.items() if not all(map(math.isfinite, values))]
        if odd:
            notes.insert(0, f"not finite from step {odd[0]} on")
        return found | {"loss_note": "; ".join(notes) or None}

    def _drift(self, mine: Mapping[int, list[float]], reference: str) -> dict[int, float]:
        theirs = losses(self.tables, reference)
        if theirs.keys() != mine.keys():
            raise MissingRecord(f"{reference} recorded other steps")
        return {step: abs(mean(mine[step]) - mean(theirs[step])) for step in mine}


def _figures(name: str, values: Steps, floor: Steps) -> Row:
    """Return first, last and largest of a figure, each absolute and in floors of its step."""
    first, last = min(values), max(values)
    largest = max(values, key=lambda step: (math.isnan(values[step]), values[step]))
    found: Row = {}
    for when, step in (("first", first), ("last", last), ("max", largest)):
        value = values[step]
        found[f"loss_{name}_{when}"] = value
        if step in floor:
            found[f"loss_{name}_{when}_floors"] = value / floor[step]
    return found


def _largest(a: float, b: float) -> float:
    return a if math.isnan(a) or a > b else b
