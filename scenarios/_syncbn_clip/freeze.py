"""How each claim of `syncbn_clip` about freezing is decided from the records, bit for bit."""

from __future__ import annotations

from harness.errors import MissingRecord
from harness.scenario import Finding, holds, refuted, unknown
from harness.tables import Tables
from scenarios._syncbn_clip.records import PHASES, bits, cells, counted, in_motion, same_digest


def moved(t: Tables, arm: str, *, since: int = 0) -> list[str]:
    """Return where a buffer differs from its start on any rank, as `rank r, step s, phase`.

    Raises:
        MissingRecord: if nothing was trained either: then a still buffer says nothing.
    """
    in_motion(t)
    places = []
    for rank, step in cells(t, arm):
        if step < since:
            continue
        start = bits(t, arm, rank, since, "before_forward")
        places += [
            f"rank {rank}, step {step}, {phase}"
            for phase in PHASES
            if bits(t, arm, rank, step, phase) != start
        ]
    params = [t.value(arm, "params.digest", step=s, phase="after_edit") for _, s in cells(t, arm)]
    if len(set(params)) == 1:
        raise MissingRecord(f"scenario.lr={t.root_params['lr']}: no parameter moved in arm {arm}")
    return places


def frozen_still_updated(t: Tables) -> Finding:
    """Does a layer in eval mode change its buffers, or communicate, in training under DDP?"""
    arm = "freeze_eval"
    places = moved(t, arm)
    seen = cells(t, arm)
    gathers = sum(counted(t, arm, "all_gather", "after_forward"))
    thawed = sum(counted(t, "sync_no_clip", "all_gather", "after_forward"))
    evidence = {
        "moments_changed": len(places),
        "steps": len(seen),
        "all_gathers": gathers,
        "all_gathers_not_frozen": thawed,
    }
    if places:
        return holds(f"the frozen buffers change, first at {places[0]}", evidence=evidence)
    if gathers or not thawed:
        return unknown(
            f"the buffers are still, with {gathers} all_gathers; a layer that is not frozen "
            f"issues {thawed}",
            evidence=evidence,
        )
    return refuted(
        f"in {len(seen)} steps on all ranks no bit of the frozen buffers changes and the layer "
        f"issues {gathers} all_gathers",
        evidence=evidence,
    )


def freezes(t: Tables, arm: str) -> Finding:
    """Do the buffers keep every bit, on every rank, from the first step to the last?"""
    places = moved(t, arm)
    steps = len(cells(t, arm))
    affine = len(
        {
            t.value(arm, "affine.digest", step=s, phase="after_edit", rank=r)
            for r, s in cells(t, arm)
        }
    )
    evidence = {"moments_changed": len(places), "steps": steps, "affine_versions": affine}
    if places:
        return refuted(f"the buffers change, first at {places[0]}", evidence=evidence)
    return holds(f"no bit of the buffers changes in {steps} steps on all ranks", evidence=evidence)


def freezes_all(t: Tables, arm: str) -> Finding:
    """`freezes`, and weight and bias as well, with equal gradients on all ranks."""
    finding = freezes(t, arm)
    equal = all(same_digest(t, arm, "grad", s, "after_edit") for s in range(t.root_params["steps"]))
    if finding.evidence["affine_versions"] != 1 or not equal:
        return refuted(
            "weight and bias move, or gradients differ between ranks", evidence=finding.evidence
        )
    return finding


def _raised(t: Tables, arm: str) -> list[int]:
    """Return the step at which each rank's forward raised; empty if none did."""
    t.require(arm)
    return [
        step
        for rank in t.ranks(arm)
        if t.has(arm, "error", rank=rank)
        for step in t.series(arm, "error", rank=rank)
    ]


def late_freeze_silent(t: Tables) -> Finding:
    """Are the gradients of the first step after freezing different between ranks, unsaid?"""
    arm = "freeze_late"
    t.require(arm)
    before, after = (same_digest(t, arm, "grad", step, "after_edit") for step in (0, 1))
    apart = not same_digest(t, arm, "params", 1, "after_edit")
    evidence = {"equal_before": before, "equal_after": after, "parameters_differ": apart}
    if not before:
        return unknown("the gradients differ before the layer is frozen, too", evidence=evidence)
    if after:
        return refuted(
            "the ranks' gradients are equal in the step after freezing", evidence=evidence
        )
    return holds(
        "the step after freezing ends without a word, with different gradients "
        f"{'and different parameters ' if apart else ''}on the ranks",
        evidence=evidence,
    )


def late_freeze_raises(t: Tables) -> Finding:
    """Does the forward after that raise, on every rank?"""
    arm = "freeze_late"
    steps, ranks = _raised(t, arm), len(t.ranks(arm))
    evidence = {"ranks_raised": len(steps), "ranks": ranks}
    if steps == [2] * ranks:
        error = t.last(arm, "error")
        if "reduction" not in error:
            return unknown(f"forward raises, but not the reducer: {error}", evidence=evidence)
        return holds(
            f"the second forward after freezing raises on all {ranks} ranks: "
            f"{error.partition('. ')[0]}",
            evidence=evidence | {"error": error},
        )
    if steps:
        return unknown(f"forward raised on {len(steps)} of {ranks} ranks", evidence=evidence)
    return refuted(f"all {ranks} ranks train to the end", evidence=evidence)


def find_unused(t: Tables) -> Finding:
    """With find_unused_parameters, are gradients equal and the layer still after a late freeze?"""
    arm = "freeze_late_find_unused"
    steps = _raised(t, arm)
    if steps:
        return refuted(f"forward raises at step {steps[0]}", evidence={"ranks_raised": len(steps)})
    places = moved(t, arm, since=1)
    equal = [same_digest(t, arm, "grad", s, "after_edit") for s in range(t.root_params["steps"])]
    # Frozen from the top of step 1 on: what step 0 left of weight and bias has to stay.
    affine = {
        t.value(arm, "affine.digest", step=s, phase="after_edit", rank=r) for r, s in cells(t, arm)
    }
    evidence = {
        "steps_equal": sum(equal),
        "steps": len(equal),
        "moments_changed": len(places),
        "affine_versions": len(affine),
    }
    if all(equal) and not places and len(affine) == 1:
        return holds(
            f"equal gradients in all {len(equal)} steps, nothing raised, the layer still from the "
            "freeze on",
            evidence=evidence,
        )
    moves = f"; the buffers move, first at {places[0]}" if places else ""
    moves += f"; weight and bias take {len(affine)} values" if len(affine) > 1 else ""
    return refuted(
        f"gradients equal in {sum(equal)} of {len(equal)} steps{moves}", evidence=evidence
    )
