"""The learning rate times the number of GPUs: a first-order rule that is taken for an identity.

DDP on N ranks at the unchanged rate is one process on all their rows, exactly. What N times the
rate imitates is another run, N small steps for each of its own: near for SGD with a mean loss.
Exact it is for a loss that is summed, since DDP's average has divided that by N. Adam's steps do
not grow with the gradient, and the rule is far off. Asked in kennymckormick/pyskl#26,
horovod/horovod#1198, facebookresearch/moco#98.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, like_one_process, mean_is, negated, says
from harness.scenario import Arm, Finding, Outcome, Scenario, at_least
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/lr_scaling.yaml."""

    trials: int = field(metadata=at_least(8))
    steps: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    adam_lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train on fresh rows in each trial; steps, rate, loss and optimizer are what differs."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import net, rows, weights

    small, loss = arm.get("small", False), arm.get("loss", "mean")
    kind, rate = (torch.optim.Adam, p.adam_lr) if arm.get("adam") else (torch.optim.SGD, p.lr)
    rate *= rank.world_size ** arm.get("power", 0.0)
    if loss == "sum":
        rate /= p.batch
    for trial in range(p.trials if rank.world_size > 1 else 1):  # What is exact needs but one.
        layers = net(rank)
        start = weights(layers)
        model: torch.nn.Module = layers if small else DistributedDataParallel(layers)
        optimizer = kind(model.parameters(), lr=rate)
        for step in range(p.steps):
            x, y = rows(rank, p.batch, name=f"trial {trial}, step {step}", whole=small)
            # Alone, one process after the other sees what DDP's ranks see side by side.
            shares = rank.world_size if small else 1
            for k in range(shares):
                optimizer.zero_grad()
                torch.nn.MSELoss(reduction=loss)(model(x[k::shares]), y[k::shares]).backward()
                optimizer.step()
        rank.snapshot(step=trial, moves=weights(model) - start)


def off(t: Tables, arm: str, small: str) -> list[float]:
    """Return for each trial how far the arm ends from the small steps, as a share of their way."""
    t.require(arm, small)
    return [t.distance(arm, small, "moves", step=n) for n in range(t.root_params["trials"])]


def nearer(t: Tables, one: tuple[str, str], other: tuple[str, str]) -> Finding:
    """Decide: over the trials the first arm is nearer to its small steps than the other to its."""
    mine, theirs = off(t, *one), off(t, *other)
    logs = [math.log(near / far) for near, far in zip(mine, theirs, strict=True)]
    apart = mean_is(logs, 0.0, "logarithm of the ratio")
    outcome = Outcome.HOLDS if math.fsum(logs) < 0.0 else Outcome.REFUTED
    outcome = outcome if apart.outcome is Outcome.REFUTED else Outcome.UNKNOWN
    shares = f"{one[0]} is off by {math.fsum(mine) / len(mine):.2g} of the way of the small steps"
    reason = f"{shares}, {other[0]} by {math.fsum(theirs) / len(theirs):.2g}; {apart.reason}"
    return dataclasses.replace(apart, outcome=outcome, reason=reason)


@symptom(REFUTED, settles="B62")
def unscaled_falls_short(t: Tables) -> Finding:
    """At an unchanged learning rate DDP does not train like one process on all rows."""
    return negated(like_one_process(t, "ddp", "moves"))


@remedy(HOLDS, source="kennymckormick/pyskl#26", settles="B62")
def times_n(t: Tables) -> Finding:
    """N times the rate brings SGD nearer to the N small steps that one GPU would have made."""
    return nearer(t, ("times_n", "small_steps"), ("ddp", "small_steps"))


@mechanism(REFUTED, settles="B62")
def identity(t: Tables) -> Finding:
    """N times the rate makes it what one process does at the rate itself."""
    return like_one_process(t, "times_n", "moves")


@mechanism(HOLDS, settles="B62")
def exact_for_sums(t: Tables) -> Finding:
    """Of a loss that is summed it is: N times the rate is one process exactly, the rate is not."""
    plain = like_one_process(t, "sum_plain", "moves")
    return all_of(like_one_process(t, "sum_times_n", "moves"), negated(plain))


@remedy(REFUTED, source="horovod/horovod#1198", settles="B62")
def suits_adam(t: Tables) -> Finding:
    """The rule is as good for Adam as for SGD."""
    return negated(nearer(t, ("times_n", "small_steps"), ("adam_times_n", "adam_small_steps")))


@remedy(HOLDS)
def root_for_adam(t: Tables) -> Finding:
    """The square root of N times the rate brings Adam nearer to its small steps than the rate."""
    small = "adam_small_steps"
    return nearer(t, ("adam_times_root", small), ("adam_plain", small))


SCENARIO = Scenario(
    title="lr times N: DDP at lr is one process already, and N * lr only resembles N small steps",
    family="schedule",
    cause="",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        unscaled_falls_short=("DDP at lr is not one process", "DDP at lr is one process exactly"),
        times_n=("N * lr is near N small steps", "N * lr is no nearer to N small steps"),
        exact_for_sums=("with a sum loss it is exact", "with a sum loss it is off, too"),
        suits_adam=("it suits Adam as well", "for Adam it is far off"),
    ),
    arms=(
        one_process("one process, all rows, lr"),
        reference("small_steps", "one process, N steps, a share each", small=True),
        reference("adam_small_steps", "the same with Adam", small=True, adam=True),
        fixed("ddp", "DDP, lr"),
        faulty("times_n", "DDP, N * lr", power=1.0),
        faulty("sum_plain", "sum loss, lr", loss="sum"),
        fixed("sum_times_n", "sum loss, N * lr", loss="sum", power=1.0),
        control("adam_plain", "Adam, lr", adam=True),
        fixed("adam_times_root", "Adam, sqrt(N) * lr", adam=True, power=0.5),
        faulty("adam_times_n", "Adam, N * lr", adam=True, power=1.0),
    ),
    claims=(unscaled_falls_short, times_n, identity, exact_for_sums, suits_adam, root_for_adam),
)
