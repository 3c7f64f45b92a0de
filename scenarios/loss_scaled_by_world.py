"""A loss multiplied by the number of ranks: N GPUs train as with N times the learning rate.

DDP averages the gradients of the ranks; whoever believes that it divides once too often multiplies
the loss by world_size to make up for it. Every gradient is then N times that of one process, on
all ranks alike. Adam divides by the size of the gradient, but a clip before it sees the factor: it
cuts at 1/N of the norm that it was set to. Reported in neuralmagic/sparseml#135 and
IrvingMeng/MagFace#12; wanted, and allowed for elsewhere, in ultralytics/yolov5#8892.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, like_one_process, matches, negated, ranks_agree, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Plot, Scenario, at_least
from harness.tables import relative_l2
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/loss_scaled_by_world.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    adam_lr: float = field(metadata=at_least(1e-6))
    max_norm: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Fit a small net; arms differ in the factor of the loss and in who uses the gradient."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import gradients, net, rows, weights

    model = DistributedDataParallel(net(rank))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    if arm["optimizer"] == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=p.adam_lr)
    if arm["lr"] == "over_world":
        optimizer.param_groups[0]["lr"] /= rank.world_size
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        rank.log(step=step, loss=loss)
        if arm["loss"] == "times_world":
            loss = loss * rank.world_size
        loss.backward()
        rank.snapshot(step=step, gradients=gradients(model))
        if arm["optimizer"] == "adam":
            torch.nn.utils.clip_grad_norm_(model.parameters(), p.max_norm)
        optimizer.step()
        rank.snapshot(step=step, weights=weights(model))


@symptom(HOLDS, source="neuralmagic/sparseml#135")
def off_one_process(t: Tables) -> Finding:
    """With the loss times N the ranks end with other weights than one process."""
    return negated(matches(t, "times_world", "one_process", "weights"))


@mechanism(HOLDS)
def n_times_the_gradient(t: Tables) -> Finding:
    """The first gradient is N times that of one process."""
    arms = ("times_world", "adam_times_world")
    t.require("one_process", *arms)
    ranks = t.ranks("times_world")
    due = len(ranks) * t.snapshot("one_process", "gradients", step=0)
    found = [t.snapshot(arm, "gradients", step=0, rank=r) for arm in arms for r in ranks]
    gap = max(relative_l2(gradient, due) for gradient in found)
    floor = rounding(t, "one_process", "gradients", step=0)
    reason = f"the first gradient is {gap:.2g} from {len(ranks)} times that of one process"
    return is_rounding(gap, floor, reason, "relative L2 distance")


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "times_world", "weights"))


@mechanism(REFUTED)
def adam_does_not_care(t: Tables) -> Finding:
    """Under Adam, with gradients clipped by norm as usual, the factor does no harm."""
    return matches(t, "adam_times_world", "adam_one_process", "weights")


@remedy(HOLDS)
def drop_the_factor(t: Tables) -> Finding:
    """Leave the averaging to DDP: N ranks train like one process."""
    return like_one_process(t, "plain")


@remedy(HOLDS)
def divide_the_rate(t: Tables) -> Finding:
    """With SGD the learning rate over N makes up for it exactly."""
    return like_one_process(t, "rate_over_world")


SCENARIO = Scenario(
    title="A loss times world_size: DDP averages already, and the step is N times too long",
    family="normalisation",
    cause="loss_scaled_by_world",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        off_one_process=("the loss times N trains something else", "the factor has no effect"),
        n_times_the_gradient=("gradients are exactly N times too large", "by another factor"),
        ranks_part=("the ranks part", "the ranks agree"),
        adam_does_not_care=("Adam divides it out", "Adam behind a clip feels it as well"),
    ),
    arms=(
        one_process("one process", loss="plain", optimizer="sgd", lr="plain"),
        one_process(
            "Adam, clipped", name="adam_one_process", loss="plain", optimizer="adam", lr="plain"
        ),
        faulty("times_world", "loss * world_size", loss="times_world", optimizer="sgd", lr="plain"),
        faulty(
            "adam_times_world", "Adam, clipped", loss="times_world", optimizer="adam", lr="plain"
        ),
        fixed("plain", "the loss as it is", loss="plain", optimizer="sgd", lr="plain"),
        fixed("rate_over_world", "lr / N", loss="times_world", optimizer="sgd", lr="over_world"),
    ),
    claims=(
        off_one_process,
        n_times_the_gradient,
        ranks_part,
        adam_does_not_care,
        drop_the_factor,
        divide_the_rate,
    ),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
