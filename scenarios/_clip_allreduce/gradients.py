"""How clip_allreduce judges gradients: distances to one process, in multiples of the floor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from harness.floor import Size
from harness.scenario import Finding, holds, refuted, unknown
from harness.tables import Tables
from scenarios._clip_allreduce.records import (
    GAP,
    NORMS,
    ORDERED,
    RELATIVE,
    SHARDED,
    Gap,
    check_clipped,
    cosine_between,
    counted,
    floor_of,
    order_gap,
    skipped,
    traffic_gap,
)

SCALE = 2.0**16
"""Where a GradScaler starts."""
_LOCAL = {"fsdp1_shards": ("L1", "L2"), "fsdp2_shards": ("L1", "L2", "layer")}


def distributed_clip_is_right(t: Tables) -> Finding:
    """Compare the clipped gradient of every way of distributing with one process."""
    check_clipped(t, "one_process", step=2, phase="inf")
    gaps = {
        f"{arm} {norm}": traffic_gap(t, arm, norm)
        for arm in ("ddp", *SHARDED)
        for norm in NORMS
        if not (norm == "layer" and arm.startswith("fsdp1")) and not skipped(t, arm, norm)
    }
    return _all_clean(gaps, "every clipped gradient equals that of one process")


def local_norm_is_the_models(t: Tables) -> Finding:
    """Compare a clip of what each rank holds with one process."""
    check_clipped(t, "one_process", step=1, phase="L2")
    gaps = {
        f"{arm} {norm}": traffic_gap(t, arm, norm)
        for arm, norms in _LOCAL.items()
        for norm in norms
    }
    return _all_faulty(gaps, "each rank scales its shard by another factor")


def shard_norm_is_sqrt_n_smaller(t: Tables) -> Finding:
    """Add up the squares of the shards' norms."""
    arm = "fsdp2_shards"
    local = [float(n) for n in counted(t, arm, ["L2"], "norm")]
    full = float(t.value("one_process", "full_norm", step=1, phase="L2"))
    floor = floor_of(t, "one_process", step=1, phase="L2")
    mean = math.sqrt(sum(norm**2 for norm in local) / len(local))
    effect = abs(mean * math.sqrt(len(local)) / full - 1)
    evidence = {
        "mean_ratio": _over(full, mean),
        "smallest_ratio": _over(full, max(local)),
        "largest_ratio": _over(full, min(local)),
        "sqrt_n": math.sqrt(len(local)),
    }
    numbers: dict[str, Any] = {
        "effect": effect,
        "floor": floor.value,
        "unit": RELATIVE,
        "evidence": evidence,
    }
    size = floor.size(effect)
    if size is Size.BETWEEN:
        return unknown("the shards' norms nearly add up to the model's", **numbers)
    if size is Size.FAULT:
        return refuted("the squares of the shards' norms do not add up to the model's", **numbers)
    return holds(
        f"the model's norm is {evidence['mean_ratio']:.4g} times the shards' root mean square; "
        f"of one shard, {evidence['smallest_ratio']:.3g} to {evidence['largest_ratio']:.3g} times",
        **numbers,
    )


def _over(full: float, local: float) -> float:
    return full / local if local else math.inf


def one_call_takes_both_kinds(t: Tables) -> Finding:
    """See whether fully_shard's and plain gradients may be clipped together."""
    t.require("fsdp2_part")
    refusals = {
        str(t.value("fsdp2_part", "refusal", step=len(NORMS), phase="one call", rank=rank))
        for rank in t.ranks("fsdp2_part")
    }
    evidence = {f"refusal_{number}": text for number, text in enumerate(sorted(refusals))}
    if refusals == {""}:
        return holds("torch clips sharded and plain gradients in one call", evidence=evidence)
    if "" in refusals:
        return unknown("some ranks refuse and some do not", evidence=evidence)
    return refuted(
        "under fully_shard the call raises; clip each kind with one total norm "
        "(get_total_norm of both, then clip_grads_with_norm_), which gives one process's gradient",
        evidence=evidence,
    )


def returned_norm_can_be_logged(t: Tables) -> Finding:
    """Compare the norm each rank would print with the model's."""
    t.require("fsdp2", "one_process")
    floor = floor_of(t, "one_process", step=1, phase="L2")
    errors = {}
    for norm in ORDERED:
        if skipped(t, "fsdp2", norm):
            continue
        full = float(t.value("one_process", "full_norm", step=NORMS.index(norm), phase=norm))
        errors[norm] = max(abs(float(n) / full - 1) for n in counted(t, "fsdp2", [norm], "norm"))
    worst = max(errors, key=lambda norm: errors[norm])
    numbers: dict[str, Any] = {
        "effect": errors[worst],
        "floor": floor.value,
        "unit": RELATIVE,
        "evidence": errors,
    }
    size = floor.size(errors[worst])
    if size is Size.FAULT:
        return refuted(
            f"under fully_shard the {worst} norm comes back unreduced: what a rank prints is up to "
            f"{errors[worst]:.0%} off; full_tensor() gives the model's",
            **numbers,
        )
    if size is Size.BETWEEN:
        return unknown(f"the {worst} norm is neither at the floor nor clearly off it", **numbers)
    if len(errors) < len(ORDERED):
        left_out = ", ".join(norm for norm in ORDERED if norm not in errors)
        return unknown(
            f"left out: {left_out}, because a rank holds an empty shard; 2 to 8, 10, 16, 32 or 64 "
            "ranks leave none empty",
            **numbers,
        )
    return holds("every rank gets the model's norm", **numbers)


