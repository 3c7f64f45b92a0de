"""How each claim of `syncbn_clip` is decided from the records: bit for bit wherever it can be."""

from __future__ import annotations

import math
import struct
from itertools import pairwise
from typing import Any

from harness.errors import MissingRecord
from harness.floor import EPS, FAULT, Size, permutation_floor
from harness.scenario import Finding, holds, refuted, unknown
from harness.tables import Tables

BUFFERS = ("running_mean", "running_var")
PHASES = (
    "before_forward",
    "at_layer",
    "after_forward",
    "after_backward",
    "after_step",
    "after_edit",
)
"""Of a training step, in order; `at_layer` is where the buffers reach the norm layer itself."""
SYNC = ("sync_no_clip", "sync_clip_all")
Cell = tuple[int, int]
"""(rank, step)."""


def bits(t: Tables, arm: str, rank: int, step: int, phase: str) -> tuple[Any, ...]:
    """Return what identifies both buffers bit for bit at one moment."""
    return tuple(
        t.value(arm, f"{name}.digest", step=step, phase=phase, rank=rank) for name in BUFFERS
    )


def var(t: Tables, arm: str, rank: int, step: int, phase: str) -> Any:
    """Return running_var as float64 values of exact float32 numbers."""
    return t.snapshot(arm, "running_var", step=step, phase=phase, rank=rank)


def lowest(t: Tables, arm: str, rank: int, step: int, phase: str) -> float:
    """Return the smallest running_var of any channel; a NaN counts as lower than everything."""
    value = float(t.value(arm, "running_var.min", step=step, phase=phase, rank=rank))
    return -math.inf if math.isnan(value) else value


def bound(t: Tables) -> float:
    """Return the clip bound as the buffer's dtype rounds it."""
    (value,) = struct.unpack("<f", struct.pack("<f", t.root_params["clip"]))
    return float(value)


def cells(t: Tables, arm: str) -> list[Cell]:
    """Return every (rank, step) of training.

    Raises:
        MissingRecord: if a rank did not come to its end, or a buffer did not stay finite.
    """
    t.require(arm)
    found = [(rank, step) for rank in t.ranks(arm) for step in range(t.root_params["steps"])]
    for rank, step in found:
        for name in BUFFERS:
            if t.value(arm, f"{name}.nonfinite", step=step, phase="after_forward", rank=rank):
                raise MissingRecord(
                    f"arm {arm}: {name} is not finite after the forward of step {step} on rank "
                    f"{rank}, which says nothing about who writes it; scenario.lr="
                    f"{t.root_params['lr']} or scenario.quiet={t.root_params['quiet']} is too large"
                )
    return found


def changes(t: Tables, *arms: str) -> dict[str, int]:
    """Return for each phase in how many (arm, rank, step) the buffers changed during it."""
    found = dict.fromkeys(PHASES[1:], 0)
    for arm in arms:
        for rank, step in cells(t, arm):
            for before, phase in pairwise(PHASES):
                was, now = (bits(t, arm, rank, step, at) for at in (before, phase))
                found[phase] += was != now
    return found


def in_motion(t: Tables) -> None:
    """Check that the layer, left alone, moves its buffers.

    Raises:
        MissingRecord: if not; then neither stillness nor agreement says anything.
    """
    if not any(changes(t, "sync_no_clip").values()):
        raise MissingRecord(
            f"scenario.momentum={t.root_params['momentum']}: running statistics never move, "
            "whatever is done to them; take a value between 0 and 1"
        )


def edits(t: Tables, arm: str) -> list[Cell]:
    """Return the (rank, step) at which the clip changed running_var and a forward follows.

    Raises:
        MissingRecord: if there is none, or if the layer itself keeps nothing of an edit.
    """
    clip, momentum = t.root_params["clip"], t.root_params["momentum"]
    in_motion(t)
    if momentum == 1.0:
        raise MissingRecord(
            f"scenario.momentum={momentum}: the layer keeps nothing of the old value, so its own "
            "update cannot be told from another writer's; take a value between 0 and 1"
        )
    done, smallest = [], math.inf
    for rank, step in cells(t, arm):
        smallest = min(smallest, lowest(t, arm, rank, step, "after_step"))
        was, now = (bits(t, arm, rank, step, phase) for phase in ("after_step", "after_edit"))
        if was != now and step + 1 < t.root_params["steps"]:
            done.append((rank, step))
    if not done:
        raise MissingRecord(
            f"scenario.clip={clip} edits nothing: running_var is never below {smallest:.3g} in "
            f"arm {arm}; take a bound above that"
        )
    return done


def same_digest(t: Tables, arm: str, metric: str, step: int, phase: str) -> bool:
    """Say whether all ranks of an arm hold the same bits at one moment."""
    found = {
        t.value(arm, f"{metric}.digest", step=step, phase=phase, rank=rank) for rank in t.ranks(arm)
    }
    return len(found) == 1


def counted(t: Tables, arm: str, op: str, phase: str) -> list[int]:
    """Return how many collectives of a kind each rank issued in a phase, in each counted step."""
    return [
        count
        for rank in t.ranks(arm)
        for count in t.series(arm, op, phase=phase, rank=rank).values()
    ]


# Where the buffers change, and who changes them -------------------------------------------------


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


def _decay(t: Tables, arm: str, done: list[Cell], weights: list[float]) -> dict[str, float]:
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
    found = _decay(t, "sync_clip_all", done, [m] * len(done))
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


