"""How the records of clip_allreduce are read: counts by norm, distances to one process."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from harness.errors import MissingRecord
from harness.floor import Floor, Size, permutation_floor
from harness.tables import Tables

NORMS = ("L1", "L2", "inf", "value", "layer")
"""Phase of a traffic arm; its place is the step it is recorded under."""
ORDERED = NORMS[:3]
SHARDED = ("fsdp1", "fsdp1_part", "fsdp2", "fsdp2_part", "hsdp")
GAP = "relative L2 distance to one process"
RELATIVE = "relative error"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """How far an arm's gradient is from one process, at worst over its ranks."""

    effect: float
    floor: Floor
    size: Size


def traffic_gap(t: Tables, arm: str, norm: str) -> Gap:
    """Compare an arm of the traffic part with one process in the same dtype."""
    to = "one_process_fp32" if arm.startswith("fsdp1") else "one_process"
    return _distance(t, arm, to, step=NORMS.index(norm), phase=norm)


def order_gap(t: Tables, arm: str) -> Gap:
    """Compare the first gradient of a training arm with one process that trains alike."""
    return _distance(t, arm, "trained_alone", step=0, phase="")


def _distance(t: Tables, arm: str, to: str, *, step: int, phase: str) -> Gap:
    t.require(arm, to)
    floor = floor_of(t, to, step=step, phase=phase)
    distances = [
        t.distance(arm, to, "grad", step=step, phase=phase, rank=rank) for rank in t.ranks(arm)
    ]
    effect = max(distances) if all(map(math.isfinite, distances)) else math.inf
    return Gap(effect=effect, floor=floor, size=floor.size(effect))


def floor_of(t: Tables, to: str, *, step: int, phase: str) -> Floor:
    """Return what permuted rows and elements move in the gradient of one process."""
    try:
        return permutation_floor(t.permuted(to, "grad", step=step, phase=phase))
    except MissingRecord as error:
        p = t.root_params
        raise MissingRecord(
            f"{error} (scenario.permutations={p['permutations']}, scenario.batch={p['batch']})"
        ) from None


def counted(t: Tables, arm: str, norms: Iterable[str], metric: str) -> list[Any]:
    """Return a metric on every rank for each of these norms that was run.

    Raises:
        MissingRecord: if a rank did not finish, lacks the record, or every norm was left out.
    """
    t.require(arm)
    found = [
        t.value(arm, metric, step=NORMS.index(norm), phase=norm, rank=rank)
        for norm in norms
        if not skipped(t, arm, norm)
        for rank in t.ranks(arm)
    ]
    if not found:
        raise MissingRecord(f"arm {arm}: this run left out the norms that were asked for")
    return found


def skipped(t: Tables, arm: str, norm: str) -> bool:
    """Say whether the arm left a norm out, and said so."""
    try:
        return bool(t.value(arm, "skipped", step=NORMS.index(norm), phase=norm))
    except MissingRecord:
        return False


def check_clipped(t: Tables, arm: str, *, step: int = 0, phase: str = "") -> None:
    """Raise if the reference's gradient is not above the bound: then no clip did anything."""
    norm, bound = t.value(arm, "norm", step=step, phase=phase), t.plan.params["bound"]
    if not norm > bound:
        raise MissingRecord(
            f"nothing was clipped: the gradient's norm {norm:.3g} is below scenario.bound={bound:g}"
        )


def cosine_between(x: Any, y: Any) -> float:
    """Return the cosine of the angle between two vectors."""
    return float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))
