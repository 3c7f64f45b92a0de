"""How the statements of `syncbn_clip` are decided: bit for bit wherever it can be."""

from __future__ import annotations

import math
from typing import Any

from harness.errors import MissingRecord
from harness.floor import EPS, FAULT, Size, permutation_floor
from harness.scenario import Finding, holds, refuted, unknown
from harness.tables import Tables
from scenarios._syncbn_clip.records import (
    BUFFERS,
    SYNC,
    Cell,
    bits,
    bound,
    cells,
    changes,
    counted,
    edits,
    in_motion,
    lowest,
    same_digest,
    var,
)


def sync_after_backward(t: Tables) -> Finding:
    """Does any bit change between the end of forward and the end of optimizer.step?"""
    in_motion(t)
    found = changes(t, *SYNC)
    total = sum(len(cells(t, arm)) for arm in SYNC)
    reduces = max(counted(t, SYNC[0], "all_reduce", "after_backward"))
    evidence = {f"changes_{phase}": count for phase, count in found.items()}
    evidence |= {"steps": total, "all_reduce_in_backward": reduces}
    late = found["after_backward"] + found["after_step"]
    if late:
        return holds(f"the buffers change behind forward {late} times", evidence=evidence)
    return refuted(
        f"no bit of the buffers changes in backward (its {reduces} all_reduce carry gradients) or "
        f"in optimizer.step; in forward {found['after_forward']} of {total} times, all ranks",
        evidence=evidence,
    )


def written_in_forward(t: Tables) -> Finding:
    """Is it the layer's own forward, every time, and is its all_gather what carries it?"""
    plain = "plain_clip_all"
    in_motion(t)
    found = changes(t, *SYNC)
    total = sum(len(cells(t, arm)) for arm in SYNC)
    cells(t, plain)
    gathers = {count for arm in SYNC for count in counted(t, arm, "all_gather", "after_forward")}
    control = {*counted(t, plain, "all_gather", "after_forward")}
    later = sum(sum(counted(t, arm, "collectives", "after_step")) for arm in SYNC)
    steps = range(t.root_params["steps"])
    agree = {
        arm: sum(same_digest(t, arm, "running_mean", step, "after_forward") for step in steps)
        for arm in (*SYNC, plain)
    }
    evidence: dict[str, Any] = {f"changes_{phase}": count for phase, count in found.items()}
    evidence |= {"steps": total, "collectives_in_step": later}
    evidence |= {"all_gather": max(gathers), "all_gather_plain": max(control)}
    evidence |= {f"{arm}.steps_ranks_agree": count for arm, count in agree.items()}
    elsewhere = sum(found[phase] for phase in ("at_layer", "after_backward", "after_step"))
    in_forward = found["after_forward"] == total and not elsewhere
    if not in_forward or gathers != {1} or any(agree[arm] < len(steps) for arm in SYNC):
        return refuted(
            f"{found['after_forward']} of {total} forwards change the buffers, {elsewhere} changes "
            f"happen elsewhere, forward issues {sorted(gathers)} all_gathers",
            evidence=evidence,
        )
    if control != {0} or agree[plain]:
        return unknown(
            "plain BatchNorm gathers or agrees too: what carries the statistics is not told apart",
            evidence=evidence,
        )
    return holds(
        f"all {total} changes happen between the layer's entry and the end of forward; with the "
        "layer's one all_gather the ranks end up equal bit for bit, plain BatchNorm's without it "
        "never do",
        evidence=evidence,
    )


def clip_overwritten(t: Tables) -> Finding:
    """After the next forward, is the buffer what it is in the twin arm that never clipped?"""
    arm, twin = "sync_clip_all", "sync_no_clip"
    done = edits(t, arm)
    gone = 0
    for rank, step in done:
        mine, other = (bits(t, a, rank, step + 1, "after_forward") for a in (arm, twin))
        if mine[0] != other[0]:
            return unknown(f"running_mean differs from the twin arm's at step {step + 1}: no twin")
        gone += mine[1] == other[1]
    evidence = {"edits": len(done), "overwritten": gone}
    if gone == len(done):
        return holds(
            f"all {gone} edits leave no bit behind after the next forward", evidence=evidence
        )
    if gone:
        return unknown(
            f"{gone} of {len(done)} edits are overwritten, the others not", evidence=evidence
        )
    return refuted(
        f"none of {len(done)} edits is overwritten: after the next forward every rank's "
        "running_var differs from that of the same training without a clip",
        evidence=evidence,
    )


ROUNDINGS = 2.0
"""Units in the last place that two products and a sum, each rounded, can be off by."""


