"""How clip_allreduce judges calls that not every rank makes, or not every rank survives."""

from __future__ import annotations

from typing import Any

from harness.scenario import Finding, holds, refuted, unknown
from harness.tables import Tables
from scenarios._clip_allreduce.records import check_clipped


def lone_call_hangs_ddp(t: Tables) -> Finding:
    """Compare what rank 0 sends, alone in clipping, with what the others send."""
    t.require("rank0", "after")
    steps = range(t.root_params["steps"])
    clipped = [
        rank
        for rank in t.ranks("rank0")
        if any(t.value("rank0", "norm", step=s, rank=rank) is not None for s in steps)
    ]
    if clipped != [0]:
        return unknown(f"ranks {clipped} clipped, not rank 0 alone")
    sent = [
        [t.value("rank0", "collectives", step=s, rank=r) for s in steps] for r in t.ranks("rank0")
    ]
    extra = max(
        mine - other for others in sent[1:] for mine, other in zip(sent[0], others, strict=True)
    )
    numbers: dict[str, Any] = {
        "effect": float(extra),
        "unit": "collectives the others do not join",
        "evidence": {"steps": len(steps), "collectives_a_step": sent[0][0]},
    }
    if not any(sent[0]):
        return unknown("no collective was counted in these steps", **numbers)
    if extra > 0:
        return holds("rank 0 waits for collectives that the others never join", **numbers)
    return refuted(f"all {len(steps)} steps complete: the call sends nothing", **numbers)


def lone_call_is_harmless_under_ddp(t: Tables) -> Finding:
    """See whether the ranks still hold the same weights."""
    t.require("rank0", "after")
    check_clipped(t, "trained_alone")
    control = t.first_divergence("after", metrics=("weights.digest",))
    if control is not None:
        return unknown("the ranks part even where all of them clip")
    start, end = (
        t.value("after", "weights.digest", step=step, phase=phase)
        for step, phase in ((0, "start"), (t.root_params["steps"] - 1, ""))
    )
    if start == end:
        return unknown(
            f"scenario.lr={t.root_params['lr']}: no weight moves, whatever is clipped; take a "
            "larger one"
        )
    parted = t.first_divergence("rank0", metrics=("weights.digest",))
    if parted is None:
        return holds("all ranks hold the same weights after every step")
    return refuted(
        f"no error and no hang, but after step {parted.step} ranks {parted.ranks[0]} and "
        f"{parted.ranks[1]} hold different weights, and nothing brings them together again",
        evidence={"step": parted.step, "with_all_ranks": "equal"},
    )


def lone_call_hangs_when_sharded(t: Tables) -> Finding:
    """See how rank 0 fared when it alone clipped sharded gradients."""
    t.require("fsdp1", "fsdp2")
    evidence: dict[str, Any] = {}
    outcomes = []
    for step, case in ((0, "fsdp2"), (1, "fsdp1")):
        raised = str(t.value("alone", "raised", step=step, phase=case))
        waited = t.value("alone", "waited", step=step, phase=case)
        others = [
            t.value("alone", "called", step=step, phase=case, rank=r) for r in t.ranks("alone")
        ]
        if others != [True] + [False] * (len(others) - 1):
            return unknown(f"{case}: it is not rank 0 alone that called")
        spent = t.value("alone", "seconds", step=step, phase=case)
        limit = t.value("alone", "timeout_s", step=step, phase=case)
        if raised and spent < limit:
            return unknown(f"{case}: it raised after {spent:.3g} s, before the timeout: {raised}")
        outcomes.append(bool(raised) and waited == 1)
        evidence |= {f"{case}_raised": raised, f"{case}_waiting_collectives": waited}
        evidence[f"{case}_seconds"] = spent
    seconds = t.value("alone", "timeout_s", step=0, phase="fsdp2")
    if all(outcomes):
        return holds(
            f"rank 0 waits in its all-reduce until the timeout (here {seconds:g} s) ends it, under "
            "FSDP1 and fully_shard",
            evidence=evidence,
        )
    if any(outcomes):
        return unknown("one of FSDP1 and fully_shard waits, the other does not", evidence=evidence)
    return refuted("rank 0 returns", evidence=evidence)


def inf_norm_works_where_l2_does(t: Tables) -> Finding:
    """See how the infinity norm fared where ranks hold an empty shard, and L2 in the same place."""
    t.require("fsdp2")
    ranks = t.ranks("alone")
    control = [str(t.value("alone", "raised", step=2, phase="empty L2", rank=r)) for r in ranks]
    raised = [str(t.value("alone", "raised", step=3, phase="empty", rank=r)) for r in ranks]
    waited = [t.value("alone", "waited", step=3, phase="empty", rank=r) for r in ranks]
    evidence = {
        "rank_0_raised": raised[0],
        "rank_1_raised": raised[1],
        "rank_0_waits_in": waited[0],
        "with_L2_raised": next(filter(None, control), ""),
    }
    if any(control):
        return unknown("L2 does not work there either", evidence=evidence)
    if not any(raised):
        return holds("a parameter with fewer rows than ranks is no obstacle", evidence=evidence)
    if not (all(raised[1:]) and not any(waited[1:]) and raised[0] and waited[0]):
        return unknown("some ranks with an empty shard raise and some do not", evidence=evidence)
    return refuted(
        "with a parameter of one row L2 works; inf: the ranks without a row raise before the "
        "all-reduce and "
        "rank 0 waits in it: on the other ranks an error, on this one a hang",
        evidence=evidence,
    )
