"""Warm-up and the size of the initial weights: the larger the weights, the longer it has to be.

Near the edge of stability a net whose first steps are too long for the curvature it starts with
ends in NaN or with dead units; a linear warm-up lets the curvature fall first. Large weights start
with large curvature, so that they need the warm-up, and small ones none. An article computes the
length as one over the variance of the weights, the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, mean_exceeds, says
from harness.scenario import Arm, Finding, Scenario, at_least, between

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/warmup_sigma.yaml."""

    seeds: int = field(metadata=at_least(8))
    steps: int = field(metadata=at_least(50))
    warmups: tuple[int, ...] = field(metadata=at_least(0))
    lr: float = field(metadata=at_least(1e-6))
    good: float = field(metadata=between(0.01, 0.9))


def check(p: Params, ranks: int) -> list[str]:
    """The first run is without warm-up, and each later one has a longer one, which ends."""
    rising = list(p.warmups) == sorted(set(p.warmups)) and len(p.warmups) > 1
    if rising and p.warmups[0] == 0 and p.warmups[-1] < p.steps:
        return []
    return [
        f"scenario.warmups={list(p.warmups)} do not rise from 0 to below {p.steps} steps; "
        "type 'scenario.warmups=[0,20,80]'"
    ]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train nets side by side, one for each seed and warm-up; the size of the weights differs."""
    import torch

    draw = rank.generator("nets")

    def normal(*shape: int) -> torch.Tensor:
        # The same for all warm-ups of a seed.
        each = torch.randn(p.seeds, 1, *shape, generator=draw, dtype=torch.float64)
        return each.repeat(1, len(p.warmups), *[1] * len(shape)).flatten(0, 1).to(rank.device)

    x = normal(32, 8)
    y = x @ normal(8, 1) / 8**0.5 + x[..., :1] * x[..., 1:2]
    y = (y - y.mean(dim=1, keepdim=True)) / y.std(dim=1, keepdim=True)
    widths = ((8, 16), (16, 16), (16, 16), (16, 1))
    layers = [arm["sigma"] * normal(*w) / w[0] ** 0.5 for w in widths]
    layers = [layer.requires_grad_() for layer in layers]
    warmup = torch.tensor(p.warmups, device=rank.device).repeat(p.seeds)[:, None, None]
    for step in range(p.steps):
        hidden = x
        for layer in layers[:-1]:
            hidden = torch.relu(hidden @ layer)
        losses = (hidden @ layers[-1] - y).square().mean(dim=(1, 2))
        gradients = torch.autograd.grad(losses.sum(), layers)
        rate = p.lr * ((step + 1) / warmup.clamp(min=1)).clamp(max=1.0)
        with torch.no_grad():
            for layer, gradient in zip(layers, gradients, strict=True):
                layer -= rate * gradient
    # Each of the targets has variance 1: that is the loss of a net that has learned nothing.
    rank.snapshot(step=p.steps - 1, learned=(losses.detach() < p.good).double())


def learned(t: Tables, arm: str) -> list[list[bool]]:
    """Return, for each seed, which warm-ups let the net learn."""
    t.require(arm)
    found = t.snapshot(arm, "learned", step=t.root_params["steps"] - 1) == 1.0
    return [[bool(one) for one in row] for row in found.reshape(t.root_params["seeds"], -1)]


@remedy(HOLDS, settles="A28")
def prevents_divergence(t: Tables) -> Finding:
    """Where the first steps diverge, with large weights, a warm-up lets the net learn."""
    gained = [float(row[-1]) - float(row[0]) for row in learned(t, "large")]
    return mean_exceeds(gained, 0.0, "nets that learn with the longest warm-up, less without")


@symptom(HOLDS)
def small_need_none(t: Tables) -> Finding:
    """With small and with usual weights the net learns without any warm-up."""
    found = {arm: [float(row[0]) for row in learned(t, arm)] for arm in ("small", "usual")}
    return all_of(*(mean_exceeds(rows, 0.5, f"share of {arm}") for arm, rows in found.items()))


def sufficient(t: Tables, arm: str) -> list[int]:
    """Return the place of each seed's shortest sufficient warm-up; behind the last if none is."""
    return [[*row, True].index(True) for row in learned(t, arm)]


@mechanism(REFUTED, settles="A33")
def small_need_more(t: Tables) -> Finding:
    """The smaller the initial weights, the longer the warm-up that is needed."""
    small, large = sufficient(t, "small"), sufficient(t, "large")
    more = [float(a - b) for a, b in zip(small, large, strict=True)]
    return mean_exceeds(more, 0.0, "places in the list of warm-ups, small less large")


@mechanism(HOLDS, settles="~A33")
def large_need_more(t: Tables) -> Finding:
    """The larger they are, the longer it has to be."""
    places = [sufficient(t, arm) for arm in ("usual", "large", "larger")]
    more = [[float(b - a) for a, b in zip(*two, strict=True)] for two in pairwise(places)]
    return all_of(*(mean_exceeds(one, 0.0, "places in the list of warm-ups") for one in more))


SCENARIO = Scenario(
    title="The larger the initial weights the longer the warm-up, and not the other way round",
    family="schedule",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    check=check,
    headline=says(
        prevents_divergence=("warm-up saves nets that would diverge", "warm-up saves nothing"),
        small_need_more=("small weights need more of it", "small weights need no more of it"),
        large_need_more=("large weights need more of it", "large weights need no more of it"),
    ),
    arms=(
        reference("usual", "deviation 1 over root of the width", ranks=1, sigma=1.0),
        control("small", "0.7 of that", ranks=1, sigma=0.7),
        control("large", "twice that", ranks=1, sigma=2.0),
        control("larger", "three times that", ranks=1, sigma=3.0),
    ),
    claims=(prevents_divergence, small_need_none, small_need_more, large_need_more),
)
