"""A linear ramp of the learning rate as a damping of the gradient: the same for plain SGD only.

Where the update is rate times gradient it does not matter which of the two is made smaller. Adam
divides by the size of the gradients it has seen: damped ones give full steps, and no warm-up at
all. Momentum keeps the early, damped gradients for later, and SGD with momentum trains otherwise.
An article states the equality in general.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, one_process
from harness.claims import HOLDS, REFUTED, mechanism
from harness.findings import matches, says
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/warmup_damping.yaml."""

    warmup: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    momentum: float = field(metadata=between(0.1, 0.99))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train for the length of the warm-up; what the ramp is applied to is what differs."""
    import torch

    from scenarios._models import net, rows, weights

    model = net(rank)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    if arm["optimizer"] == "momentum":
        optimizer = torch.optim.SGD(model.parameters(), lr=p.lr, momentum=p.momentum)
    elif arm["optimizer"] == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=p.lr)
    x, y = rows(rank, 64)
    start = weights(model)
    for step in range(p.warmup):
        ramp = (step + 1) / p.warmup
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        if arm["ramps"] == "rate":
            optimizer.param_groups[0]["lr"] = p.lr * ramp
        elif arm["ramps"] == "gradient":
            for weight in model.parameters():
                assert weight.grad is not None
                weight.grad *= ramp
        optimizer.step()
        if step == 0:
            rank.log(step=0, first=(weights(model) - start).norm())
    rank.snapshot(step=p.warmup - 1, weights=weights(model))


@mechanism(HOLDS, settles="A30")
def same_for_sgd(t: Tables) -> Finding:
    """A ramp of the rate is a damping of the gradient that depends on time, for plain SGD."""
    return matches(t, "sgd_damped", "sgd", "weights")


@mechanism(REFUTED, settles="A30")
def same_for_momentum(t: Tables) -> Finding:
    """It is for SGD with momentum as well."""
    return matches(t, "momentum_damped", "momentum", "weights")


@mechanism(REFUTED, settles="A30")
def same_for_adam(t: Tables) -> Finding:
    """It is for Adam as well."""
    return matches(t, "adam_damped", "adam", "weights")


@mechanism(HOLDS)
def adam_takes_full_steps(t: Tables) -> Finding:
    """Under Adam a damped gradient makes the very first step as long as without a warm-up."""
    damped, full, ramped = (first_step(t, arm) for arm in ("adam_damped", "adam_at_once", "adam"))
    reason = f"the first step is {damped:.6g}, {full:.6g} without warm-up, {ramped:.6g} with a ramp"
    # Adam adds 1e-8 to the size that it divides by.
    near = abs(damped - full) * 100 <= abs(ramped - full)
    return (holds if near else refuted)(reason, effect=damped / full, unit="of the full step")


def first_step(t: Tables, arm: str) -> float:
    """Return how far the first update moves the weights."""
    t.require(arm)
    return float(t.value(arm, "first", step=0))


SCENARIO = Scenario(
    title="Warm-up by damping the gradient: right for plain SGD, none at all under Adam",
    family="schedule",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        same_for_sgd=("for plain SGD a ramp is a damped gradient", "not even for plain SGD"),
        same_for_momentum=("for momentum too", "not with momentum"),
        adam_takes_full_steps=("Adam takes full steps at once", "Adam warms up as well"),
    ),
    arms=(
        one_process("SGD, the rate", name="sgd", optimizer="sgd", ramps="rate"),
        control("sgd_damped", "SGD, the gradient", ranks=1, optimizer="sgd", ramps="gradient"),
        one_process("momentum, the rate", name="momentum", optimizer="momentum", ramps="rate"),
        control("momentum_damped", "momentum", ranks=1, optimizer="momentum", ramps="gradient"),
        one_process("Adam, the rate", name="adam", optimizer="adam", ramps="rate"),
        control("adam_damped", "Adam, the gradient", ranks=1, optimizer="adam", ramps="gradient"),
        control("adam_at_once", "Adam, no ramp", ranks=1, optimizer="adam", ramps="nothing"),
    ),
    claims=(same_for_sgd, same_for_momentum, same_for_adam, adam_takes_full_steps),
)
