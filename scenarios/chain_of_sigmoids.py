"""A chain of sigmoids: the gradient is the product of slopes and weights, and 0.25 is only one.

The chain rule multiplies along the way from the loss to a weight: the slope of each activation and
the weight behind it. A slope of at most 0.25 makes the product decay as 0.25^n where the weights
are 1; at weights of 4 the product is 1 at any depth, and nothing decays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism
from harness.findings import all_of, is_rounding, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/chain_of_sigmoids.yaml."""

    depth: int = field(metadata=between(2, 100))
    start: float = field(metadata=between(-5.0, 5.0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Send a number through a chain of sigmoids; the weights between them differ."""
    import torch

    start = 0.5 if arm["centred"] else p.start
    first = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    hidden, by_hand = first, 1.0
    for layer in range(p.depth):
        # Centred, each sigmoid is met at 0, where its slope is steepest.
        inner = arm["weight"] * (hidden - 0.5 if arm["centred"] else hidden)
        hidden = torch.sigmoid(inner)
        slope = (hidden * (1 - hidden)).item()
        by_hand *= slope * arm["weight"]
        rank.log(step=layer, slope=slope)
    hidden.backward()
    rank.log(step=p.depth, gradient=first.grad, by_hand=by_hand)


def left(t: Tables, arm: str) -> float:
    """Return the gradient of the chain's first number."""
    t.require(arm)
    return float(t.last(arm, "gradient"))


def is_product(t: Tables, arm: str) -> Finding:
    """Decide: the gradient is the product of all slopes and weights."""
    gradient, product = left(t, arm), t.last(arm, "by_hand")
    reason = f"{arm}: autograd gives {gradient:.9g}, the product is {product:.9g}"
    floor = dtype_floor(EPS["float64"] * t.root_params["depth"])
    return is_rounding(abs(gradient / product - 1), floor, reason, "of the gradient")


@mechanism(HOLDS, settles="B07")
def product_of_slopes(t: Tables) -> Finding:
    """The gradient is the product of the derivatives along the way."""
    return all_of(*(is_product(t, arm) for arm in ("ones", "fours", "fours_centred")))


@mechanism(HOLDS, settles="B08")
def decays_with_ones(t: Tables) -> Finding:
    """A sigmoid's slope is at most 0.25: with weights of 1 the gradient is below 0.25^n."""
    steepest = max(t.series("ones", "slope").values())
    found, bound = left(t, "ones"), 0.25 ** t.root_params["depth"]
    reason = f"the steepest slope is {steepest:.6g}, the gradient {found:.3g}, 0.25^n {bound:.3g}"
    right = steepest <= 0.25 and found <= bound
    return (holds if right else refuted)(reason, effect=found / bound, unit="of 0.25^n")


@mechanism(REFUTED, settles="B08")
def decays_with_fours(t: Tables) -> Finding:
    """It decays with the depth whatever the weights."""
    found = left(t, "fours_centred")
    reason = (
        f"with weights of 4 the gradient is {found:.9g} after {t.root_params['depth']} sigmoids"
    )
    return (holds if found < 1 else refuted)(reason, effect=found, unit="gradient")


SCENARIO = Scenario(
    title="A chain of sigmoids decays by slopes times weights, not by slopes alone",
    family="initialisation",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        product_of_slopes=("the gradient is the product of slopes and weights", "it is not"),
        decays_with_fours=("it always decays", "with weights of 4 nothing decays"),
    ),
    arms=(
        reference("ones", "weights of 1", ranks=1, weight=1.0, centred=False),
        control("fours", "weights of 4", ranks=1, weight=4.0, centred=False),
        control("fours_centred", "weights of 4, centred", ranks=1, weight=4.0, centred=True),
    ),
    claims=(product_of_slopes, decays_with_ones, decays_with_fours),
)
