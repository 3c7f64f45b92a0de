"""A loss logged by rank 0 is the loss of rank 0's rows, whatever the log calls it.

`if rank == 0: log(loss.item())` shows one share of the batch. Replicas are equal, training is
right, and the curve is that of another, smaller batch: noisier, and off for good where rank 0's
rows are harder. dist.reduce sums to one rank and leaves the others their own number, so that a
decision taken from it differs. Reported in Lightning-AI/pytorch-lightning#12407,
KellerJordan/modded-nanogpt#2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, is_rounding, like_one_process, negated, ranks_agree, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Plot, Scenario, at_least
from harness.tables import relative_l2
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/log_is_rank0_only.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train on a file sorted by difficulty; what becomes of the loss before the log differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import net, rows, weights

    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch, whole=True)
    # The file is sorted, easy rows first, and each rank reads its own part of it.
    mine = y.abs().flatten().argsort().chunk(rank.world_size)[rank.rank]
    mine = mine[rank.permutation(len(mine), name="mine")]
    curve = []
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        logged = loss.detach().clone()
        if arm["logs"] == "reduce":
            dist.reduce(logged, dst=0)
            logged /= rank.world_size
        elif arm["logs"] == "all_reduce":
            dist.all_reduce(logged)
            logged /= rank.world_size
        curve.append(logged)
        rank.log(step=step, logged=logged)
        rank.snapshot(step=step, weights=weights(model))
    rank.snapshot(step=p.steps, curve=torch.stack(curve))


def shows_all_rows(t: Tables, arm: str, rank: int) -> Finding:
    """Decide: the curve that this rank logs is that of one process, up to rounding."""
    t.require(arm, "one_process")
    step = t.root_params["steps"]
    due = t.snapshot("one_process", "curve", step=step)
    gap = relative_l2(t.snapshot(arm, "curve", step=step, rank=rank), due)
    floor = rounding(t, "one_process", "curve", step=step)
    reason = f"{arm}: the curve of rank {rank} is {gap:.2g} from that of one process"
    return is_rounding(gap, floor, reason, "relative L2 distance")


@symptom(HOLDS, source="Lightning-AI/pytorch-lightning#12407")
def another_curve(t: Tables) -> Finding:
    """The loss that rank 0 logs is not that of the batch."""
    return negated(shows_all_rows(t, "rank_0", 0))


@mechanism(REFUTED)
def training_is_off(t: Tables) -> Finding:
    """Then the training is not that of one process either."""
    return negated(like_one_process(t, "rank_0"))


@remedy(REFUTED)
def shared_by_ddp(t: Tables) -> Finding:
    """DDP averages, so the loss is the same on all ranks, and any of them may log it."""
    return ranks_agree(t, "rank_0", "logged")


@remedy(HOLDS)
def reduce_it(t: Tables) -> Finding:
    """dist.reduce to rank 0 gives rank 0 the loss of the batch."""
    return shows_all_rows(t, "reduced", 0)


@remedy(REFUTED)
def reduced_for_all(t: Tables) -> Finding:
    """It gives the other ranks that loss as well, to decide by."""
    return ranks_agree(t, "reduced", "logged")


@remedy(HOLDS, source="KellerJordan/modded-nanogpt#2")
def all_reduce(t: Tables) -> Finding:
    """All-reduced, every rank has the loss of the batch."""
    shown = (shows_all_rows(t, "all_reduced", rank) for rank in t.ranks("all_reduced"))
    return all_of(*shown, ranks_agree(t, "all_reduced", "logged"))


SCENARIO = Scenario(
    title="A loss logged by rank 0 is that of its own rows: training is right, the curve is not",
    family="metrics",
    cause="log_is_rank0_only",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        another_curve=("rank 0 logs another curve", "rank 0 logs the curve of the batch"),
        training_is_off=("of another training", "of the right training"),
        reduced_for_all=("reduce tells all ranks", "reduce tells rank 0 only"),
    ),
    arms=(
        one_process("one process, all rows", logs="own"),
        faulty("rank_0", "if rank == 0: log(loss)", logs="own"),
        faulty("reduced", "dist.reduce(loss, dst=0)", logs="reduce"),
        fixed("all_reduced", "dist.all_reduce(loss)", logs="all_reduce"),
    ),
    claims=(another_curve, training_is_off, shared_by_ddp, reduce_it, reduced_for_all, all_reduce),
    plots=(Plot(metric="logged", title="The loss that each rank logs", log=True),),
)
