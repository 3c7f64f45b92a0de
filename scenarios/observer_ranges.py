"""Ranges of quantisation observers: buffers, so that each rank's are of its own rows, never merged.

Training with fake quantisation rounds the input to 256 steps of a range that an observer collects
in each forward pass. DDP averages gradients; of buffers it sends rank 0's to the others when its
forward begins, or nothing with broadcast_buffers=False. What the other ranks have seen is lost, an
outlier among it. The right merge is that of the extremes, inside of the pass that uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, like_one_process, negated, ranks_agree, repeats_records, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/observer_ranges.yaml."""

    epochs: int = field(metadata=at_least(3))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    outlier: float = field(metadata=at_least(20.0))
    permutations: int = field(metadata=at_least(0))


def fake_quantize(arm: Arm) -> Any:
    """Return what rounds to a range; who merges what ranks collect differs."""
    import torch.distributed as dist

    from scenarios._quantization import quantization

    class Observer(quantization().MovingAverageMinMaxObserver):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            if arm["ranges"] == "extremes":
                dist.all_reduce(self.min_val, op=dist.ReduceOp.MIN)
                dist.all_reduce(self.max_val, op=dist.ReduceOp.MAX)
            elif arm["ranges"] == "averaged":
                for end in (self.min_val, self.max_val):
                    dist.all_reduce(end.div_(dist.get_world_size()))
            return x

    return quantization().FakeQuantize(observer=Observer, quant_min=0, quant_max=255)


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train and evaluate on the same validation rows; what is done about the ranges differs."""
    import torch
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import net, rows, weights

    quantize = fake_quantize(arm).to(rank.device)
    layers = torch.nn.Sequential(quantize, *net(rank))
    model = DistributedDataParallel(layers, broadcast_buffers=arm["ranges"] != "local")
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    held_x, held_y = rows(rank, p.batch, name="validation", whole=True)
    for epoch in range(p.epochs):
        x, y = rows(rank, p.batch, name=f"epoch/{epoch}")
        if epoch == 1:
            x[rank.shard(rank.permutation(p.batch, name="epoch/1")) == p.batch - 1, 0] = p.outlier
        model.train()
        quantize.enable_observer()
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        model.eval()
        quantize.disable_observer()  # eval() does not do it: validation would widen the range
        with torch.no_grad():
            validation = mse_loss(model.module(held_x), held_y)
        low, high = (getattr(quantize.activation_post_process, at) for at in ("min_val", "max_val"))
        rank.log(step=epoch, validation=validation, largest=high)
        rank.snapshot(step=epoch, weights=weights(model), range=torch.stack([low, high]))


@symptom(REFUTED, settles="B48")
def ranges_agree(t: Tables) -> Finding:
    """The ranges that quantisation observers collect agree between ranks."""
    return all_of(ranks_agree(t, "default", "range"), ranks_agree(t, "never_sent", "range"))


@symptom(HOLDS)
def scores_differ(t: Tables) -> Finding:
    """The same validation rows have another loss on every rank, though all weights are equal."""
    scores = [negated(ranks_agree(t, arm, "validation")) for arm in ("never_sent", "default")]
    return all_of(*scores, ranks_agree(t, "never_sent", "weights"))


@mechanism(HOLDS)
def rank0_alone(t: Tables) -> Finding:
    """What DDP sends is rank 0's range of its own rows; what the others collect is lost."""
    t.require("never_sent", "default")
    own, sent = (t.series(arm, "range.digest") for arm in ("never_sent", "default"))
    ends = [t.last(arm, "largest") for arm in ("default", "one_process")]
    reason = "rank 0's range ends at {:.4g}, one process's at {:.4g}".format(*ends)
    found = holds if own == sent and ends[0] != ends[1] else refuted
    return found(reason, effect=ends[0], unit="end of the range")


@mechanism(HOLDS)
def average_is_wrong(t: Tables) -> Finding:
    """Averaged over the ranks the ranges agree, and are not one process's."""
    other = negated(repeats_records(t, "averaged", "one_process", "range"))
    return all_of(ranks_agree(t, "averaged", "range"), other)


@remedy(HOLDS)
def extremes(t: Tables) -> Finding:
    """With the smallest and largest of all ranks taken in the pass, N ranks are one process."""
    exact = repeats_records(t, "extremes", "one_process", "range")
    return all_of(exact, like_one_process(t, "extremes"), ranks_agree(t, "extremes", "validation"))


SCENARIO = Scenario(
    title="Ranges of quantisation observers are buffers: rank 0's own, and never merged",
    family="buffers",
    cause="bn_stats_local",
    params=Params,
    run=run,
    differs=("fake_quantize", "run"),
    check=equal_shares,
    headline=says(
        ranges_agree=("ranges of observers agree", "ranges of observers are each rank's own"),
        rank0_alone=("DDP keeps those of rank 0 alone", "DDP merges them"),
        average_is_wrong=("averaging them is wrong", "averaging them is right"),
        extremes=("their extremes are one process's", "their extremes are off, too"),
    ),
    arms=(
        one_process("one process, whole batches", ranges="sent"),
        faulty("never_sent", "broadcast_buffers=False", ranges="local"),
        faulty("default", "DDP as it is by default", ranges="sent"),
        fixed("averaged", "ranges averaged", ranges="averaged"),
        fixed("extremes", "extremes of all ranks", ranges="extremes"),
    ),
    claims=(ranges_agree, scores_differ, rank0_alone, average_is_wrong, extremes),
    plots=(Plot(metric="largest", title="Upper end of the range", log=True),),
)
