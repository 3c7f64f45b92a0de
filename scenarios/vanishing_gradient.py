"""Vanishing gradients: what decays is the product of weights and slopes, not the sigmoid alone.

The gradient of the first layer is a product of one factor for each layer. A sigmoid's slope is at
most 0.25, and with usual weights the product decays; with larger weights it need not. ReLU's slope
of 1 holds for half of the units: with torch's default weights it decays as well, with Kaiming's it
does not. Replacing the last of 12 sigmoids takes away one factor of 12, and no more. From an
article's sections on the chain rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import mean_exceeds, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, between

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/vanishing_gradient.yaml."""

    seeds: int = field(metadata=at_least(8))
    depth: int = field(metadata=between(4, 50))
    channels: int = field(metadata=between(2, 64))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Look at the first gradients of convolutional nets; activations and weights differ."""
    import torch
    from torch import nn

    kinds: dict[str, Any] = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU}
    for seed in range(p.seeds):
        # Nets of the same seed have the same weights in all arms.
        torch.manual_seed(rank.seed + 1000 * seed)
        x, target = torch.randn(2, 4, p.channels, 16, dtype=torch.float64)
        convs = [nn.Conv1d(p.channels, p.channels, 3, padding=1).double() for _ in range(p.depth)]
        units = [kinds[arm["unit"]]() for _ in convs]
        if arm.get("last"):
            units[-1] = nn.ReLU()
        for conv in convs:
            if arm.get("kaiming"):
                nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        out = x
        for conv, unit in zip(convs, units, strict=True):
            out = out + unit(conv(out)) if arm.get("residual") else unit(conv(out))
        (out - target).square().mean().backward()
        first, last = (torch.linalg.norm(conv.weight.grad) for conv in (convs[0], convs[-1]))
        rank.log(step=seed, first=first, by_layer=(first / last) ** (1 / (p.depth - 1)))


def over_seeds(t: Tables, arm: str, metric: str) -> list[float]:
    """Return log10 of what an arm recorded for each seed."""
    t.require(arm)
    return [math.log10(value) for value in t.series(arm, metric).values()]


def grows(t: Tables, arm: str, than: str) -> Finding:
    """Decide: the first layer's gradient is larger in one arm than in another."""
    pairs = zip(over_seeds(t, arm, "first"), over_seeds(t, than, "first"), strict=True)
    return mean_exceeds([a - b for a, b in pairs], 0.0, f"decades, {arm} over {than}")


@symptom(HOLDS, settles="B08")
def sigmoid_decays(t: Tables) -> Finding:
    """With sigmoids the gradient loses a factor of 4 or more with each layer."""
    factors = over_seeds(t, "sigmoid", "by_layer")
    return mean_exceeds([-f for f in factors], math.log10(4), "decades lost with each layer")


@mechanism(REFUTED, settles="B09")
def relu_ends_decay(t: Tables) -> Finding:
    """With ReLU, whose slope is 1, the gradient does not decay."""
    factors = over_seeds(t, "relu", "by_layer")
    return negated(mean_exceeds([-f for f in factors], 0.0, "decades lost with each layer, ReLU"))


@remedy(HOLDS, settles="B09")
def relu_decays_less(t: Tables) -> Finding:
    """ReLU makes it decay less."""
    return grows(t, "relu", "sigmoid")


@remedy(HOLDS, settles="~B09")
def kaiming_ends_decay(t: Tables) -> Finding:
    """It takes Kaiming's weights as well: then less than a fifth is lost with each layer."""
    factors = over_seeds(t, "relu_kaiming", "by_layer")
    return mean_exceeds(factors, math.log10(0.8), "log10 of what is left with each layer")


@remedy(HOLDS, settles="B10")
def residual_lets_through(t: Tables) -> Finding:
    """Residual connections let the gradient through."""
    return grows(t, "residual", "sigmoid")


@remedy(REFUTED, settles="B11")
def last_restores(t: Tables) -> Finding:
    """Replacing the last sigmoid alone restores the first gradients, by 7 decades."""
    pairs = zip(over_seeds(t, "last_relu", "first"), over_seeds(t, "sigmoid", "first"), strict=True)
    return mean_exceeds([a - b for a, b in pairs], 7.0, "decades gained by the last activation")


SCENARIO = Scenario(
    title="Vanishing gradients: one factor for each layer, and no single layer that mends it",
    family="initialisation",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        sigmoid_decays=("sigmoids lose a factor of 4 a layer", "sigmoids lose less"),
        relu_ends_decay=("ReLU ends it", "ReLU alone does not end it"),
        last_restores=(
            "replacing the last one does",
            "replacing the last one does next to nothing",
        ),
    ),
    arms=(
        reference("sigmoid", "sigmoids", ranks=1, unit="sigmoid"),
        control("relu", "ReLU", ranks=1, unit="relu"),
        control("relu_kaiming", "ReLU, Kaiming's weights", ranks=1, unit="relu", kaiming=True),
        control("residual", "sigmoids, residual", ranks=1, unit="sigmoid", residual=True),
        control("last_relu", "sigmoids, the last ReLU", ranks=1, unit="sigmoid", last=True),
    ),
    claims=(
        sigmoid_decays,
        relu_ends_decay,
        relu_decays_less,
        kaiming_ends_decay,
        residual_lets_through,
        last_restores,
    ),
)
