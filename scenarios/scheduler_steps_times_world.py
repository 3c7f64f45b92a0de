"""A wrapper that steps the scheduler once per rank: the learning rate ends after 1/N of the run.

The schedule is written in updates, then a library calls `scheduler.step()` world_size times per
update, because it expects a schedule written in batches of one process. Ranks agree on every
learning rate and every weight, so comparing them finds nothing; counting scheduler steps per
update does. Reported in huggingface/accelerate#2142 and #2926, huggingface/diffusers#3954.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import (
    all_of,
    like_one_process,
    matches,
    negated,
    ranks_agree,
    repeats_records,
    says,
)
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; the values are in conf/scenario/scheduler_steps_times_world.yaml."""

    updates: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train with a learning rate that falls linearly to zero."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import net, rows, weights

    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    total = p.updates * rank.world_size if arm["total"] == "times_world" else p.updates
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.0, 1 - n / total))
    x, y = rows(rank, p.batch)
    for update in range(p.updates):
        rank.log(step=update, lr=optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        for _ in range(rank.world_size if arm["steps"] == "times_world" else 1):
            scheduler.step()
        rank.snapshot(step=update, weights=weights(model))


def back_on_schedule(t: Tables, arm: str) -> Finding:
    """Say whether the arm has every learning rate of one process, and its weights."""
    return all_of(like_one_process(t, arm), repeats_records(t, arm, "one_process", "lr"))


@symptom(HOLDS, source="huggingface/accelerate#2142")
def ends_early(t: Tables) -> Finding:
    """The learning rate reaches its end after 1/N of the updates."""
    t.require("once_per_rank", "one_process")
    updates, ranks = t.root_params["updates"], len(t.ranks("once_per_rank"))
    due = -(-updates // ranks)
    ends = [
        min(
            (step for step, lr in t.series("once_per_rank", "lr", rank=r).items() if lr == 0.0),
            default=updates,
        )
        for r in t.ranks("once_per_rank")
    ]
    numbers = {"effect": float(max(ends)), "unit": f"updates of {updates} with a learning rate"}
    reason = f"the learning rate is 0 from update {max(ends)} of {updates} on, with {ranks} ranks"
    return (holds if set(ends) == {due} else refuted)(reason, **numbers)


@symptom(REFUTED)
def ranks_differ(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "once_per_rank", "weights"))


@symptom(HOLDS)
def undertrained(t: Tables) -> Finding:
    """N ranks end with other weights than one process with the same batches."""
    return negated(matches(t, "once_per_rank", "one_process", "weights"))


@remedy(HOLDS)
def step_once(t: Tables) -> Finding:
    """One scheduler step per update: the schedule and the weights of one process."""
    return back_on_schedule(t, "once")


@remedy(HOLDS)
def multiply_the_total(t: Tables) -> Finding:
    """Keep the N steps and write the schedule in N times as many: the same."""
    return back_on_schedule(t, "total_times_world")


SCENARIO = Scenario(
    title="scheduler.step() once per rank: the learning rate is zero after 1/N of the run",
    family="schedule",
    cause="scheduler_steps_times_world",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        ends_early=("the learning rate ends after 1/N of the updates", "the rate ends elsewhere"),
        ranks_differ=("the ranks differ", "the ranks agree on every weight"),
        undertrained=("and are all off the one-process run", "and train like one process"),
    ),
    arms=(
        one_process("one process, one step per update", steps="one", total="updates"),
        faulty("once_per_rank", "N steps per update", steps="times_world", total="updates"),
        fixed("once", "one step per update", steps="one", total="updates"),
        fixed(
            "total_times_world", "N steps, total times N", steps="times_world", total="times_world"
        ),
    ),
    claims=(ends_early, ranks_differ, undertrained, step_once, multiply_the_total),
    plots=(Plot(metric="lr", title="Learning rate at each update"),),
)