def decay(t: Tables, arm: str, done: list[Cell], weights: list[float]) -> dict[str, float]:
    """Compare each edit's fate with (1 - w) * edit + w * batch; the batch comes from the twin.

    Returns the largest error in units of the dtype's rounding, the range of what is kept, and, in
    the same units, how far off a layer would be that kept the edit whole or none of it.
    """
    import numpy as np  # here: listing the scenarios imports this file and needs no numpy

    twin, m = "sync_no_clip", t.root_params["momentum"]
    worst, kept, whole, none = 0.0, [], math.inf, math.inf
    for (rank, step), w in zip(done, weights, strict=True):
        start = var(t, arm, rank, step, "after_edit")
        end = var(t, arm, rank, step + 1, "after_forward")
        twin_start = var(t, twin, rank, step, "after_edit")
        twin_end = var(t, twin, rank, step + 1, "after_forward")
        seen = (twin_end - (1 - m) * twin_start) / m
        said = (1 - w) * start + w * seen
        unit = np.spacing(end.astype(np.float32)) + np.spacing(twin_end.astype(np.float32)) * w / m
        worst = max(worst, float((np.abs(end - said) / unit).max()))
        whole = min(whole, float((np.abs(start - said) / unit).max()))
        none = min(none, float((np.abs(seen - said) / unit).max()))
        low = int(start.argmin())
        kept.append(float((end[low] - w * seen[low]) / start[low]))
    return {
        "rounding_units": worst,
        "kept_least": min(kept),
        "kept_most": max(kept),
        "rounding_units_if_kept_whole": whole,
        "rounding_units_if_gone": none,
    }


def clip_decays(t: Tables) -> Finding:
    """Is what is left of the edit (1 - momentum) * edit + momentum * batch, to the last bits?"""
    done = edits(t, "sync_clip_all")
    m = t.root_params["momentum"]
    found = decay(t, "sync_clip_all", done, [m] * len(done))
    numbers: dict[str, Any] = {
        "effect": found["rounding_units"],
        "floor": ROUNDINGS,
        "unit": "units in the last place",
        "evidence": found | {"momentum": m, "edits": len(done)},
    }
    told_apart = min(found["rounding_units_if_kept_whole"], found["rounding_units_if_gone"])
    if told_apart < FAULT * ROUNDINGS:
        return unknown(
            f"scenario.momentum={m}, scenario.clip={t.root_params['clip']}: an edit kept whole, "
            f"one that is gone and one averaged in lie {told_apart:.3g} roundings apart; it takes "
            f"{FAULT * ROUNDINGS:g} to tell",
            **numbers,
        )
    if ROUNDINGS < found["rounding_units"] < FAULT * ROUNDINGS:
        return unknown(
            f"{found['rounding_units']:.3g} roundings off: neither that nor clearly otherwise",
            **numbers,
        )
    if found["rounding_units"] <= ROUNDINGS:
        return holds(
            f"after {len(done)} edits the next forward leaves {1 - m:g} of the clipped value plus "
            f"{m:g} of the batch's variance, to {found['rounding_units']:.2g} roundings",
            **numbers,
        )
    return refuted(f"the next forward keeps {found['kept_least']:.3g} of the edit", **numbers)


def clip_lost_off_rank0(t: Tables) -> Finding:
    """Does rank 1's edit still stand when the next forward reaches the layer?"""
    arm = "plain_clip_rank1"
    done = edits(t, arm)
    lost = below = 0
    for r, s in done:
        edited, entered = (
            t.value(arm, "running_var.digest", step=step, phase=phase, rank=r)
            for step, phase in ((s, "after_edit"), (s + 1, "at_layer"))
        )
        lost += edited != entered
        below += lowest(t, arm, r, s + 1, "at_layer") < bound(t)
    evidence = {"edits": len(done), "lost": lost, "below_bound_at_layer": below}
    if lost == len(done):
        return holds(
            f"all {lost} edits on rank 1 are gone before the next forward reaches the layer",
            evidence=evidence,
        )
    say = unknown if lost else refuted
    return say(
        f"{lost} of {len(done)} edits on rank 1 are gone at the next forward", evidence=evidence
    )


def broadcast_overwrites(t: Tables) -> Finding:
    """Do all ranks enter the layer with rank 0's buffers if and only if DDP broadcasts?"""
    on, off = "plain_clip_rank1", "plain_clip_rank1_off"
    edits(t, on)
    last = t.root_params["steps"]
    t.require(off)
    others = t.ranks(on)[1:]
    # Step 0 is left out: all ranks still hold the buffers that DDP handed out when it was built.
    moments = [(step, "before_forward") for step in range(1, last)] + [(last, "checkpoint")]
    copied = own = differed = 0
    for step, before in moments:
        for rank in others:
            zero, mine = bits(t, on, 0, step, before), bits(t, on, rank, step, before)
            kept = bits(t, off, rank, step, before)
            differed += zero != mine and kept != bits(t, off, 0, step, before)
            copied += bits(t, on, rank, step, "at_layer") == zero
            own += bits(t, off, rank, step, "at_layer") == kept
    total = len(moments) * len(others)
    casts = {arm: t.value(arm, "broadcast", step=last, phase="after_eval") for arm in (on, off)}
    evidence = {
        "forwards": total,
        "entered_with_rank0_bits": copied,
        "entered_with_own_bits_without_broadcast": own,
        "differed_before": differed,
        "broadcasts_in_eval_forward": casts[on],
        "broadcasts_in_eval_forward_off": casts[off],
    }
    if differed < total:
        return unknown(
            f"before {total - differed} of {total} forwards the ranks' buffers do not differ: "
            "nothing to overwrite there",
            evidence=evidence,
        )
    if copied == own == total and casts[on] and not casts[off]:
        return holds(
            f"in all {total} forwards after the first, the one in eval mode included, the other "
            "ranks reach the layer with rank 0's bits; with the broadcast off, with their own",
            evidence=evidence,
        )
    return refuted(
        f"rank 0's bits arrive in {copied} of {total} forwards, own bits without broadcast in "
        f"{own}",
        evidence=evidence,
    )


