"""zero_grad() inside the accumulation loop: only the last micro-batch reaches the update.

Each micro-batch's loss is divided by their number, its gradient computed, and wiped by the next.
What is left is 1/M of the gradient of the last micro-batch: the loss still falls, on a part of the
data and with small steps, and all ranks agree. A larger learning rate makes up for the length of
the step, not for the rows that are missing. Reported in NVIDIA-NeMo/Automodel#3530 (pipeline
stages that set gradients to None between micro-batches).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """The values are in conf/scenario/grads_wiped_between_microbatches.yaml."""

    updates: int = field(metadata=at_least(2))
    micro: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Accumulate an update over micro-batches; where gradients are wiped is all that differs."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import net, rows, weights

    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    if arm.get("lr") == "times_micro":
        optimizer.param_groups[0]["lr"] *= p.micro
    batches = [rows(rank, p.batch, name=f"micro/{number}") for number in range(p.micro)]
    for update in range(p.updates):
        running = 0.0
        for x, y in batches[-1:] if arm.get("last_only") else batches:
            if arm["wipes"] == "before_each":
                optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y) / p.micro
            loss.backward()
            running += float(loss.detach())
        optimizer.step()
        if arm["wipes"] == "after_update":
            optimizer.zero_grad()
        rank.log(step=update, loss=running)
        rank.snapshot(step=update, weights=weights(model))


@symptom(HOLDS, source="NVIDIA-NeMo/Automodel#3530")
def off_one_process(t: Tables) -> Finding:
    """With zero_grad() inside the loop the weights are not those of one process."""
    return negated(matches(t, "inside_loop", "one_process", "weights"))


@mechanism(HOLDS)
def only_the_last_counts(t: Tables) -> Finding:
    """They are those of a run that never sees any micro-batch but the last."""
    return matches(t, "inside_loop", "last_alone", "weights")


@symptom(REFUTED)
def loss_stops(t: Tables) -> Finding:
    """One sees it in the loss, which does not fall."""
    t.require("inside_loop")
    ratios = []
    for rank in t.ranks("inside_loop"):
        loss = list(t.series("inside_loop", "loss", rank=rank).values())
        ratios.append(loss[-1] / loss[0])
    reason = f"the loss of the window falls to {max(ratios):.2g} of the first one, or less"
    return (refuted if max(ratios) < 1 else holds)(reason, effect=max(ratios), unit="of the first")


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "inside_loop", "weights"))


@remedy(REFUTED)
def larger_rate(t: Tables) -> Finding:
    """The gradient is M times too small, and M times the learning rate makes up for it."""
    return like_one_process(t, "rate_times_micro")


@remedy(HOLDS)
def wipe_after_update(t: Tables) -> Finding:
    """zero_grad() once an update, after it: N ranks train like one process."""
    return like_one_process(t, "after_update")


SCENARIO = Scenario(
    title="zero_grad() inside the accumulation loop: only the last micro-batch is learned",
    family="gradients",
    cause="grads_wiped_between_microbatches",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        only_the_last_counts=("only the last micro-batch is learned", "others are learned, too"),
        loss_stops=("the loss does not fall", "and the loss falls"),
        larger_rate=(
            "M times the rate makes up for it",
            "M times the rate does not make up for it",
        ),
        wipe_after_update=("zero_grad() after the update does", "zero_grad() there is off as well"),
    ),
    arms=(
        one_process("one process", wipes="after_update"),
        one_process("the last alone", name="last_alone", wipes="after_update", last_only=True),
        faulty("inside_loop", "before each micro-batch", wipes="before_each"),
        faulty("rate_times_micro", "the same, lr * M", wipes="before_each", lr="times_micro"),
        fixed("after_update", "after each update", wipes="after_update"),
    ),
    claims=(
        off_one_process,
        only_the_last_counts,
        loss_stops,
        ranks_part,
        larger_rate,
        wipe_after_update,
    ),
    plots=(Plot(metric="loss", title="Loss of each rank's window", log=True),),
)
