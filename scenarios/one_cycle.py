"""OneCycleLR is not a linear warm-up followed by a cosine: four differences and a limit.

CosineAnnealingLR is the formula that is printed everywhere. OneCycleLR begins at max_lr / 25 and
not at 0, climbs by a cosine, ends at a 10,000th of where it began, and moves
the momentum the other way; and it raises at the step after the last that it was told of. From an
article that recommends it as its warm-up with a cosine in one line.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/one_cycle.yaml."""

    steps: int = field(metadata=at_least(20))
    lr: float = field(metadata=at_least(1e-6))
    warmup: float = field(metadata=between(0.1, 0.5))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Step a schedule to its end and once more; which schedule it is differs."""
    import torch
    from torch.optim import lr_scheduler

    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=p.lr, momentum=0.9)
    ramp = round(p.warmup * p.steps)
    schedule: Any
    one_cycle: Any
    if arm["schedule"] == "cosine":
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=p.steps - 1)
    elif arm["schedule"] == "ramp_then_cosine":
        rise = lr_scheduler.LinearLR(optimizer, start_factor=1 / ramp, total_iters=ramp - 1)
        fall = lr_scheduler.CosineAnnealingLR(optimizer, T_max=p.steps - ramp)
        schedule = lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[ramp])
    else:
        one_cycle = {"max_lr": p.lr, "total_steps": p.steps, "pct_start": p.warmup}
        schedule = lr_scheduler.OneCycleLR(optimizer, **one_cycle)
    for step in range(p.steps + 1):
        group = optimizer.param_groups[0]
        if step < p.steps:
            rank.log(step=step, lr=group["lr"], momentum=group["momentum"])
        optimizer.step()
        try:
            schedule.step()
        except ValueError as error:
            rank.log(step=step, raised=type(error).__name__)


def follows(t: Tables, arm: str, due: Callable[[int], float]) -> Finding:
    """Decide: the rates of an arm are those of a formula, as shares of the largest."""
    t.require(arm)
    lr, steps = t.root_params["lr"], t.root_params["steps"]
    off = {step: abs(rate / lr - due(step)) for step, rate in t.series(arm, "lr").items()}
    worst = max(off, key=lambda step: off[step])
    reason = f"{arm}: at step {worst} of {steps} the rate is {off[worst]:.2g} of the largest off"
    # torch computes each rate from the one before: rounding adds up over the steps.
    return is_rounding(off[worst], dtype_floor(EPS["float64"] * steps), reason, "of the largest")


def ramp_and_cosine(t: Tables, step: int) -> float:
    """Return the article's schedule: a linear ramp from near 0, then half a cosine to 0."""
    steps = int(t.root_params["steps"])
    ramp = round(t.root_params["warmup"] * steps)
    fall = math.pi * max(0, step - ramp) / (steps - ramp)
    return float(min(1.0, (step + 1) / ramp) * (1 + math.cos(fall)) / 2)


@mechanism(HOLDS, settles="B39")
def cosine_is_formula(t: Tables) -> Finding:
    """CosineAnnealingLR is (1 + cos(pi t / T)) / 2 of the rate."""
    last = t.root_params["steps"] - 1
    return follows(t, "cosine", lambda step: (1 + math.cos(math.pi * step / last)) / 2)


@symptom(REFUTED, settles="B40")
def one_cycle_is_that(t: Tables) -> Finding:
    """OneCycleLR is a linear warm-up with a cosine in one line."""
    return follows(t, "one_cycle", lambda step: ramp_and_cosine(t, step))


@remedy(HOLDS)
def sequential_makes_it(t: Tables) -> Finding:
    """SequentialLR of a LinearLR and a CosineAnnealingLR is."""
    return follows(t, "ramp_then_cosine", lambda step: ramp_and_cosine(t, step))


@mechanism(HOLDS, settles="~B40")
def moves_momentum(t: Tables) -> Finding:
    """OneCycleLR moves the momentum as well, which the other schedules leave alone."""
    t.require("one_cycle", "ramp_then_cosine")
    ones, others = (t.series(a, "momentum").values() for a in ("one_cycle", "ramp_then_cosine"))
    reason = f"between {min(ones):g} and {max(ones):g}; {min(others):g} to {max(others):g} by hand"
    return (holds if len(set(ones)) > 1 == len(set(others)) else refuted)(reason)


@mechanism(HOLDS, settles="~B40")
def raises_at_the_end(t: Tables) -> Finding:
    """OneCycleLR raises where the training goes on for one update more; the others do not."""
    t.require("one_cycle", "ramp_then_cosine")
    raises = [t.has(arm, "raised") for arm in ("one_cycle", "ramp_then_cosine")]
    reason = f"OneCycleLR raises: {raises[0]}; SequentialLR: {raises[1]}"
    return (holds if raises == [True, False] else refuted)(reason)


SCENARIO = Scenario(
    title="OneCycleLR is no linear warm-up with a cosine, and it moves the momentum",
    family="schedule",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        one_cycle_is_that=("OneCycleLR is warm-up and cosine", "OneCycleLR is another curve"),
        moves_momentum=("it moves the momentum", "it leaves the momentum alone"),
        sequential_makes_it=("SequentialLR is what was meant", "nor is SequentialLR"),
    ),
    arms=(
        reference("ramp_then_cosine", "SequentialLR", ranks=1, schedule="ramp_then_cosine"),
        control("cosine", "CosineAnnealingLR", ranks=1, schedule="cosine"),
        control("one_cycle", "OneCycleLR", ranks=1, schedule="one_cycle"),
    ),
    claims=(
        cosine_is_formula,
        one_cycle_is_that,
        sequential_makes_it,
        moves_momentum,
        raises_at_the_end,
    ),
    plots=(Plot(metric="lr", title="Learning rate"),),
)
