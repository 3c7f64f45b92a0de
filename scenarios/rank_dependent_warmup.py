"""A warm-up length computed from the weights before DDP has made them equal: one schedule per rank.

The rule takes the standard deviation of the fresh weights. Ranks are seeded apart, as dropout wants
it, so each one draws other weights and rounds to another number of steps. DDP then hands out rank
0's weights and keeps all gradients equal bit for bit; nothing ever looks at the learning rates, and
the replicas part in the first update.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, unknown
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/rank_dependent_warmup.yaml."""

    steps: int = field(metadata=at_least(2))
    base: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train with a linear warm-up; where its length is computed is all that differs."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import FEATURES, gradients, mlp, rows, weights

    def length(model: torch.nn.Module) -> int:
        return max(1, round(p.base / float(weights(model).std())))

    seeds = rank.generator(f"rank {rank.rank}")
    model: torch.nn.Module = mlp((FEATURES, 12, 1), generator=seeds).to(rank.device)
    warmup = length(model)
    model = DistributedDataParallel(model)
    if arm["computed"] == "after_wrapping":
        warmup = length(model)
    elif arm["computed"] == "on_rank_0":
        told = torch.tensor(warmup, device=rank.device)
        dist.broadcast(told, src=0)
        warmup = int(told)
    rank.log(step=0, phase="computed", warmup=warmup)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / warmup))
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        rank.log(step=step, lr=ramp.get_last_lr()[0])
        optimizer.step()
        ramp.step()
        rank.snapshot(step=step, gradients=gradients(model), weights=weights(model))


def with_lengths_apart(t: Tables, finding: Finding) -> Finding:
    """Return the finding, or `unknown` where all ranks came to the same length by chance."""
    lengths = [t.last("before_wrapping", "warmup", rank=r) for r in t.ranks("before_wrapping")]
    if len(set(lengths)) > 1:
        return finding
    return unknown(f"all ranks round to {lengths[0]} steps; type a larger scenario.base")


@mechanism(HOLDS, settles="~A36")
def lengths_differ(t: Tables) -> Finding:
    """Before wrapping, ranks seeded apart compute warm-ups of different lengths."""
    return with_lengths_apart(t, negated(ranks_agree(t, "before_wrapping", "warmup")))


@symptom(HOLDS)
def weights_part(t: Tables) -> Finding:
    """The ranks' weights then part."""
    return with_lengths_apart(t, negated(ranks_agree(t, "before_wrapping", "weights")))


@symptom(REFUTED)
def gradients_show_it(t: Tables) -> Finding:
    """Comparing the ranks' gradients finds it."""
    return with_lengths_apart(t, negated(ranks_agree(t, "before_wrapping", "gradients")))


@remedy(HOLDS)
def compute_after(t: Tables) -> Finding:
    """Compute it after wrapping: N ranks train like one process."""
    return like_one_process(t, "after_wrapping")


@remedy(HOLDS)
def broadcast_it(t: Tables) -> Finding:
    """Let rank 0 compute it and broadcast: the same."""
    return like_one_process(t, "from_rank_0")


SCENARIO = Scenario(
    title="A warm-up computed from the weights before DDP: a schedule per rank, equal gradients",
    family="schedule",
    cause="rank_dependent_schedule",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        lengths_differ=("every rank has a warm-up of its own", "all warm-ups are one"),
        weights_part=("and the weights part", "and the weights stay equal"),
        gradients_show_it=("the gradients show it", "while all gradients are equal"),
    ),
    arms=(
        one_process("one process", computed="before_wrapping"),
        faulty("before_wrapping", "computed before DDP, per rank", computed="before_wrapping"),
        fixed("after_wrapping", "computed after DDP", computed="after_wrapping"),
        fixed("from_rank_0", "computed on rank 0, broadcast", computed="on_rank_0"),
    ),
    claims=(lengths_differ, weights_part, gradients_show_it, compute_after, broadcast_it),
    plots=(Plot(metric="lr", title="Learning rate of each rank"),),
)
