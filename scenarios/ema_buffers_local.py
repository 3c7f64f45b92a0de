"""An average of the weights takes in each rank's own batch norm statistics: a score per GPU.

`AveragedModel(use_buffers=True)`, or a hand-written EMA over `state_dict()`, runs after the
optimizer on every rank. There the running statistics are those of the rank's own rows: DDP makes
buffers equal at the next forward, and only its own, never those of the average. So the averages
part, although DDP's broadcast is on and the trained weights agree bit for bit. Reported in
Megvii-BaseDetection/YOLOX#1176.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, one_of
from scenarios._digits import prerequisite
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/ema_buffers_local.yaml."""

    scale: str = field(metadata=one_of("toy", "real"))
    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(4))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train and average the model as it goes; who sees which statistics differs."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

    from harness.sync_batch_norm import SyncBatchNorm
    from scenarios._digits import held_out, net, right, rows
    from scenarios._models import weights

    kind = SyncBatchNorm if arm["statistics"] == "synchronised" else nn.BatchNorm1d
    first, tanh, last = net(rank, p.scale)
    norm = kind(12, dtype=torch.float64)
    layers = nn.Sequential(first, norm, tanh, last).to(rank.device)
    model = DistributedDataParallel(layers)
    average = AveragedModel(layers, avg_fn=get_ema_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch, p.scale)
    held_x, held_y = held_out(rank, p.batch, p.scale)
    for step in range(p.steps):
        model.train()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if arm["statistics"] == "averaged":
            for statistic in (norm.running_mean, norm.running_var):
                assert statistic is not None
                dist.all_reduce(statistic)
                statistic /= rank.world_size
        average.update_parameters(layers)
        average.eval()
        with torch.no_grad():
            output = average(held_x)
        score = nn.functional.mse_loss(output, held_y)
        rank.log(step=step, score=score, accuracy=right(output, held_y).double().mean())
        statistics = [buffer for buffer in average.buffers() if buffer.is_floating_point()]
        ema = torch.cat([weights(average), *statistics])
        rank.snapshot(step=step, weights=weights(layers), ema=ema)


@symptom(HOLDS, source="Megvii-BaseDetection/YOLOX#1176")
def score_per_rank(t: Tables) -> Finding:
    """Each rank reports another score of the averaged model, on the same held-out rows."""
    return negated(ranks_agree(t, "local", "score"))


@symptom(REFUTED)
def weights_part(t: Tables) -> Finding:
    """The weights that are trained part as well."""
    return negated(ranks_agree(t, "local", "weights"))


@mechanism(REFUTED)
def broadcast_keeps_them_equal(t: Tables) -> Finding:
    """DDP's broadcast of buffers, on by default, keeps the averaged models equal."""
    return ranks_agree(t, "local", "ema")


@remedy(HOLDS)
def average_first(t: Tables) -> Finding:
    """All-reduce the statistics before the average takes them in: one score on all ranks."""
    equal = ranks_agree(t, "averaged_first", "ema")
    return all_of(equal, ranks_agree(t, "averaged_first", "score"))


@remedy(REFUTED)
def average_is_one_process(t: Tables) -> Finding:
    """The averaged model is then that of one process."""
    return like_one_process(t, "averaged_first", "ema")


@remedy(HOLDS)
def synchronised_norm(t: Tables) -> Finding:
    """With a synchronised batch norm the averaged model is that of one process."""
    return like_one_process(t, "synchronised", "ema")


SCENARIO = Scenario(
    title="An average of the weights with buffers: each rank's own statistics, a score per GPU",
    family="buffers",
    cause="ema_buffers_local",
    params=Params,
    run=run,
    check=lambda p, ranks: [*prerequisite(p.scale), *equal_shares(p, ranks)],
    headline=says(
        score_per_rank=("the averaged model has a score per rank", "ranks report one score"),
        weights_part=("the trained weights part, too", "while the trained weights agree"),
        average_first=("statistics averaged first make it one", "averaging first does not help"),
        average_is_one_process=("and one process's", "but not one process's"),
        synchronised_norm=(
            "a synchronised norm makes it that",
            "a synchronised norm does not help",
        ),
    ),
    arms=(
        one_process("one process", statistics="local"),
        faulty("local", "averaged on every rank, with buffers", statistics="local"),
        fixed("averaged_first", "statistics all-reduced before", statistics="averaged"),
        fixed("synchronised", "synchronised batch norm", statistics="synchronised"),
    ),
    claims=(
        score_per_rank,
        weights_part,
        broadcast_keeps_them_equal,
        average_first,
        average_is_one_process,
        synchronised_norm,
    ),
    plots=(Plot(metric="score", title="Loss of the averaged model on held-out rows"),),
)
