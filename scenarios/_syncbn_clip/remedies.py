"""How each remedy for the clip in `syncbn_clip` is decided: eval forward and checkpoint count."""

from __future__ import annotations

from typing import Any

from harness.floor import FAULT
from harness.scenario import Finding, holds, refuted, unknown
from harness.tables import Tables
from scenarios._syncbn_clip.clip import ROUNDINGS, decay
from scenarios._syncbn_clip.records import (
    bound,
    cells,
    edits,
    lowest,
)


def momentum_none(t: Tables) -> Finding:
    """With momentum=None, does running_var stay at the bound through the next forward?"""
    arm = "sync_momentum_none"
    done = edits(t, arm)
    below = sum(lowest(t, arm, r, s + 1, "after_forward") < bound(t) for r, s in done)
    found = decay(t, arm, done, [1 / (step + 2) for _, step in done])
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
                failures.append(f"the {name} of rank {', '.join(map(str, below))} ({arm})")
    if failures:
        return refuted(f"running_var is below {clip:g} in {'; '.join(failures)}", evidence=evidence)
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