def momentum_none(t: Tables) -> Finding:
    """With momentum=None, does running_var stay at the bound through the next forward?"""
    arm = "sync_momentum_none"
    done = edits(t, arm)
    below = sum(lowest(t, arm, r, s + 1, "after_forward") < bound(t) for r, s in done)
    found = _decay(t, arm, done, [1 / (step + 2) for _, step in done])
    evidence = found | {"edits": len(done), "below_bound_after_next_forward": below}
    last = t.root_params["steps"]
    evidence["lowest_checkpoint"] = min(
        lowest(t, arm, rank, last, "checkpoint") for rank in t.ranks(arm)
    )
    if found["rounding_units"] >= FAULT * ROUNDINGS:
        return unknown(
            f"arm {arm} did not average as momentum=None does: {found['kept_least']:.3g} to "
            f"{found['kept_most']:.3g} of the edit are left, which is "
            f"{found['rounding_units']:.3g} roundings off 1 - 1/n",
            evidence=evidence,
        )
    if not below:
        return holds(
            f"running_var stays at the bound after all {len(done)} edits", evidence=evidence
        )
    if below < len(done):
        return unknown(f"{below} of {len(done)} edits fall below the bound", evidence=evidence)
    return refuted(
        f"all {below} edits are below the bound after the next forward: batch n keeps 1 - 1/n of "
        f"the clipped value ({found['kept_least']:.3g} to {found['kept_most']:.3g} here)",
        evidence=evidence,
    )


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


# Remedies for the clip --------------------------------------------------------------------------


def keeps_bound(t: Tables, arms: tuple[str, ...]) -> Finding:
    """Is running_var at or above the bound on every rank, in its checkpoint and in eval?"""
    t.require(*arms)
    last, clip = t.root_params["steps"], t.root_params["clip"]
    needy = "sync_no_clip"
    cells(t, needy)
    without = max(lowest(t, needy, rank, last, "checkpoint") for rank in t.ranks(needy))
    if without >= bound(t):
        return unknown(
            f"scenario.clip={clip} needs no remedy: without one running_var is {without:.3g} or "
            "more; take a bound above that"
        )
    faulty = "sync_clip_all"
    cells(t, faulty)
    again = max(lowest(t, faulty, rank, last - 1, "after_forward") for rank in t.ranks(faulty))
    if again >= bound(t):
        return unknown(
            f"scenario.momentum={t.root_params['momentum']} takes nothing off a clip: running_var "
            f"is still {again:.3g} after the next forward, so nothing needs a remedy"
        )
    evidence: dict[str, Any] = {"bound": bound(t), "lowest_without": without}
    evidence["lowest_after_next_forward"] = again
    failures = []
    for arm in arms:
        for name, phase in (("checkpoint", "checkpoint"), ("eval", "at_layer")):
            low = [lowest(t, arm, rank, last, phase) for rank in t.ranks(arm)]
            below = [rank for rank, value in enumerate(low) if value < bound(t)]
            evidence[f"{arm}.lowest_{name}"] = min(low)
            evidence[f"{arm}.ranks_below_{name}"] = len(below)
            if below:
                failures.append(f"{arm}: {name} of rank {', '.join(map(str, below))}")
    if failures:
        return refuted(
            f"running_var is below {clip:g} in the {'; '.join(failures)}", evidence=evidence
        )
    return holds(
        f"running_var is at least {clip:g} on all ranks, in the checkpoint and in the eval "
        f"forward ({', '.join(arms)})",
        evidence=evidence,
    )


def forward_hook_on_plain(t: Tables) -> Finding:
    """`keeps_bound`, unless backward refuses a buffer that was written after forward saved it."""
    arm = "plain_forward_hook"
    t.require(arm)
    raised = {
        rank: t.last(arm, "error", phase="raised", rank=rank)
        for rank in t.ranks(arm)
        if t.has(arm, "error", rank=rank)
    }
    if not raised:
        return keeps_bound(t, (arm,))
    clipped = [lowest(t, arm, rank, 0, "after_forward") >= bound(t) for rank in t.ranks(arm)]
    if not all(clipped):
        return unknown("the hook has not clipped when backward begins")
    error = next(iter(raised.values()))
    evidence = {"ranks_raised": len(raised), "ranks": len(t.ranks(arm)), "error": error}
    if len(raised) < len(t.ranks(arm)):
        return unknown("backward raises on some ranks and not on others", evidence=evidence)
    if not all("modified by an inplace operation" in text for text in raised.values()):
        return unknown(f"it raises, but not because of the clip: {error}", evidence=evidence)
    return refuted(
        f"backward raises on all {len(raised)} ranks: plain BatchNorm saved the running_var that "
        "the hook then writes; SyncBatchNorm does not",
        evidence=evidence,
    )


def raise_eps(t: Tables) -> Finding:
    """`keeps_bound`, with what raising eps does do: it bounds the denominator."""
    arm = "sync_eps"
    finding = keeps_bound(t, (arm,))
    if f"{arm}.lowest_eval" not in finding.evidence:
        return finding
    found = {t.value(arm, "eps", step=0, phase="layer", rank=rank) for rank in t.ranks(arm)}
    if found != {t.root_params["clip"]}:
        return unknown(f"eps is {sorted(found)} in arm {arm}, not the bound")
    under = float(finding.evidence[f"{arm}.lowest_eval"] or 0.0) + max(found)
    return Finding(
        outcome=finding.outcome,
        reason=f"{finding.reason}; what eval divides by, running_var + eps, is {under:.3g} or more",
        evidence=dict(finding.evidence) | {"lowest_var_plus_eps": under},
    )
