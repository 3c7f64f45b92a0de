"""A drop of the learning rate: the loss falls at once and stays down; there is no V to be avoided.

With a large learning rate the loss hovers above what the weights could reach, by the noise of the
mini-batches. A lower rate takes that noise away within a few steps; only a rate that goes UP again
brings it back, and makes a V. A cosine to 0.8, an article's remedy for the V, keeps the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import mean_exceeds, says
from harness.scenario import Arm, Finding, Scenario, at_least, one_of
from scenarios._digits import Digits, digits, prerequisite

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables, Vector


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/lr_cliff.yaml."""

    scale: str = field(metadata=one_of("toy", "real"))
    seeds: int = field(metadata=at_least(8))
    steps: int = field(metadata=at_least(40))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))


def rate(schedule: str, part: float) -> float:
    """Return the share of the full rate at this part of the run: the only thing that differs."""
    warmed_up = min(1.0, part / 0.1)
    if part < 0.5 or schedule == "constant":
        return warmed_up
    if schedule == "cliff" or (schedule == "cliff_and_back" and part < 0.75):
        return 0.1
    if schedule == "cosine_to_0.8":
        return 0.8 + 0.1 * (1 + math.cos(2 * math.pi * (part - 0.5)))
    return 1.0


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train nets side by side, one for each seed; the schedule differs."""
    import torch

    draw = rank.generator("nets")
    x = torch.randn(1024, 8, generator=draw, dtype=torch.float64)
    score = x[:, :4] + 1.5 * x[:, 4:] * x[:, :4].roll(1, dims=1)
    y = (score + torch.randn(1024, 4, generator=draw)).argmax(dim=1)
    rows = Digits(train_x=x[:512], train_y=y[:512], test_x=x[512:], test_y=y[512:])
    if p.scale == "real":
        rows = digits()
    widths = (rows.train_x.shape[1], 16, int(rows.train_y.max()) + 1)
    drawn = (torch.randn(p.seeds, a, b, generator=draw) / a**0.5 for a, b in pairwise(widths))
    layers = [layer.double().requires_grad_() for layer in drawn]

    def losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = torch.tanh(x @ layers[0]) @ layers[1]
        chosen = scores.log_softmax(dim=-1).gather(-1, y.expand(p.seeds, -1)[..., None])
        return torch.mean(-chosen, dim=(1, 2))

    for step in range(p.steps + 1):
        if step % 10 == 0 or step == p.steps:
            rank.snapshot(step=step, held_out=losses(rows.test_x, rows.test_y))
        batch = torch.randint(len(rows.train_x), (p.seeds, p.batch), generator=draw)
        loss = losses(rows.train_x[batch], rows.train_y[batch]).sum()
        gradients = torch.autograd.grad(loss, layers)
        for layer, gradient in zip(layers, gradients, strict=True):
            layer.data -= p.lr * rate(arm["schedule"], step / p.steps) * gradient


def held_out(t: Tables, arm: str, step: int | None = None) -> Vector:
    """Return the logarithm of each seed's held-out loss, which has no tail; by default the last."""
    import numpy as np

    t.require(arm)
    return np.log(t.snapshot(arm, "held_out", step=step or t.root_params["steps"]))


def rises_again(t: Tables, arm: str) -> Finding:
    """Decide: after the drop the loss goes through a minimum and comes up to the end."""
    t.require(arm)
    recorded = t.series(arm, "held_out.digest")
    after = [step for step in recorded if step >= t.root_params["steps"] / 2]
    lowest = min(after, key=lambda step: float(held_out(t, arm, step).mean()))
    rise = held_out(t, arm) - held_out(t, arm, lowest)
    return mean_exceeds(rise.tolist(), 0.0, f"rise of log loss of {arm} since step {lowest}")


def lower(t: Tables, arm: str, than: str) -> Finding:
    """Decide: the loss of one arm ends below that of another."""
    gained = held_out(t, than) - held_out(t, arm)
    return mean_exceeds(gained.tolist(), 0.0, f"log loss of {than} less that of {arm}")


@symptom(REFUTED, settles="A29")
def drop_makes_v(t: Tables) -> Finding:
    """The drop of the learning rate makes a V-shaped valley in the loss."""
    return rises_again(t, "cliff")


@mechanism(HOLDS, settles="~A29")
def rise_makes_v(t: Tables) -> Finding:
    """A valley is what a rate makes that goes up again."""
    return rises_again(t, "cliff_and_back")


@symptom(HOLDS)
def drop_helps(t: Tables) -> Finding:
    """The drop takes the loss below what the full rate reaches."""
    return lower(t, "cliff", "constant")


@remedy(REFUTED, settles="A38")
def cosine_trains_faster(t: Tables) -> Finding:
    """A cosine down to 0.8 of the rate trains faster than the drop."""
    return lower(t, "cosine_to_0.8", "cliff")


SCENARIO = Scenario(
    title="A drop of the learning rate makes no V: the loss falls and stays down",
    family="schedule",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    check=lambda p, ranks: prerequisite(p.scale),
    differs=("rate",),
    headline=says(
        drop_makes_v=("the drop makes a V", "the drop makes no V"),
        rise_makes_v=("going up again does", "nor does going up again"),
        cosine_trains_faster=("a cosine to 0.8 is faster", "a cosine to 0.8 is not faster"),
    ),
    arms=(
        reference("constant", "the full rate", ranks=1, schedule="constant"),
        control("cliff", "a tenth of it", ranks=1, schedule="cliff"),
        control("cliff_and_back", "and up again", ranks=1, schedule="cliff_and_back"),
        control("cosine_to_0.8", "a cosine", ranks=1, schedule="cosine_to_0.8"),
    ),
    claims=(drop_makes_v, rise_makes_v, drop_helps, cosine_trains_faster),
)