def _before(arm: str, means: str) -> Any:
    def judge(t: Tables) -> Finding:
        check_clipped(t, "trained_alone")
        control = order_gap(t, "same_rows")
        if control.size is not Size.CLEAN:
            return unknown("the order matters even where all ranks hold the same gradient")
        gap = order_gap(t, arm)
        wrong = t.snapshot(arm, "grad", step=0)
        right = t.snapshot("trained_alone", "grad", step=0)
        norms = math.sqrt(float(wrong @ wrong)), math.sqrt(float(right @ right))
        cosine = cosine_between(wrong, right)
        numbers: dict[str, Any] = {
            "effect": gap.effect,
            "floor": gap.floor.value,
            "unit": GAP,
            "evidence": {
                "cosine": cosine,
                "norm": norms[0],
                "right_norm": norms[1],
                "same_gradient_on_all_ranks": control.effect,
                "floor": str(gap.floor),
            },
        }
        if gap.size is Size.CLEAN:
            return holds("the gradient is that of one process", **numbers)
        if norms[0] > t.root_params["bound"] * (1 + 1e-6):
            # A mean of clipped gradients is never longer than the bound.
            return unknown(f"arm {arm} clips nothing: the norm is {norms[0]:.3g}", **numbers)
        if gap.size is Size.BETWEEN:
            return unknown("neither rounding nor a clear fault", **numbers)
        # Where both are as long as the bound, only the direction tells.
        length = f", norm {norms[0]:.3g}, not {norms[1]:.3g}"
        length = "" if f"{norms[0]:.3g}" == f"{norms[1]:.3g}" else length
        return refuted(f"{means}: cosine {cosine:.3f} to the right gradient{length}", **numbers)

    return judge


by_hand_first = _before(
    "manual_before", "every rank's gradient gets the same weight, steep or flat"
)
in_hook = _before("hook_before", "the hook clips each rank's gradient before the average")
in_no_sync = _before("no_sync_before", "the first half is clipped on its own, before the average")
without_unscale = _before("scaled", f"the bound meets gradients {SCALE:g} times too large")


def averaging_first_is_right(t: Tables) -> Finding:
    """Compare every remedy with one process."""
    check_clipped(t, "trained_alone")
    arms = ("after", "manual_after", "no_sync_after", "unscaled", "same_rows")
    gaps = {arm: order_gap(t, arm) for arm in arms}
    return _all_clean(gaps, "averaged first, then clipped: the gradient of one process")


def _all_clean(gaps: Mapping[str, Gap], text: str) -> Finding:
    worst = max(gaps, key=lambda name: gaps[name].effect / gaps[name].floor.value)
    numbers = _numbers(gaps, worst)
    if any(gap.size is Size.FAULT for gap in gaps.values()):
        bad = ", ".join(name for name, gap in gaps.items() if gap.size is Size.FAULT)
        return refuted(f"not so: {bad}", **numbers)
    if any(gap.size is Size.BETWEEN for gap in gaps.values()):
        return unknown(f"{worst} is neither at the floor nor clearly off it", **numbers)
    return holds(text, **numbers)


def _all_faulty(gaps: Mapping[str, Gap], text: str) -> Finding:
    least = min(gaps, key=lambda name: gaps[name].effect / gaps[name].floor.value)
    numbers = _numbers(gaps, least)
    if all(gap.size is Size.CLEAN for gap in gaps.values()):
        return holds("the gradient is that of one process", **numbers)
    if not all(gap.size is Size.FAULT for gap in gaps.values()):
        return unknown(f"{least} is not clearly off the floor", **numbers)
    return refuted(f"{text}: at least {gaps[least].effect:.0%} off", **numbers)


def _numbers(gaps: Mapping[str, Gap], chosen: str) -> dict[str, Any]:
    evidence: dict[str, Any] = {name: gap.effect for name, gap in gaps.items()}
    gap = gaps[chosen]
    evidence["floor"] = str(gap.floor)
    return {"effect": gap.effect, "floor": gap.floor.value, "unit": GAP, "evidence": evidence}
