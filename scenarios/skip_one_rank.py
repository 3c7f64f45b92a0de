"""`continue` on a bad batch on one rank: from there on gradients of different steps are averaged.

One rank's batch gives a loss that is not finite, and the loop skips it. Collectives pair by order,
not by step: that rank's next reduction meets the one the others are still waiting in. No error; the
ranks' weights stay equal bit for bit, so comparing them finds nothing; only at the end the others
have one reduction left that nobody joins. Reported in NVIDIA-NeMo/Automodel#2468,
facebookresearch/optimizers#149, Lightning-AI/pytorch-lightning#5359.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/skip_one_rank.yaml."""

    batches: int = field(metadata=at_least(2))
    bad: int = field(metadata=at_least(0))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    hang_timeout_s: float = field(metadata=at_least(0.1))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """The bad batch is one of them, and has another one behind it."""
    if p.bad < p.batches - 1:
        return equal_shares(p, ranks)
    return [f"scenario.bad={p.bad} has no batch behind it; type scenario.bad={p.batches - 2}"]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train; the last rank's rows of one batch are broken, and what then happens differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from harness.waiting import gives_up
    from scenarios._models import net, rows, weights

    layers = net(rank)
    # Its gradient is 1 at the number of the batch: reduced with the others, it says which met.
    met = torch.nn.Parameter(torch.zeros(p.batches, dtype=torch.float64, device=rank.device))
    layers.register_parameter("met", met)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(layers[:3].parameters(), lr=p.lr)
    update = 0
    with gives_up(rank, arm, p.hang_timeout_s):
        for number in range(p.batches):
            x, y = rows(rank, p.batch, name=f"batch/{number}")
            if number == p.bad and rank.rank == rank.world_size - 1:
                x = x * float("nan")
            model.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y) + met[number]
            skip = ~loss.isfinite()
            if arm["skips"] == "all":
                agreed = skip.int()
                dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
                skip = agreed > 0
            if skip and arm["skips"] != "zeros":
                continue
            if skip:
                loss = sum(q.sum() for q in layers.parameters()) * 0.0 + met[number]
            loss.backward()
            optimizer.step()
            assert met.grad is not None
            mixed = " ".join(map(str, met.grad.nonzero().flatten().tolist()))
            rank.log(step=update, batch=number, met=mixed)
            rank.snapshot(step=update, weights=weights(layers[:3]))
            update += 1


def updates_mix(t: Tables, arm: str, due: Sequence[int]) -> Finding:
    """Say whether exactly these updates come from batches of several numbers."""
    t.require(arm)
    mixed = {update: met for update, met in t.series(arm, "met").items() if " " in met}
    reason = f"updates that average several batches: {list(mixed.values()) or 'none'}"
    return (holds if list(mixed) == list(due) else refuted)(reason, effect=float(len(mixed)))


@symptom(HOLDS, source="NVIDIA-NeMo/Automodel#2468", settles="~B54")
def steps_mix(t: Tables) -> Finding:
    """After the skip every update averages gradients of two different batches."""
    after = range(t.root_params["bad"], t.root_params["batches"] - 1)
    return all_of(updates_mix(t, "one_skips", after), ranks_agree(t, "one_skips", "met"))


@symptom(REFUTED)
def weights_show_it(t: Tables) -> Finding:
    """Comparing the ranks' weights after each update finds it."""
    return negated(ranks_agree(t, "one_skips", "weights"))


@symptom(HOLDS, source="facebookresearch/optimizers#149", settles="~B54")
def ends_waiting(t: Tables) -> Finding:
    """The other ranks end in a reduction that nobody joins."""
    t.require("one_skips")
    ranks, last = t.ranks("one_skips"), t.last("one_skips", "batch")
    waiting = [rank for rank in ranks if t.last("one_skips", "raised", rank=rank)]
    due = waiting == list(ranks)[:-1] and last == t.root_params["batches"] - 2
    return (holds if due else refuted)(f"ranks {waiting} wait in vain in the batch after {last}")


@remedy(HOLDS)
def skip_together(t: Tables) -> Finding:
    """Agree by an all-reduce and skip on all ranks: like one process that skips it."""
    return all_of(updates_mix(t, "all_skip", ()), like_one_process(t, "all_skip"))


@remedy(HOLDS)
def send_zeros(t: Tables) -> Finding:
    """A backward of zeros on the rank with the bad rows keeps all ranks in the same batch."""
    return all_of(updates_mix(t, "sends_zeros", ()), ranks_agree(t, "sends_zeros", "weights"))


SCENARIO = Scenario(
    title="A batch skipped on one rank: gradients of different steps are averaged, then a hang",
    family="hangs",
    cause="step_skipped_on_one_rank",
    params=Params,
    run=run,
    check=check,
    headline=says(
        steps_mix=("after a skip on one rank updates mix batches", "no update mixes batches"),
        weights_show_it=("the weights part", "the weights stay equal all the while"),
        ends_waiting=("at the end the others wait in vain", "nobody is left waiting"),
    ),
    arms=(
        one_process("one process skips the whole batch", skips="own"),
        faulty("one_skips", "the rank with the bad rows continues", skips="own", isolated=True),
        fixed("all_skip", "all skip if any has to", skips="all"),
        fixed("sends_zeros", "the rank sends zero gradients instead", skips="zeros"),
    ),
    claims=(steps_mix, weights_show_it, ends_waiting, skip_together, send_zeros),
)
