"""Batch norm cast to half: its running variance stops where the step is below an ulp.

A moving average adds momentum * (new - old). In bfloat16 that is less than the way to the next
number long before old has reached new, and the average stands still; float16 also ends at 65504, so
that a standard deviation of 300 makes running_var infinite and every output 0 in evaluation.
Autocast keeps the buffers in float32: an article blames mixed precision as such.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, is_rounding, negated, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/bn_half_stats.yaml."""

    steps: int = field(metadata=at_least(200))
    rows: int = field(metadata=at_least(8))
    channels: int = field(metadata=at_least(1))
    momentum: float = field(metadata=between(0.01, 0.1))
    std: float = field(metadata=between(1.1, 10.0))
    large_std: float = field(metadata=between(280.0, 1000.0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Show one batch again and again; in which dtype the norm keeps its buffers is what differs."""
    import torch
    from torch import nn

    draw = rank.generator("rows")
    x = torch.randn(p.rows, p.channels, generator=draw).to(rank.device)
    x = (x - x.mean(dim=0)) / x.std(dim=0) * (p.large_std if arm["large"] else p.std)
    norm = nn.BatchNorm1d(p.channels, momentum=p.momentum).to(rank.device)
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(arm["x"], torch.float32)
    if arm["cast"] == "module":
        norm.to(dtype)
    x = x.to(dtype)
    due = torch.ones(p.channels, dtype=torch.float64, device=rank.device)
    for step in range(p.steps):
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=arm["cast"] == "autocast"):
            norm(x)
        assert norm.running_var is not None
        due = (1.0 - p.momentum) * due + p.momentum * x.double().var(dim=0)
        if step % 20 == 0 or step == p.steps - 1:
            rank.log(step=step, running_var=norm.running_var[0], due=due[0])
    assert norm.running_var is not None
    rank.log(
        step=p.steps,
        not_finite=int((~norm.running_var.isfinite()).sum()),
        all_zero=int((norm.eval()(x) == 0).all()),
        dtype=str(norm.running_var.dtype),
        target=x.double().var(dim=0)[0],
    )


def off(t: Tables, arm: str) -> Finding:
    """Decide: the running variance ends where the average of its inputs in float64 ends."""
    t.require(arm)
    last, due = t.last(arm, "running_var"), t.last(arm, "due")
    # An average over 1 / momentum batches is rounded about as often.
    floor = dtype_floor(EPS["float32"] / t.root_params["momentum"])
    reason = f"running_var of {arm}, {t.last(arm, 'dtype')}, ends at {last:.4g}, due {due:.4g}"
    return is_rounding(abs(last / due - 1.0), floor, reason, "share of the variance")


def stalls(t: Tables, arm: str, eps: float) -> Finding:
    """Decide: the average stands still short of its target, a step being less than an ulp."""
    t.require(arm)
    *_, before, last = t.series(arm, "running_var").values()
    step = t.root_params["momentum"] * (t.last(arm, "target") - last)
    ulp = eps * 2.0 ** math.floor(math.log2(last))
    reason = f"{arm} stands at {last:.4g}: the next step, {step:.2g}, is {step / ulp:.2g} ulp"
    still = before == last and 0.0 < step < ulp
    return (holds if still else refuted)(reason, effect=step / ulp, unit="ulp")


@symptom(REFUTED, settles="A03")
def autocast_endangers_it(t: Tables) -> Finding:
    """Mixed precision by autocast makes running_var inexact."""
    return negated(off(t, "autocast"))


@symptom(HOLDS, settles="A03")
def cast_module_stops_short(t: Tables) -> Finding:
    """A batch norm cast to half has another running_var than one in float32, for ever."""
    return all_of(negated(off(t, "bfloat16")), negated(off(t, "float16")))


@mechanism(HOLDS)
def step_is_below_an_ulp(t: Tables) -> Finding:
    """It stands still where momentum times the distance is less than to the next number."""
    eps = {"bfloat16": EPS["bfloat16"], "float16": EPS["float16"]}
    return all_of(*(stalls(t, arm, size) for arm, size in eps.items()))


@symptom(HOLDS)
def float16_overflows(t: Tables) -> Finding:
    """From a deviation of 256 on, float16 has running_var overflow, and evaluation return zeros."""
    infinite = counts(t, "float16_large", "not_finite", t.root_params["channels"], "infinities")
    return all_of(infinite, counts(t, "float16_large", "all_zero", 1, "evaluation of zeros only"))


@remedy(HOLDS)
def norm_kept_in_float32(t: Tables) -> Finding:
    """Under autocast, or with the norms of a cast model left in float32, the average is exact."""
    return all_of(*(off(t, arm) for arm in ("float32", "autocast", "norm_in_float32")))


SCENARIO = Scenario(
    title="A batch norm cast to half: its running variance stands still, or overflows",
    family="buffers",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        cast_module_stops_short=("cast to half, running_var stops short", "half is exact"),
        float16_overflows=("or overflows", "and never overflows"),
        autocast_endangers_it=("so it does under autocast", "autocast does it no harm"),
    ),
    arms=(
        reference("float32", "float32", ranks=1, cast="no", x="float32", large=False),
        fixed("autocast", "autocast", ranks=1, cast="autocast", x="bfloat16", large=False),
        faulty("bfloat16", "norm.bfloat16()", ranks=1, cast="module", x="bfloat16", large=False),
        faulty("float16", "norm.half()", ranks=1, cast="module", x="float16", large=False),
        faulty("float16_large", "norm.half()", ranks=1, cast="module", x="float16", large=True),
        fixed("norm_in_float32", "float norm", ranks=1, cast="no", x="bfloat16", large=False),
    ),
    claims=(
        autocast_endangers_it,
        cast_module_stops_short,
        step_is_below_an_ulp,
        float16_overflows,
        norm_kept_in_float32,
    ),
)
