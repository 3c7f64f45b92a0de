"""Ranks that start from different weights: averaged gradients never bring them together.

The script seeds by rank before it builds the model, as dropout wants it, and whatever wraps the
model does not broadcast: gradients averaged by hand, or DDP(init_sync=False). Every gradient is
then equal bit for bit, so all ranks take the same steps from different places, and their distance
stays what it was. The loss still falls. Reported in pytorch/torchtitan#166, allenai/OLMo-core#319,
mosaicml/llm-foundry#830.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, is_rounding, like_one_process, negated, ranks_agree, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, unknown
from harness.tables import relative_l2
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

FAULTY = ("by_hand", "init_sync_off")


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/init_differs.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train from weights that each rank draws for itself; how they are made equal differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import FEATURES, gradients, mlp, rows, weights

    own = rank.generator(f"net of rank {rank.rank}")
    model: torch.nn.Module = mlp((FEATURES, 12, 1), generator=own).to(rank.device)
    if arm["wrap"] == "init_sync_off":
        model = DistributedDataParallel(model, init_sync=False)
    elif arm["wrap"] == "ddp":
        model = DistributedDataParallel(model)
    elif arm["wrap"] == "broadcast":
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        rank.snapshot(step=step, weights=weights(model))
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        if arm["wrap"] in ("by_hand", "broadcast"):
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= rank.world_size
        optimizer.step()
        rank.log(step=step, loss=loss)
        rank.digest(step=step, gradients=gradients(model))


@symptom(HOLDS, source="pytorch/torchtitan#166")
def weights_differ(t: Tables) -> Finding:
    """Weights differ between ranks from before the first update on."""
    return all_of(*(negated(ranks_agree(t, arm, "weights")) for arm in FAULTY))


@symptom(REFUTED)
def gradients_show_it(t: Tables) -> Finding:
    """Comparing the ranks' averaged gradients finds it."""
    return negated(all_of(*(ranks_agree(t, arm, "gradients") for arm in FAULTY)))


@mechanism(REFUTED)
def training_closes_the_gap(t: Tables) -> Finding:
    """Averaged gradients draw the ranks together as training goes on."""
    t.require("by_hand")
    last = t.root_params["steps"] - 1
    start, end = (
        t.snapshot("by_hand", "weights", step=step, rank=1)
        - t.snapshot("by_hand", "weights", step=step)
        for step in (0, last)
    )
    if not start.any():
        return unknown("ranks 0 and 1 start from the same weights: there is no gap to close")
    # Each update rounds each weight once.
    floor = dtype_floor(EPS["float64"] * last)
    gap = relative_l2(end, start)
    reason = f"in {last} updates the difference of ranks 0 and 1 has changed by {gap:.2g} of itself"
    return negated(is_rounding(gap, floor, reason, "relative L2 distance"))


@remedy(HOLDS)
def wrap_in_ddp(t: Tables) -> Finding:
    """DDP as it is by default hands out rank 0's weights: N ranks train like one process."""
    return like_one_process(t, "ddp")


@remedy(HOLDS, source="mosaicml/llm-foundry#830")
def broadcast_first(t: Tables) -> Finding:
    """Broadcast the weights once, then average by hand: the same."""
    return like_one_process(t, "broadcast")


SCENARIO = Scenario(
    title="Ranks that start from different weights stay exactly as far apart, gradients equal",
    family="initial state",
    cause="init_differs",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        weights_differ=("without a broadcast ranks keep their own weights", "weights are equal"),
        training_closes_the_gap=("training closes the gap", "training does not close the gap"),
        gradients_show_it=("gradients show it", "all gradients are equal"),
    ),
    arms=(
        one_process("one process", wrap="ddp"),
        faulty("by_hand", "gradients averaged by hand, no broadcast", wrap="by_hand"),
        faulty("init_sync_off", "DDP(init_sync=False)", wrap="init_sync_off"),
        fixed("ddp", "DDP", wrap="ddp"),
        fixed("broadcast", "weights broadcast once", wrap="broadcast"),
    ),
    claims=(
        weights_differ,
        gradients_show_it,
        training_closes_the_gap,
        wrap_in_ddp,
        broadcast_first,
    ),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
