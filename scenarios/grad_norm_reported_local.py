"""The norm of a sharded gradient read with .item(): that of the rank's shard, and nothing says so.

Under fully_shard a gradient is a DTensor, and its norm one that still has to be added up over the
ranks. `.item()` does not do that: it returns what this rank has, another number on each of them,
all too small. Training is right. What clip_grad_norm_ returns has been added up (torch 2.13); when
it had not, it was reported in pytorch/torchtitan#766.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, is_rounding, like_one_process, negated, ranks_agree, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Plot, Scenario, at_least
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/grad_norm_reported_local.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a sharded net; how the norm of its first layer's gradient is read is what differs."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from scenarios._models import net, rows, weights

    mesh = init_device_mesh(rank.device.partition(":")[0], (rank.world_size,))
    model = net(rank)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    norms = []
    for step in range(p.steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        first: Any = model[0].weight
        norm: Any = first.grad.norm()
        if arm["reads"] == "full_tensor":
            norm = norm.full_tensor()
        elif arm["reads"] == "clip_grad_norm_":
            norm = torch.nn.utils.clip_grad_norm_(first, math.inf)
        elif arm["reads"] == "mean":
            norm = norm.to_local()
            dist.all_reduce(norm)
            norm = norm / rank.world_size
        norms.append(norm.item())
        rank.log(step=step, norm=norms[-1])
        optimizer.step()
        rank.snapshot(step=step, weights=weights(model))
    rank.snapshot(step=p.steps - 1, norms=torch.tensor(norms, dtype=torch.float64))


def norm_of_whole(t: Tables, arm: str) -> Finding:
    """Decide: every rank reports, step by step, the norm that one process reports."""
    return like_one_process(t, arm, "norms")


@symptom(HOLDS, source="pytorch/torchtitan#766")
def ranks_report_others(t: Tables) -> Finding:
    """grad.norm().item() gives another number on every rank, and none of the whole gradient."""
    return all_of(negated(ranks_agree(t, "item", "norm")), negated(norm_of_whole(t, "item")))


@mechanism(HOLDS)
def norms_of_shards(t: Tables) -> Finding:
    """They are the norms of the shards: their squares add up to the square of the norm."""
    t.require("item", "one_process")
    last = t.root_params["steps"] - 1
    parts = [t.value("item", "norm", step=last, rank=rank) for rank in t.ranks("item")]
    whole = t.value("one_process", "norm", step=last)
    gap = abs(math.hypot(*parts) / whole - 1.0)
    floor = rounding(t, "one_process", "norms", step=last)
    return is_rounding(gap, floor, f"together they are {gap:.2g} from {whole:.4g}", "share")


@symptom(REFUTED)
def training_is_off(t: Tables) -> Finding:
    """Then the training is not that of one process."""
    return negated(like_one_process(t, "item"))


@remedy(REFUTED)
def average_them(t: Tables) -> Finding:
    """Averaged over the ranks the numbers are the norm."""
    return norm_of_whole(t, "mean")


@remedy(HOLDS)
def full_tensor(t: Tables) -> Finding:
    """grad.norm().full_tensor() is the norm that one process reports, on every rank."""
    return norm_of_whole(t, "full_tensor")


@remedy(HOLDS, source="pytorch/torchtitan#19", before={"2.10": REFUTED})
def clip_returns_it(t: Tables) -> Finding:
    """So is what clip_grad_norm_ returns."""
    return norm_of_whole(t, "clip")


SCENARIO = Scenario(
    title="The norm of a sharded gradient read with .item(): another number on each rank",
    family="metrics",
    cause="grad_norm_reported_local",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        ranks_report_others=(".item() gives the norm of a shard", ".item() gives the norm"),
        training_is_off=("training is off, too", "training is right"),
        average_them=("the mean over ranks is right", "the mean over ranks is as wrong"),
    ),
    arms=(
        one_process("one process", reads="item"),
        faulty("item", "grad.norm().item()", reads="item"),
        faulty("mean", "the same, averaged over ranks", reads="mean"),
        fixed("full_tensor", "grad.norm().full_tensor().item()", reads="full_tensor"),
        fixed("clip", "clip_grad_norm_(..., inf).item()", reads="clip_grad_norm_"),
    ),
    claims=(
        *(ranks_report_others, norms_of_shards, training_is_off),
        *(average_them, full_tensor, clip_returns_it),
    ),
    plots=(Plot(metric="norm", title="Gradient norm that each rank reports"),),
)
