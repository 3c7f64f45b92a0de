"""What warm-up does to the curvature: it lets the largest eigenvalue fall before steps are long.

The curvature at the start is what the initial weights make it, with warm-up and without. Gradient
descent bears steps up to 2 / (largest eigenvalue of the Hessian): nets that start beyond that and
take the full step at once diverge; during a ramp they move to where the curvature is what the rate
bears. A condition number has no part in it: half of the eigenvalues are negative at the start, and
the ratio of the largest to the middle one grows. From an article that has it fall below 50.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism, symptom
from harness.findings import mean_exceeds, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, unknown

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables, Vector


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/warmup_curvature.yaml."""

    seeds: int = field(metadata=at_least(8))
    warmup: int = field(metadata=at_least(2))
    sigma: float = field(metadata=at_least(0.1))
    lr: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train nets for the length of the warm-up, one for each seed; arms differ in having one."""
    import torch

    draw = rank.generator("nets")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(p.seeds, *shape, generator=draw, dtype=torch.float64)

    x = normal(32, 6)
    y = x[..., :1] + x[..., 1:2].sin()
    shapes = ((6, 6), (6, 6), (6, 6), (6, 1))
    # One row for each net, so that its Hessian is a matrix.
    weights = torch.cat([p.sigma * normal(a * b) / a**0.5 for a, b in shapes], dim=1)
    weights.requires_grad_()
    unit = torch.relu if arm["unit"] == "relu" else torch.tanh

    def losses() -> torch.Tensor:
        hidden, at = x, 0
        for a, b in shapes:
            layer = weights[:, at : at + a * b].view(-1, a, b)
            hidden, at = (unit(hidden) if at else hidden) @ layer, at + a * b
        return torch.mean((hidden - y).square(), dim=(1, 2))

    def eigenvalues() -> torch.Tensor:
        (slope,) = torch.autograd.grad(losses().sum(), weights, create_graph=True)
        rows = [
            torch.autograd.grad(slope[:, i].sum(), weights, retain_graph=True)[0]
            for i in range(weights.shape[1])
        ]
        return torch.Tensor.detach(torch.linalg.eigvalsh(torch.stack(rows, dim=1)))

    rank.snapshot(step=0, eigenvalues=eigenvalues())
    for step in range(p.warmup):
        (slope,) = torch.autograd.grad(losses().sum(), weights)
        rate = p.lr * (step + 1) / p.warmup if arm["warms_up"] else p.lr
        weights.data -= rate * slope
    if arm["warms_up"]:
        rank.snapshot(step=p.warmup, eigenvalues=eigenvalues())


def spectrum(t: Tables, arm: str, moment: str) -> Vector:
    """Return the eigenvalues before or after the warm-up: a row for each seed, ascending."""
    t.require(arm)
    step = 0 if moment == "before" else t.root_params["warmup"]
    return t.snapshot(arm, "eigenvalues", step=step).reshape(t.root_params["seeds"], -1)


@mechanism(REFUTED, settles="A06")
def first_is_smoother(t: Tables) -> Finding:
    """Warm-up lowers the curvature that the first gradient meets."""
    gained = spectrum(t, "at_once", "before")[:, -1] - spectrum(t, "warmed", "before")[:, -1]
    return mean_exceeds(gained.tolist(), 0.0, "largest eigenvalue without, less that with it")


@mechanism(HOLDS, settles="A06")
def ramp_brings_it_down(t: Tables) -> Finding:
    """Nets start with more curvature than the rate bears, and it falls before the ramp ends."""
    before, after = (spectrum(t, "warmed", moment)[:, -1] for moment in ("before", "after"))
    if (beyond := before > 2 / t.root_params["lr"]).mean() < 0.5:
        return unknown("most nets start with less than the rate bears; type a larger sigma")
    falls = (beyond & (after < before)).astype(float)
    return mean_exceeds(falls.tolist(), 0.5, "share of such nets")


@symptom(REFUTED, settles="A31")
def condition_falls(t: Tables) -> Finding:
    """The condition number of the Hessian is above 1000 at the start and below 50 afterwards."""
    import numpy as np

    size = np.abs(spectrum(t, "smooth", "after"))
    condition = np.log10(size.max(axis=1) / size.min(axis=1)).tolist()
    return negated(mean_exceeds(condition, math.log10(50), "log10 of the condition number after"))


@mechanism(HOLDS, settles="~A31")
def ratio_grows(t: Tables) -> Finding:
    """The largest eigenvalue over the middle one grows."""
    import numpy as np

    ratios = [
        np.log2(rows[:, -1] / np.median(np.abs(rows), axis=1))
        for rows in (spectrum(t, "smooth", moment) for moment in ("before", "after"))
    ]
    return mean_exceeds((ratios[1] - ratios[0]).tolist(), 0.0, "log2 of the growth of the ratio")


@mechanism(HOLDS, settles="~A31")
def indefinite(t: Tables) -> Finding:
    """A tenth of the eigenvalues or more are negative at the start: there is no such number."""
    negative = (spectrum(t, "smooth", "before") < 0).mean(axis=1)
    return mean_exceeds(negative.tolist(), 0.1, "share of negative eigenvalues")


SCENARIO = Scenario(
    title="Warm-up lets the largest curvature fall; a condition number has no part in it",
    family="schedule",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        first_is_smoother=("the start is smoother", "the start is as it is without warm-up"),
        ramp_brings_it_down=("the curvature falls during it", "the curvature does not fall"),
        condition_falls=("the condition number falls", "the condition number does not fall"),
    ),
    arms=(
        reference("warmed", "a linear warm-up", ranks=1, unit="relu", warms_up=True),
        control("at_once", "the whole rate at once", ranks=1, unit="relu", warms_up=False),
        control("smooth", "tanh units, warm-up", ranks=1, unit="tanh", warms_up=True),
    ),
    claims=(first_is_smoother, ramp_brings_it_down, condition_falls, ratio_grows, indefinite),
)
