"""Gradient accumulation scaled twice, or not at all: the rate is divided or multiplied by M.

The loop divides each micro-batch's loss by their number M, and so does the library around it: an
update is then 1/M of what it should be. Nobody divides: M times. The ranks agree on every weight,
and the loss falls. What is blamed instead is DDP, which without no_sync() averages at every
micro-batch: that is right to rounding, and only sends M times as much.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, cost, mechanism, remedy, symptom
from harness.findings import counts, is_rounding, like_one_process, matches, negated, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Plot, Scenario, at_least
from harness.tables import relative_l2

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/accumulation_factor.yaml."""

    updates: int = field(metadata=at_least(2))
    micro_batches: int = field(metadata=at_least(3))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """Every micro-batch is shared equally."""
    parts = ranks * p.micro_batches
    if p.batch % parts == 0:
        return []
    enough = parts * max(1, round(p.batch / parts))
    return [f"scenario.batch={p.batch} is no multiple of {parts}; type scenario.batch={enough}"]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Accumulate gradients over micro-batches; what the loss is divided by, and where, differs."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from harness.collectives import count_collectives
    from scenarios._models import gradients, net, rows, weights

    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for update in range(p.updates):
        optimizer.zero_grad()
        parts = list(zip(x.chunk(p.micro_batches), y.chunk(p.micro_batches), strict=True))
        with count_collectives() as calls:
            for micro, (inputs, targets) in enumerate(parts):
                alone: Any = nullcontext()
                if arm["averages"] == "last" and micro < p.micro_batches - 1:
                    alone = model.no_sync()
                with alone:
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                    (loss / p.micro_batches ** arm["divided"]).backward()
        optimizer.step()
        # DDP regroups its buckets once, after the first reduction, and sends their order around.
        if update:
            rank.log(step=update, reductions=calls.count("all_reduce"))
        rank.log(step=update, loss=loss)
        rank.snapshot(step=update, gradients=gradients(model), weights=weights(model))


def factor_is(t: Tables, arm: str, power: int) -> Finding:
    """Decide: the first gradient is that of one process times the micro-batches to a power."""
    t.require(arm, "one_process")
    factor = float(t.root_params["micro_batches"]) ** power
    due = factor * t.snapshot("one_process", "gradients", step=0)
    found = [t.snapshot(arm, "gradients", step=0, rank=rank) for rank in t.ranks(arm)]
    gap = max(relative_l2(gradient, due) for gradient in found)
    floor = rounding(t, "one_process", "gradients", step=0)
    reason = f"{arm}: the first gradient is {gap:.2g} from {factor:.3g} times that of one process"
    return is_rounding(gap, floor, reason, "relative L2 distance")


@symptom(HOLDS)
def divided_twice(t: Tables) -> Finding:
    """Divided by M in the loop and in the library, the gradient is 1/M of one process's."""
    return factor_is(t, "twice", -1)


@symptom(HOLDS)
def not_divided(t: Tables) -> Finding:
    """Divided nowhere it is M times that."""
    return factor_is(t, "never", 1)


@mechanism(REFUTED)
def averaged_again(t: Tables) -> Finding:
    """DDP without no_sync() is to blame: averages are averaged again, and training is another."""
    return negated(matches(t, "every", "one_process", "weights"))


@cost(HOLDS)
def sends_m_times(t: Tables) -> Finding:
    """Without no_sync() an update sends every gradient M times."""
    return counts(t, "every", "reductions", t.root_params["micro_batches"], "all-reduces an update")


@remedy(HOLDS)
def once(t: Tables) -> Finding:
    """Divided once, with no_sync() for all but the last: N ranks train like one process."""
    return like_one_process(t, "once")


SCENARIO = Scenario(
    title="Accumulation scaled twice or not at all: the learning rate over M, or times M",
    family="normalisation",
    cause="accumulation_factor",
    params=Params,
    run=run,
    check=check,
    headline=says(
        divided_twice=("divided twice the gradient is 1/M", "divided twice it is not 1/M"),
        not_divided=("not divided M times", "not divided it is not M times"),
        averaged_again=("averaging each time is wrong", "averaging each micro-batch is right"),
        sends_m_times=("and sends M times as much", "and sends no M times as much"),
    ),
    arms=(
        one_process("one process", divided=1, averages="last"),
        faulty("twice", "divided by M twice", divided=2, averages="last"),
        faulty("never", "not divided", divided=0, averages="last"),
        control("every", "averaged at every micro-batch", divided=1, averages="every"),
        fixed("once", "divided once, no_sync()", divided=1, averages="last"),
    ),
    claims=(divided_twice, not_divided, averaged_again, sends_m_times, once),
    plots=(Plot(metric="loss", title="Loss of the last micro-batch", log=True),),
)
