"""Calling the module inside DDP instead of the wrapper: every rank trains a model of its own.

DDP arms its reducer in its own forward. Whoever calls `model.module(x)`, or an adapter that has
kept the bare network, gets the same output and the same graph, and backward then reduces nothing.
No error, no hang, no warning; the loss falls on every rank. Reported as multi-GPU LoRA training
that is no better than one GPU (kohya-ss/sd-scripts#989).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import counts, like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/ddp_forward_bypassed.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Fit a small net on this rank's rows; which forward is called is all that differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from harness.collectives import count_collectives
    from scenarios._models import net, rows, weights

    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        optimizer.zero_grad()
        output = model.module(x) if arm["bypassed"] else model(x)
        loss = torch.nn.functional.mse_loss(output, y)
        with count_collectives() as calls:
            loss.backward()
        if arm.get("by_hand"):
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= rank.world_size
        optimizer.step()
        rank.log(step=step, loss=loss, reductions=calls.count("all_reduce"))
        rank.snapshot(step=step, weights=weights(model))


@symptom(HOLDS, source="kohya-ss/sd-scripts#989")
def ranks_part(t: Tables) -> Finding:
    """When DDP's forward is bypassed the ranks' weights part."""
    return negated(ranks_agree(t, "bypassed", "weights"))


@mechanism(HOLDS, source="kohya-ss/sd-scripts#2244")
def nothing_reduced(t: Tables) -> Finding:
    """Backward then issues no all-reduce at all."""
    return counts(t, "bypassed", "reductions", 0, "all-reduces in backward")


@symptom(REFUTED)
def loss_stops(t: Tables) -> Finding:
    """One sees it in the loss, which stops falling."""
    t.require("bypassed")
    losses = [list(t.series("bypassed", "loss", rank=r).values()) for r in t.ranks("bypassed")]
    stuck = [rank for rank, loss in enumerate(losses) if not loss[-1] < loss[0]]
    numbers = {"effect": max(loss[-1] / loss[0] for loss in losses), "unit": "last loss / first"}
    if stuck:
        return holds(f"the loss of ranks {stuck} does not fall", **numbers)
    return refuted("the loss falls on every rank, each fitting its own rows", **numbers)


@remedy(HOLDS)
def call_the_wrapper(t: Tables) -> Finding:
    """Call the wrapper: N ranks train like one process."""
    return like_one_process(t, "wrapper")


@remedy(HOLDS)
def average_by_hand(t: Tables) -> Finding:
    """Average the gradients by hand after backward: the same."""
    return like_one_process(t, "by_hand")


SCENARIO = Scenario(
    title="Calling the module inside DDP: gradients are never averaged, and nothing says so",
    family="synchronisation",
    cause="ddp_forward_bypassed",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        ranks_part=("bypassing DDP's forward makes one model per rank", "replicas stay equal"),
        nothing_reduced=("backward sends nothing", "backward still sends something"),
        loss_stops=("the loss stops falling", "and the loss falls all the same"),
    ),
    arms=(
        one_process("one process, all rows", bypassed=False),
        faulty("bypassed", "model.module(x)", bypassed=True),
        fixed("wrapper", "model(x)", bypassed=False),
        fixed("by_hand", "model.module(x), average by hand", bypassed=True, by_hand=True),
    ),
    claims=(ranks_part, nothing_reduced, loss_stops, call_the_wrapper, average_by_hand),
    plots=(Plot(metric="loss", title="Loss of each rank's own rows", log=True),),
)
