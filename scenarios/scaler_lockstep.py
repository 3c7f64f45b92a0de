"""Gradients averaged by hand after unscale_: each rank's GradScaler decides for itself to skip.

`unscale_` notes whether this rank's gradients are finite, and `step` goes by that note. Under DDP
they are averaged before, and all ranks skip alike. Averaged by hand behind it, the rank with the
overflow skips, and the others write its inf into their weights (facebookresearch/mmf#1073).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted, unknown
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

BAD = 2  # Number of the update in which float16 does not hold the rows of the last rank.


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/scaler_lockstep.yaml."""

    steps: int = field(metadata=at_least(4))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    log2_high: int = field(metadata=at_least(11))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train in float16, with one row that overflows; where gradients are averaged differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import net, rows, weights

    kind, averages = rank.device.partition(":")[0], arm["averages"]
    model = net(rank).float()
    forward = DistributedDataParallel(model) if averages == "DDP" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    more = p.log2_high - 10 if arm.get("high") else 0
    scaler = torch.amp.GradScaler(kind, init_scale=2.0 ** (10 + more))
    x, y = (part.float() for part in rows(rank, p.batch))
    for step in range(p.steps + more):
        inputs = x * 1e9 if step == BAD and rank.rank == rank.world_size - 1 else x
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(forward(inputs), y.half())
        scaler.scale(loss).backward()
        if averages != "before unscale_":
            scaler.unscale_(optimizer)
        if averages not in ("nowhere", "DDP"):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad.div_(rank.world_size))  # type: ignore[union-attr]
        if averages == "behind, notes as well":
            notes = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            dist.all_reduce(notes[inputs.device], op=dist.ReduceOp.MAX)
        before, scale = weights(model), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        did = "skips" if torch.equal(before, weights(model)) else "moves"
        did += ", halves" if scaler.get_scale() == scale / 2 else ""
        rank.log(step=step, loss=loss, scale=scaler.get_scale(), did=did)
        rank.snapshot(step=step, weights=weights(model))


def skips(t: Tables, arm: str) -> Finding:
    """Say whether all ranks make every update but the one that overflows, and halve the scale."""
    t.require(arm)
    due = {n: "skips, halves" if n == BAD else "moves" for n in range(t.root_params["steps"])}
    odd = [rank for rank in t.ranks(arm) if t.series(arm, "did", rank=rank) != due]
    said = f"{arm}: ranks {odd or 'none'} do other than skip update {BAD} and halve the scale"
    return (refuted if odd else holds)(said)


@symptom(REFUTED, settles="B70")
def step_raises(t: Tables) -> Finding:
    """scaler.step raises when a gradient is inf or NaN."""
    return negated(skips(t, "one_process"))


@symptom(HOLDS, source="facebookresearch/mmf#1073")
def others_take_it(t: Tables) -> Finding:
    """Averaged behind unscale_, the rank that overflows skips and the others take its inf."""
    t.require("behind")
    did = [t.value("behind", "did", step=BAD, rank=rank) for rank in t.ranks("behind")]
    lost = [t.value("behind", "weights.nonfinite", step=BAD, rank=r) for r in t.ranks("behind")]
    due = all(lost[:-1]) and (lost[-1], did[-1]) == (0, "skips, halves")
    return (holds if due else refuted)(f"by rank: {did}, and weights that are not finite: {lost}")


@mechanism(REFUTED, settles="B73")
def scales_agree(t: Tables) -> Finding:
    """The scalers of all ranks come to one scale by themselves."""
    return ranks_agree(t, "behind", "scale")


@mechanism(HOLDS, settles="B73")
def average_tells(t: Tables) -> Finding:
    """Under DDP they do: averaged gradients carry the overflow to all, and all skip alike."""
    return all_of(skips(t, "ddp"), ranks_agree(t, "ddp", "scale"), ranks_agree(t, "ddp", "weights"))


@remedy(REFUTED, settles="B71")
def lower_start(t: Tables) -> Finding:
    """A scale that starts too high has to be lowered by hand, or nothing is learned."""
    t.require("high")
    did = list(t.series("high", "did").values())
    skipped = float(did.count("skips, halves"))
    if not skipped:
        return unknown("nothing overflows; type a larger scenario.log2_high")
    reason = f"{skipped:g} updates are skipped, then every one of {did.count('moves')} is made"
    return (refuted if did[-1] == "moves" else holds)(reason, effect=skipped, unit="updates")


@remedy(HOLDS)
def agree_first(t: Tables) -> Finding:
    """Average before unscale_, or take the maximum of the scalers' notes: all ranks skip alike."""
    arms = ("before", "told")
    return all_of(*(skips(t, a) for a in arms), *(ranks_agree(t, a, "weights") for a in arms))


SCENARIO = Scenario(
    title="GradScaler on each rank: averaged behind unscale_, one rank skips, the others take inf",
    family="scaling",
    cause="loss_scale_differs",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        others_take_it=("one rank skips, the others are ruined", "all ranks do the same"),
        average_tells=("under DDP all skip", "under DDP the scalers part as well"),
    ),
    arms=(
        reference("one_process", "one process", ranks=1, averages="nowhere"),
        control("high", "the same from 2**24 on", ranks=1, averages="nowhere", high=True),
        faulty("behind", "averaged by hand after unscale_", averages="behind"),
        fixed("ddp", "DDP", averages="DDP"),
        fixed("before", "averaged by hand before unscale_", averages="before unscale_"),
        fixed("told", "scalers agree before step", averages="behind, notes as well"),
    ),
    claims=(step_raises, others_take_it, scales_agree, average_tells, lower_start, agree_first),
)
