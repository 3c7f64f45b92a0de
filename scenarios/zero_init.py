"""Weights that all start from zero, or from one value: the units of a layer stay one for ever.

Units that start alike get the same gradient, and stay alike: however wide a layer is, it computes
one number. With zeros and tanh or ReLU nothing moves at all. It takes only one layer of zeros not
to be all of them: zeros in the last layer alone, as residual branches often begin, learn well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, mechanism, remedy, symptom
from harness.findings import all_of, negated, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/zero_init.yaml."""

    steps: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Fit a small net; how its weights begin is what differs."""
    import torch

    from scenarios._models import net, rows

    model = net(rank)
    first, _, last = cast("list[torch.nn.Linear]", list(model))
    if arm["weights"] == "zeros":
        for weight in model.parameters():
            torch.nn.init.zeros_(weight)
    elif arm["weights"] == "constant":
        for weight in model.parameters():
            torch.nn.init.constant_(weight, 0.1)
    elif arm["weights"] == "last_zeros":
        torch.nn.init.zeros_(last.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, 64)
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        units = first.weight.detach()
        rank.log(step=step, loss=loss, apart=(units - units[0]).abs().max())
        rank.log(step=step, moved=units.abs().max())


def units_alike(t: Tables, arm: str) -> Finding:
    """Decide: at every step all units of the first layer have the same weights, bit for bit."""
    t.require(arm)
    apart = max(t.series(arm, "apart").values())
    reason = f"{arm}: the units of the first layer are at most {apart:.2g} apart"
    return (refuted if apart else holds)(reason, effect=apart, unit="of a weight")


def learns(t: Tables, arm: str) -> Finding:
    """Decide: the units part, and the loss ends below that of a net which only has its bias."""
    t.require(arm, "zeros")
    ends, none = t.last(arm, "loss"), t.last("zeros", "loss")
    reason = f"{arm}: the loss ends at {ends:.3g}, at {none:.3g} with zeros"
    lower = (holds if ends < none else refuted)(reason, effect=ends / none, unit="of that loss")
    return all_of(lower, negated(units_alike(t, arm)))


@symptom(HOLDS, settles="B03")
def zeros_stay_alike(t: Tables) -> Finding:
    """Initialised with zeros all units of a layer stay identical."""
    return units_alike(t, "zeros")


@mechanism(HOLDS)
def zeros_never_move(t: Tables) -> Finding:
    """With zeros and tanh the first layer never moves at all."""
    t.require("zeros")
    moved = max(t.series("zeros", "moved").values())
    return (refuted if moved else holds)(f"its largest weight is {moved:.2g} at any step")


@mechanism(HOLDS)
def constant_stays_alike(t: Tables) -> Finding:
    """It is not the zero: any one value keeps the units identical, while they learn."""
    t.require("constant")
    began, *_, ends = t.series("constant", "loss").values()
    reason = f"the loss goes from {began:.3g} to {ends:.3g}"
    return all_of(units_alike(t, "constant"), (holds if ends < began else refuted)(reason))


@remedy(HOLDS)
def random_learns(t: Tables) -> Finding:
    """Random weights tell the units apart, and learn."""
    return learns(t, "random")


@remedy(HOLDS)
def last_zeros_learn(t: Tables) -> Finding:
    """Zeros in the last layer alone leave the units apart, and learn."""
    return learns(t, "last_zeros")


SCENARIO = Scenario(
    title="Weights that all begin alike: the units of a layer stay one for ever",
    family="initialisation",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        zeros_stay_alike=("zeros keep all units identical", "zeros tell units apart"),
        constant_stays_alike=("so does any one value", "another value does not"),
        last_zeros_learn=("zeros in the last layer alone learn", "not even the last may be zero"),
    ),
    arms=(
        reference("random", "random weights", ranks=1, weights="random"),
        faulty("zeros", "all weights 0", ranks=1, weights="zeros"),
        faulty("constant", "all weights 0.1", ranks=1, weights="constant"),
        fixed("last_zeros", "random, the last layer 0", ranks=1, weights="last_zeros"),
    ),
    claims=(
        zeros_stay_alike,
        zeros_never_move,
        constant_stays_alike,
        random_learns,
        last_zeros_learn,
    ),
    plots=(Plot(metric="loss", title="Loss", log=True),),
)