def plain_ranks_agree(t: Tables) -> Finding:
    """Do the ranks of plain BatchNorm under DDP hold the same statistics after a forward?"""
    arm, off = "plain_clip_all", "plain_clip_all_off"
    t.require(arm, off)
    in_motion(t)
    steps = range(t.root_params["steps"])
    equal = {
        name: sum(same_digest(t, a, "running_mean", s, phase) for s in steps)
        for name, a, phase in (
            ("after_forward", arm, "after_forward"),
            ("at_layer", arm, "at_layer"),
            ("after_forward_no_broadcast", off, "after_forward"),
        )
    }
    evidence = {f"steps_equal_{name}": count for name, count in equal.items()}
    evidence["steps"] = len(steps)
    if equal["after_forward"] == len(steps):
        return holds(f"equal bit for bit after each of {len(steps)} forwards", evidence=evidence)
    if equal["after_forward"]:
        return unknown("equal after some forwards only", evidence=evidence)
    return refuted(
        f"different on the ranks after each of {len(steps)} forwards: each averages its own rows "
        f"in; equal at the layer's next entry in {equal['at_layer']}, where rank 0's are copied",
        evidence=evidence,
    )


UNITS = {
    "running_mean": "relative L2 distance",
    "running_var": "distance of the worst channel, relative to variance + eps",
}


def _apart(
    t: Tables, arm: str, to: str, name: str, step: int, *, rank: int = 0, repeat: int = 0
) -> float:
    """Return how far a buffer of the checkpoint is from that of `to`, in `UNITS`.

    The variance goes by its worst channel: in a norm over channels of 1 and 0.001 the quiet one,
    which is what is clipped, would not show.
    """
    import numpy as np

    if name == "running_mean":  # a channel whose mean is nearly 0 has no relative distance
        return t.distance(arm, to, name, step=step, phase="checkpoint", rank=rank, repeat=repeat)
    x = t.snapshot(arm, name, step=step, phase="checkpoint", rank=rank, repeat=repeat)
    y = t.snapshot(to, name, step=step, phase="checkpoint")
    if x.shape != y.shape:
        raise MissingRecord(f"cannot compare tensors of {x.size} and {y.size} values")
    # What the ranks hand around is 1 / sqrt(variance + eps): that is what is rounded.
    eps = t.value(arm, "eps", step=0, phase="layer", rank=rank)
    return float((np.abs(x - y) / (np.abs(y) + eps)).max())


def matches_one_process(t: Tables) -> Finding:
    """Are the ranks' statistics those of one process on the whole batch, up to rounding?"""
    arm, one = "sync_no_clip", "one_process"
    cells(t, arm)
    cells(t, one)
    step = t.root_params["steps"]
    repeats = range(1, t.plan.arm(one).repeats)
    moves = {
        name: [_apart(t, one, one, name, step, repeat=repeat) for repeat in repeats]
        for name in BUFFERS
    }
    # Raises unless some permutation moved some buffer: the rounding has to be at work.
    try:
        permutation_floor([max(pair) for pair in zip(*moves.values(), strict=True)])
    except MissingRecord as error:
        p = t.root_params
        raise MissingRecord(
            f"{error} (scenario.permutations={p['permutations']}, scenario.lr={p['lr']}, "
            f"scenario.batch={p['batch']}, scenario.momentum={p['momentum']})"
        ) from None
    found = []
    for name, distances in moves.items():
        # A buffer whose sums are exact in any order still rounds its result once.
        floor = permutation_floor([max(distance, EPS["float32"]) for distance in distances])
        effect = max(_apart(t, arm, one, name, step, rank=rank) for rank in t.ranks(arm))
        found.append((effect / floor.value, name, effect, floor))
    multiple, name, effect, floor = max(found, key=lambda each: (math.isnan(each[0]), each[0]))
    numbers: dict[str, Any] = {
        "effect": effect,
        "floor": floor.value,
        "unit": UNITS[name],
        "evidence": {
            "buffer": name,
            "permutations": len(floor.values),
            "kernels": "this project's" if t.plan.device == "cpu" else "torch's",
        },
    }
    size = floor.size(effect)
    if size is Size.BETWEEN:
        return unknown(f"{name} is {multiple:.3g} floors off: neither is excluded", **numbers)
    say = holds if size is Size.CLEAN else refuted
    return say(f"{name} is {multiple:.2g} floors off one process", **numbers)
