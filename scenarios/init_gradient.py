"""Small initial weights: gradients vanish, they do not explode, whatever the activation.

Backward multiplies by the weights of every layer, as forward does: small weights make both fade,
large ones make both grow. The sigmoid's derivative, at most 0.25, is one more factor that shrinks.
An article has small weights make gradients explode, and gives the sigmoid's 0.249999 near 0 as the
example.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism, symptom
from harness.findings import all_of, mean_exceeds, says
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

UNITS = ("relu", "tanh", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/init_gradient.yaml."""

    seeds: int = field(metadata=at_least(8))
    depth: int = field(metadata=between(2, 30))
    small: float = field(metadata=between(0.001, 0.5))
    large: float = field(metadata=between(2.0, 100.0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Look at the first gradients of nets, one for each seed; the size of the weights differs."""
    import torch

    size = {"usual": 1.0, "small": p.small, "large": p.large}[arm["weights"]]
    units = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "none": torch.clone}
    for name, unit in units.items():
        draw = rank.generator("nets")
        hidden = torch.randn(p.seeds, 32, 16, generator=draw, dtype=torch.float64)
        target = hidden[..., :1]
        layers = []
        for layer in range(p.depth + 1):
            width = 16 if layer < p.depth else 1
            drawn = torch.randn(p.seeds, 16, width, generator=draw, dtype=torch.float64)
            layers.append((size * drawn / 4).requires_grad_())
        for layer_weights in layers[:-1]:
            hidden = unit(hidden @ layer_weights)
        loss = (hidden @ layers[-1] - target).square().mean(dim=(1, 2)).sum()
        (first,) = torch.autograd.grad(loss, layers[:1])
        signal = hidden.detach().std(dim=(1, 2))
        decades = torch.log10(first.flatten(1).norm(dim=1))
        rank.snapshot(step=0, phase=name, decades=decades, signal=torch.log10(signal))
    near = torch.tensor(1e-3, dtype=torch.float64, requires_grad=True)
    rank.log(step=0, slope=torch.autograd.grad(torch.sigmoid(near), near)[0])


def more(t: Tables, arm: str, than: str, unit: str, what: str = "decades") -> Finding:
    """Decide: the first layer's gradient is larger in one arm than in another, over the seeds."""
    t.require(arm, than)
    one, other = (t.snapshot(a, what, step=0, phase=unit) for a in (arm, than))
    return mean_exceeds((one - other).tolist(), 0.0, f"decades, {arm} over {than}, {unit}")


@symptom(REFUTED, settles="A07")
def small_explode(t: Tables) -> Finding:
    """Small weights make the gradients explode."""
    return all_of(*(more(t, "small", "usual", unit) for unit in UNITS))


@mechanism(HOLDS, settles="~A07")
def small_vanish(t: Tables) -> Finding:
    """Small weights make the gradients vanish, with each activation."""
    return all_of(*(more(t, "usual", "small", unit) for unit in UNITS))


@mechanism(HOLDS, settles="A07")
def small_signal(t: Tables) -> Finding:
    """Small weights make the variance of the signal small."""
    return all_of(*(more(t, "usual", "small", unit, "signal") for unit in UNITS))


@mechanism(HOLDS)
def large_grow(t: Tables) -> Finding:
    """What makes gradients grow are large weights, with ReLU."""
    return more(t, "large", "usual", "relu")


@symptom(HOLDS, settles="A08")
def slope_is_quarter(t: Tables) -> Finding:
    """The sigmoid's derivative at 1e-3 is 0.249999 and some."""
    t.require("usual")
    slope = t.value("usual", "slope", step=0)
    right = 0.249999 <= slope < 0.25
    return (holds if right else refuted)(f"it is {slope:.11f}", effect=slope, unit="slope")


@mechanism(REFUTED, settles="A08")
def sigmoid_adds(t: Tables) -> Finding:
    """With small weights, where each slope is near 0.25, the sigmoid makes gradients larger."""
    t.require("small")
    sigmoid, none = (t.snapshot("small", "decades", step=0, phase=u) for u in ("sigmoid", "none"))
    return mean_exceeds((sigmoid - none).tolist(), 0.0, "decades, sigmoid over no activation")


SCENARIO = Scenario(
    title="Small initial weights make gradients vanish, not explode",
    family="initialisation",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        small_explode=("small weights make gradients explode", "small weights explode nothing"),
        small_vanish=("they make gradients vanish", "they do not make them vanish"),
        sigmoid_adds=("the sigmoid's 0.25 adds to it", "the sigmoid's 0.25 shrinks them further"),
    ),
    arms=(
        reference("usual", "deviation 1 over root of the width", ranks=1, weights="usual"),
        control("small", "a tenth of that", ranks=1, weights="small"),
        control("large", "three times that", ranks=1, weights="large"),
    ),
    claims=(
        small_explode,
        small_vanish,
        small_signal,
        large_grow,
        slope_is_quarter,
        sigmoid_adds,
    ),
)
