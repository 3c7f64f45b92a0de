"""Early stopping on a rank's own validation loss: one rank leaves the loop, the others wait.

Each rank evaluates its own validation rows and stops when their loss has reached the target. The
rank with the easiest rows is there first; the others go into the next step, whose gradient
reduction it never joins, and wait until the collective times out (30 minutes by default). A barrier
before the decision makes ranks wait for each other; it does not tell them what was decided.
Reported in Lightning-AI/pytorch-lightning#379, talmolab/sleap-nn#471 (the barrier).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import like_one_process, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted, unknown
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/stop_decision_local.yaml."""

    epochs: int = field(metadata=at_least(2))
    target: float
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    hang_timeout_s: float = field(metadata=at_least(0.1))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train until the validation loss has reached the target; who decides is what differs."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from harness.waiting import gives_up
    from scenarios._models import net, rows, weights

    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    held_x, held_y = rows(rank, p.batch, name="validation", whole=True)
    # The validation file is sorted, easy rows first, and each rank reads its own part of it.
    mine = held_y.abs().flatten().argsort().chunk(rank.world_size)[rank.rank]
    held_x, held_y = held_x[mine], held_y[mine]
    with gives_up(rank, arm, p.hang_timeout_s):
        for epoch in range(p.epochs):
            rank.log(step=epoch, phase="begins", epoch=epoch)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                validation = F.mse_loss(model.module(held_x), held_y)
            if arm["decides"] == "barrier":
                dist.barrier()
            if arm["decides"] == "mean":
                dist.all_reduce(validation)
                validation /= rank.world_size
            rank.snapshot(step=epoch, weights=weights(model))
            rank.log(step=epoch, validation=validation)
            if validation <= p.target:
                break


def waits_in_vain(t: Tables, arm: str) -> Finding:
    """Say whether one rank has left the loop while another waits for it in the next epoch."""
    t.require(arm)
    raised = {r: t.value(arm, "raised", step=0, phase="gave up", rank=r) for r in t.ranks(arm)}
    begun = {r: t.last(arm, "epoch", phase="begins", rank=r) for r in t.ranks(arm)}
    left = [rank for rank, error in raised.items() if not error]
    waiting = [rank for rank, error in raised.items() if error]
    reached = min(t.last(arm, "validation", rank=r) for r in left) if left else float("inf")
    if reached > t.root_params["target"]:
        return unknown("no rank reached scenario.target; type a higher one, or more epochs")
    if not waiting and len(set(begun.values())) == 1:
        return unknown(f"all ranks stopped after epoch {begun[0]}; type another scenario.target")
    first = min(begun[rank] for rank in left)
    numbers = {"evidence": {"left_after_epoch": first, "raised": raised[(waiting or [0])[0]]}}
    if waiting and all(begun[rank] == first + 1 for rank in waiting):
        return holds(
            f"ranks {left} stop after epoch {first}; ranks {waiting} wait in epoch {first + 1} "
            "until the timeout",
            **numbers,
        )
    return refuted(f"the ranks stop after epochs {sorted(set(begun.values()))}", **numbers)


@symptom(HOLDS, source="Lightning-AI/pytorch-lightning#379")
def others_wait(t: Tables) -> Finding:
    """When one rank stops the others wait in the next step until the timeout."""
    return waits_in_vain(t, "own_loss")


@remedy(REFUTED, source="talmolab/sleap-nn#471")
def barrier_helps(t: Tables) -> Finding:
    """A barrier before the decision keeps the ranks together."""
    return negated(waits_in_vain(t, "barrier"))


@remedy(HOLDS)
def decide_together(t: Tables) -> Finding:
    """Averaging the loss first stops all ranks in the epoch in which one process stops."""
    return like_one_process(t, "mean_loss")


SCENARIO = Scenario(
    title="Early stopping decided on each rank: one leaves the loop, the others wait for ever",
    family="hangs",
    cause="stop_decision_local",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        others_wait=("a rank that stops on its own loss leaves the others waiting", "nobody waits"),
        barrier_helps=("a barrier prevents it", "a barrier does not prevent it"),
        decide_together=("the mean loss stops all in one epoch", "the mean loss does not help"),
    ),
    arms=(
        one_process("one process, all validation rows", decides="own"),
        faulty("own_loss", "each rank decides on its own loss", decides="own", isolated=True),
        faulty("barrier", "the same behind a barrier", decides="barrier", isolated=True),
        fixed("mean_loss", "all decide on the averaged loss", decides="mean"),
    ),
    claims=(others_wait, barrier_helps, decide_together),
)
