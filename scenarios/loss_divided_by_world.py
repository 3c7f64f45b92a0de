"""A loss averaged over ranks for the log and then used for backward: steps are 1/N of their length.

`loss = reduce_mean(loss)` clones, all-reduces and divides by N. What it prints is right; but to
autograd it is a clone and a division, so backward starts from 1/N and DDP averages as ever: all
gradients are 1/N of those of one process. Averaging gradients a second time, by hand, is harmless.
Reported in sanderwood/bgpt#5; a second average of the gradients in pytorch/examples#1146.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, like_one_process, matches, negated, ranks_agree, says
from harness.floor import EPS, dtype_floor
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Plot, Scenario, at_least
from harness.tables import relative_l2
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/loss_divided_by_world.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Fit a small net; which tensor is logged and which one is used for backward differs."""
    import torch
    import torch.distributed as dist

    from scenarios._models import gradients, net, rows, weights

    def reduce_mean(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value / rank.world_size

    model = torch.nn.parallel.DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        if arm["logs"] == "same":
            loss = reduce_mean(loss)
            rank.log(step=step, loss=loss)
        else:
            rank.log(step=step, loss=reduce_mean(loss.detach()))
        loss.backward()
        if arm.get("averages_again"):
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= rank.world_size
        rank.snapshot(step=step, gradients=gradients(model))
        optimizer.step()
        rank.snapshot(step=step, weights=weights(model))


@symptom(HOLDS, source="sanderwood/bgpt#5")
def off_one_process(t: Tables) -> Finding:
    """With the averaged loss used for backward the weights are not those of one process."""
    return negated(matches(t, "same_tensor", "one_process", "weights"))


@mechanism(HOLDS)
def one_nth_of_the_gradient(t: Tables) -> Finding:
    """The first gradient is 1/N of that of one process."""
    t.require("same_tensor", "one_process")
    ranks = t.ranks("same_tensor")
    due = t.snapshot("one_process", "gradients", step=0) / len(ranks)
    found = [t.snapshot("same_tensor", "gradients", step=0, rank=r) for r in ranks]
    gap = max(relative_l2(gradient, due) for gradient in found)
    floor = rounding(t, "one_process", "gradients", step=0)
    reason = f"the first gradient is {gap:.2g} from 1/{len(ranks)} of that of one process"
    return is_rounding(gap, floor, reason, "relative L2 distance")


@symptom(REFUTED)
def first_loss_shows_it(t: Tables) -> Finding:
    """The first loss in the log is not that of one process."""
    arm = "same_tensor"
    t.require(arm, "one_process")
    due = t.value("one_process", "loss", step=0)
    gap = max(abs(t.value(arm, "loss", step=0, rank=r) / due - 1) for r in t.ranks(arm))
    # A mean over all rows is rounded once a row.
    floor = dtype_floor(EPS["float64"] * t.root_params["batch"])
    reason = f"the first loss of {arm} is {gap:.2g} from that of one process"
    return negated(is_rounding(gap, floor, reason, "share of the loss"))


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "same_tensor", "weights"))


@mechanism(REFUTED, source="pytorch/examples#1146")
def second_average_divides_again(t: Tables) -> Finding:
    """Averaging DDP's gradients a second time divides them by N once more."""
    return negated(like_one_process(t, "averaged_twice"))


@remedy(HOLDS)
def log_a_detached_copy(t: Tables) -> Finding:
    """Average a detached copy for the log: N ranks train like one process."""
    return like_one_process(t, "detached")


SCENARIO = Scenario(
    title="The loss averaged for the log and used for backward: gradients are 1/N",
    family="normalisation",
    cause="loss_divided_by_world",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        one_nth_of_the_gradient=("the logged loss gives 1/N of the gradient", "another gradient"),
        first_loss_shows_it=("the log shows it", "the log looks right"),
        second_average_divides_again=("a second average divides", "a second average is harmless"),
        log_a_detached_copy=("a detached copy cures it", "a detached copy does not cure it"),
    ),
    arms=(
        one_process("one process", logs="detached"),
        faulty("same_tensor", "loss = reduce_mean(loss)", logs="same"),
        control("averaged_twice", "averaged by hand as well", logs="detached", averages_again=True),
        fixed("detached", "reduce_mean(loss.detach())", logs="detached"),
    ),
    claims=(
        off_one_process,
        one_nth_of_the_gradient,
        first_loss_shows_it,
        ranks_part,
        second_average_divides_again,
        log_a_detached_copy,
    ),
    plots=(Plot(metric="loss", title="Averaged loss", log=True),),
)
