"""How clip_allreduce judges traffic and cost: exact counts; time only where it is far off."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from harness.errors import MissingRecord
from harness.scenario import Finding, holds, refuted, unknown
from harness.tables import Tables
from scenarios._clip_allreduce.records import (
    ORDERED,
    SHARDED,
    cosine_between,
    counted,
    skipped,
)

COUNTED = "collectives"
FEWEST_STEPS = 10
TIMED = ("timed_ddp", "timed_fsdp1", "timed_fsdp2")
HALF = 0.5
"""Share at which the clip takes as long as backward."""


def _check_counter(t: Tables) -> None:
    """The control: one all-reduce put inside the clip has to be counted once, on every rank."""
    for norm, metric, right in (
        *((norm, "clip_ops", "all_reduce") for norm in ORDERED),
        *((norm, "clip_bytes", 8) for norm in ORDERED),
    ):
        got = set(counted(t, "ddp_reduced", [norm], metric))
        if got != {right}:
            raise MissingRecord(
                f"the counter is not to be trusted: with one explicit all-reduce of 8 bytes inside "
                f"the clip ({norm}) it shows {metric} {sorted(map(str, got))}"
            )
    if not all(counted(t, "ddp", ORDERED, "sync_collectives")):
        raise MissingRecord("the counter is not to be trusted: it saw no all-reduce in backward")


def ddp_reduces_the_norm(t: Tables) -> Finding:
    """Count the collectives inside clip_grad_norm_ under DDP."""
    _check_counter(t)
    counts = counted(t, "ddp", ORDERED, "clip_collectives")
    evidence = {
        "clip_bytes": sum(counted(t, "ddp", ORDERED, "clip_bytes")),
        "backward_bytes": max(counted(t, "ddp", ORDERED, "sync_bytes")),
        "control_collectives": max(counted(t, "ddp_reduced", ORDERED, "clip_collectives")),
    }
    numbers: dict[str, Any] = {"effect": float(max(counts)), "unit": COUNTED, "evidence": evidence}
    if min(counts) > 0:
        return holds(f"{min(counts)} or more collectives in every call", **numbers)
    if max(counts) > 0:
        return unknown("some calls send something and some do not", **numbers)
    return refuted(
        "0 collectives and 0 bytes inside clip_grad_norm_ for L1, L2 and inf on every rank; "
        "the control's one explicit all-reduce is counted as 1",
        **numbers,
    )


def value_clip_is_silent(t: Tables) -> Finding:
    """Count the collectives inside clip_grad_value_, replicated and sharded."""
    _check_counter(t)
    counts = {arm: max(counted(t, arm, ["value"], "clip_collectives")) for arm in ("ddp", *SHARDED)}
    numbers: dict[str, Any] = {
        "effect": float(max(counts.values())),
        "unit": COUNTED,
        "evidence": counts,
    }
    if any(counts.values()):
        return refuted("clip_grad_value_ does send something", **numbers)
    return holds("0 collectives under DDP, FSDP1, fully_shard and mixtures", **numbers)


def value_clip_saves_traffic(t: Tables) -> Finding:
    """Compare what the two kinds of clipping send under DDP."""
    _check_counter(t)
    norm = max(counted(t, "ddp", ORDERED, "clip_collectives"))
    saved = norm - max(counted(t, "ddp", ["value"], "clip_collectives"))
    before = t.snapshot("one_process", "grad", step=1, phase="L2")
    after = t.snapshot("one_process", "grad", step=3, phase="value")
    turned = cosine_between(before, after)
    numbers: dict[str, Any] = {
        "effect": float(saved),
        "unit": "collectives saved a step",
        "evidence": {
            "cosine": turned,
            "saved_when_sharded": max(counted(t, "fsdp2", ["L2"], "clip_collectives")),
            "saved_bytes_when_sharded": max(counted(t, "fsdp2", ["L2"], "clip_bytes")),
        },
    }
    if saved > 0:
        return holds(f"{saved} collectives fewer a step", **numbers)
    if turned > 1 - 1e-6:
        return refuted("nothing to save under DDP", **numbers)
    return refuted(
        f"nothing to save under DDP, and the gradient turns: its cosine to what it was is "
        f"{turned:.2f}, while a norm clip keeps the direction",
        **numbers,
    )


def sharded_norm_is_one_all_reduce(t: Tables) -> Finding:
    """Count the collectives inside the norm clip of sharded gradients."""
    _check_counter(t)
    evidence: dict[str, Any] = {}
    right, most = True, 0
    for arm in SHARDED:
        ops = counted(t, arm, ORDERED, "clip_ops")
        right &= set(ops) == {"all_reduce"}
        sizes = {
            norm: max(counted(t, arm, [norm], "clip_bytes"))
            for norm in ORDERED
            if not skipped(t, arm, norm)
        }
        most = max(most, *sizes.values())
        evidence[f"{arm}_bytes"] = ", ".join(f"{norm} {size}" for norm, size in sizes.items())
        evidence[f"{arm}_ops"] = " / ".join(sorted({str(op) or "none" for op in ops}))
        evidence[f"{arm}_backward_bytes"] = max(counted(t, arm, ORDERED, "sync_bytes"))
    evidence["fsdp2_by_layer"] = max(counted(t, "fsdp2", ["layer"], "clip_collectives"))
    evidence["parameter_tensors"] = max(counted(t, "fsdp2", ["layer"], "tensors"))
    numbers: dict[str, Any] = {"effect": float(most), "unit": "bytes a call", "evidence": evidence}
    if not right:
        return refuted("another number of collectives than one all-reduce", **numbers)
    without = [arm for arm in SHARDED if any(skipped(t, arm, norm) for norm in ORDERED)]
    left_out = f" (inf left out in {', '.join(without)}: an empty shard)" if without else ""
    return holds(
        f"exactly one all-reduce of at most {most} bytes for L1, L2 and inf{left_out}, under "
        "FSDP1, fully_shard, HSDP and mixtures; clipping layer by layer takes "
        f"{evidence['fsdp2_by_layer']} for {evidence['parameter_tensors']} parameters",
        **numbers,
    )


def traffic_grows_with_the_model(t: Tables) -> Finding:
    """Compare the bytes of the clip at two widths, beside those of backward."""
    evidence: dict[str, Any] = {}
    clip_grows, sync_grows = False, True
    for arm in TIMED:
        t.require(arm)
        for mode in ("foreach", "loop"):
            for rank in t.ranks(arm):
                clip, sync = (
                    [
                        t.value(arm, metric, step=step, phase=f"{width} {mode}", rank=rank)
                        for step, width in enumerate(("narrow", "wide"))
                    ]
                    for metric in ("clip_bytes", "sync_bytes")
                )
                clip_grows |= clip[1] > clip[0]
                sync_grows &= sync[1] > sync[0]
            evidence[f"{arm}_{mode}"] = (
                f"clip {clip[0]} -> {clip[1]}, backward {sync[0]} -> {sync[1]} bytes"
            )
    evidence["parameters"] = t.value(arm, "parameters", step=1, phase="wide foreach")
    share = clip[1] / (clip[1] + sync[1])
    numbers: dict[str, Any] = {"effect": share, "unit": "share of the bytes", "evidence": evidence}
    if not sync_grows:
        return unknown("backward's own traffic did not grow with the width", **numbers)
    if clip_grows:
        return holds("a wider model sends more inside the clip", **numbers)
    return refuted(
        "twice the width leaves the clip's bytes as they are while backward's grow; under "
        f"fully_shard they are {clip[1]} of {clip[1] + sync[1]} bytes",
        **numbers,
    )


def clip_takes_as_long_as_backward(t: Tables) -> Finding:
    """Compare times under DDP by their intervals; the shares of the others are evidence only."""
    evidence: dict[str, Any] = {}
    shares: list[Share] = []
    for arm in TIMED:
        t.require(arm)
        for mode in ("foreach", "loop") if arm != "timed_fsdp1" else ("foreach",):
            by_rank = [_share(t, arm, mode, rank) for rank in t.ranks(arm)]
            slowest = max(by_rank, key=lambda share: share.median)
            name = f"{arm.removeprefix('timed_')}_{mode}"
            evidence[name] = (
                f"{slowest.median:.1%} ({slowest.low:.1%} to {slowest.high:.1%}), "
                f"{slowest.of_step:.1%} of the whole step, {slowest.clip_us:.0f} us"
            )
            shares += by_rank if arm == "timed_ddp" else []
    steps = len(t.series("timed_ddp", "clip_s", phase="foreach"))
    width = t.value("timed_ddp", "parameters", step=1, phase="wide foreach")
    worst = max(share.median for share in shares)
    numbers: dict[str, Any] = {
        "effect": worst,
        "unit": "share of backward + clip",
        "evidence": evidence | {"steps": steps, "parameters": width},
    }
    if steps < FEWEST_STEPS:
        return unknown(f"{steps} timed steps give no interval, it takes {FEWEST_STEPS}", **numbers)
    step = max(share.of_step for share in shares)
    text = (
        f"a median of {worst:.1%} of backward, its all-reduce and the clip, on the slowest rank; "
        f"{step:.1%} of the step (forward, backward, clip, optimizer)"
    )
    if all(share.high < HALF for share in shares):
        return refuted(text, **numbers)
    if all(share.low > HALF for share in shares):
        return holds(text, **numbers)
    return unknown(f"{text}: the interval lies on both sides of one half", **numbers)


@dataclass(frozen=True, kw_only=True)
class Share:
    """Clip over backward + clip on one rank: median and its 95 % interval, from the order."""

    low: float
    median: float
    high: float
    of_step: float
    """Median of clip over forward + backward + clip + optimizer."""
    clip_us: float
    """Median, microseconds."""


def _share(t: Tables, arm: str, mode: str, rank: int) -> Share:
    forward, backward, clip, optimizer = (
        t.series(arm, metric, phase=mode, rank=rank)
        for metric in ("forward_s", "backward_s", "clip_s", "optimizer_s")
    )
    shares = sorted(clip[step] / (clip[step] + backward[step]) for step in clip)
    count = len(shares)
    # 1.96 standard deviations of a binomial(count, 1/2): the ranks that enclose the median.
    reach = 0.98 * math.sqrt(count)
    return Share(
        low=shares[max(0, math.floor(count / 2 - reach))],
        median=shares[count // 2],
        high=shares[min(count - 1, math.ceil(count / 2 + reach))],
        of_step=statistics.median(
            clip[step] / (clip[step] + backward[step] + forward[step] + optimizer[step])
            for step in clip
        ),
        clip_us=1e6 * statistics.median(clip.values()),
    )
