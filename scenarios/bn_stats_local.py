"""Running statistics of batch norm follow each rank's own batches: every rank scores differently.

Gradients are averaged, buffers are not: DDP sends rank 0's buffers to the others when its forward
begins, and the forward then updates them on each rank again. So ranks differ after every update,
with broadcast_buffers=False for good, by default until the next forward of the wrapper; a user who
evaluates `model.module` is in between. All weights are equal all the while. Reported in
pytorch/pytorch#13711, huggingface/pytorch-image-models#110, open-mmlab/mmdetection#4582.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, one_of
from scenarios._digits import prerequisite
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/bn_stats_local.yaml."""

    scale: str = field(metadata=one_of("toy", "real"))
    epochs: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """Refuse unequal shares, and those of one row: batch norm wants two."""
    few = f"scenario.batch={p.batch} is not two rows a rank; type scenario.batch={2 * ranks}"
    return [*prerequisite(p.scale), *([few] if p.batch < 2 * ranks else equal_shares(p, ranks))]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train and evaluate on the same validation rows; what is done about the buffers differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel

    from harness.sync_batch_norm import convert_sync_batch_norm
    from scenarios._digits import held_out, net, right, rows
    from scenarios._models import weights

    held_x, held_y = held_out(rank, p.batch, p.scale)
    norm = torch.nn.BatchNorm1d(held_x.shape[1], dtype=torch.float64, device=rank.device)
    layers: torch.nn.Module = torch.nn.Sequential(norm, *net(rank, p.scale))
    if arm["buffers"] == "synchronised":
        layers = convert_sync_batch_norm(layers)
    model = DistributedDataParallel(layers, broadcast_buffers=arm["buffers"] != "local")
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    for epoch in range(p.epochs):
        x, y = rows(rank, p.batch, p.scale, name=f"epoch/{epoch}")
        model.train()
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        if arm["buffers"] == "averaged":
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    dist.all_reduce(buffer)
                    buffer /= rank.world_size
        model.eval()
        with torch.no_grad():
            output = model.module(held_x)
        validation, accuracy = mse_loss(output, held_y), right(output, held_y).double().mean()
        rank.log(step=epoch, validation=validation, accuracy=accuracy)
        mean, variance, _ = model.buffers()
        rank.snapshot(step=epoch, weights=weights(model), mean=mean, variance=variance)


@symptom(HOLDS, source="pytorch/pytorch#13711", settles="A04")
def scores_differ(t: Tables) -> Finding:
    """With broadcast_buffers=False every rank has another loss on the same validation rows."""
    return negated(ranks_agree(t, "never_sent", "validation"))


@symptom(REFUTED)
def weights_show_it(t: Tables) -> Finding:
    """Comparing the ranks' weights finds it."""
    return negated(all_of(*(ranks_agree(t, arm, "weights") for arm in ("never_sent", "default"))))


@remedy(REFUTED, source="huggingface/pytorch-image-models#110")
def default_helps(t: Tables) -> Finding:
    """By default DDP sends the buffers around, so that evaluating model.module is safe."""
    return ranks_agree(t, "default", "validation")


@remedy(HOLDS, source="huggingface/pytorch-image-models#110")
def averaging_helps(t: Tables) -> Finding:
    """Averaged before the evaluation, the losses are equal and the means one process's."""
    same = like_one_process(t, "averaged", "mean")
    return all_of(same, ranks_agree(t, "averaged", "validation"))


@mechanism(REFUTED)
def variance_is_whole(t: Tables) -> Finding:
    """The averaged running variance is that of one process."""
    return matches(t, "averaged", "one_process", "variance")


@remedy(HOLDS, settles="A04")
def synchronise(t: Tables) -> Finding:
    """A synchronised norm gives one process's mean, variance and weights on every rank."""
    same = [like_one_process(t, "synchronised", name) for name in ("mean", "variance", "weights")]
    return all_of(*same, ranks_agree(t, "synchronised", "validation"))


SCENARIO = Scenario(
    title="Batch norm's running statistics are each rank's own: one model, a score per rank",
    family="buffers",
    cause="bn_stats_local",
    params=Params,
    run=run,
    check=check,
    headline=says(
        scores_differ=("local running statistics give a score per rank", "the scores are equal"),
        weights_show_it=("the weights part, too", "all weights are equal"),
        default_helps=("DDP's default prevents it", "DDP's default does not prevent it"),
        variance_is_whole=("averaged variances are right", "averaged variances are wrong"),
        synchronise=("a synchronised norm is one process", "a synchronised norm is off, too"),
    ),
    arms=(
        one_process("one process, whole batches", buffers="sent"),
        faulty("never_sent", "DDP(broadcast_buffers=False)", buffers="local"),
        faulty("default", "DDP as it is by default", buffers="sent"),
        fixed("averaged", "buffers averaged before the evaluation", buffers="averaged"),
        fixed("synchronised", "statistics over all ranks", buffers="synchronised"),
    ),
    claims=(
        scores_differ,
        weights_show_it,
        default_helps,
        averaging_helps,
        variance_is_whole,
        synchronise,
    ),
    plots=(Plot(metric="validation", title="Loss on the same validation rows", log=True),),
)
