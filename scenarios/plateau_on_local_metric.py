"""ReduceLROnPlateau fed with the rank's own loss: each rank cuts its learning rate when it likes.

Every rank evaluates its share of the validation rows and tells its scheduler. The shares are not
equally hard, so that one rank's loss stops improving an epoch before another's, and cuts its rate
alone. Gradients are averaged as ever; the replicas part in the next update, without a message. The
training loss is no better: it is that of the rank's own rows. Reported in
huggingface/accelerate#3797.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, between, one_of, unknown
from scenarios._digits import prerequisite
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/plateau_on_local_metric.yaml."""

    scale: str = field(metadata=one_of("toy", "real"))
    epochs: int = field(metadata=at_least(2))
    threshold: float = field(metadata=between(0.0, 1.0))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train with a plateau scheduler; which loss it is told is all that differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    from scenarios._digits import held_out, net, rows
    from scenarios._models import weights

    model = DistributedDataParallel(net(rank, p.scale))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=p.threshold)
    held_x, held_y = held_out(rank, p.batch, p.scale)
    # The validation file is sorted, easy rows or one class first, and each rank reads its part.
    key = held_y.argmax(dim=1) if p.scale == "real" else held_y.abs().flatten()
    mine = key.argsort(stable=True).chunk(rank.world_size)[rank.rank]
    held_x, held_y = held_x[mine], held_y[mine]
    for epoch in range(p.epochs):
        x, y = rows(rank, p.batch, p.scale, name=f"epoch/{epoch}")
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            told = mse_loss(model.module(held_x), held_y)
        if arm["tells"] == "training loss":
            told = loss.detach()
        elif arm["tells"] == "mean":
            dist.all_reduce(told)
            told /= rank.world_size
        elif arm["tells"] == "rank 0's":
            dist.broadcast(told, src=0)
        scheduler.step(told.item())
        rank.log(step=epoch, told=told, lr=scheduler.get_last_lr()[0])
        rank.snapshot(step=epoch, weights=weights(model))


def with_cuts(t: Tables, arm: str, finding: Finding) -> Finding:
    """Return the finding, or `unknown` where no rank of the arm ever cut its learning rate."""
    rates = {lr for rank in t.ranks(arm) for lr in t.series(arm, "lr", rank=rank).values()}
    if len(rates) > 1:
        return finding
    return unknown("no loss stops improving; type a larger scenario.threshold, or more epochs")


@symptom(HOLDS, source="huggingface/accelerate#3797")
def rates_part(t: Tables) -> Finding:
    """Told its own validation loss, each rank comes to another learning rate."""
    return with_cuts(t, "own_loss", negated(ranks_agree(t, "own_loss", "lr")))


@symptom(HOLDS)
def weights_part(t: Tables) -> Finding:
    """The ranks' weights then part."""
    return with_cuts(t, "own_loss", negated(ranks_agree(t, "own_loss", "weights")))


@remedy(REFUTED)
def training_loss(t: Tables) -> Finding:
    """The training loss is the same on all ranks, since gradients are averaged: tell it that."""
    return with_cuts(t, "training_loss", ranks_agree(t, "training_loss", "lr"))


@remedy(HOLDS)
def mean_loss(t: Tables) -> Finding:
    """Averaged over the ranks, the loss gives them the schedule and weights of one process."""
    right = all_of(like_one_process(t, "mean_loss"), ranks_agree(t, "mean_loss", "lr"))
    return with_cuts(t, "mean_loss", right)


@remedy(HOLDS)
def rank_0_decides(t: Tables) -> Finding:
    """Rank 0's loss, broadcast, keeps the ranks together."""
    together = all_of(ranks_agree(t, "rank_0", "weights"), ranks_agree(t, "rank_0", "lr"))
    return with_cuts(t, "rank_0", together)


SCENARIO = Scenario(
    title="ReduceLROnPlateau on each rank's own loss: learning rates part, and then the weights",
    family="schedule",
    cause="rank_dependent_schedule",
    params=Params,
    run=run,
    check=lambda p, ranks: [*prerequisite(p.scale), *equal_shares(p, ranks)],
    headline=says(
        rates_part=("each rank has a learning rate of its own", "all rates are one"),
        training_loss=("the training loss is shared", "the training loss is the rank's own, too"),
        mean_loss=("the mean loss makes it one process", "the mean loss does not help"),
    ),
    arms=(
        one_process("one process, all validation rows", tells="own"),
        faulty("own_loss", "step(own validation loss)", tells="own"),
        faulty("training_loss", "step(own training loss)", tells="training loss"),
        fixed("mean_loss", "step(mean over ranks)", tells="mean"),
        fixed("rank_0", "step(rank 0's loss), broadcast", tells="rank 0's"),
    ),
    claims=(rates_part, weights_part, training_loss, mean_loss, rank_0_decides),
    plots=(Plot(metric="lr", title="Learning rate of each rank"),),
)
