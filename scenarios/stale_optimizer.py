"""An optimizer made before fully_shard: it steps parameters that the model no longer has.

`fully_shard` replaces every parameter by a DTensor over its shards. An optimizer built before holds
the old tensors, whose gradients stay None: it steps nothing, without an error. The sharded weights
never move, on any rank, so that comparing ranks finds nothing. The same order is harmless with DDP,
which wraps the module and keeps its parameters. Reported in huggingface/accelerate#2665.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import counts, like_one_process, negated, says, stands_still
from harness.scenario import Arm, Finding, Plot, Scenario, at_least
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/stale_optimizer.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train; whether the optimizer is made before or after the wrapping is all that differs."""
    import torch
    import torch.nn.functional as F
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import net, rows, weights

    model: torch.nn.Module = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    if arm["wrap"] == "fully_shard":
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    if arm["optimizer"] == "after":
        optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        rank.snapshot(step=step, weights=weights(model))
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        steps = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        known = sum(id(parameter) in steps for parameter in model.parameters())
        rank.log(step=step, loss=loss, known=known)


@symptom(HOLDS, source="huggingface/accelerate#2665")
def nothing_moves(t: Tables) -> Finding:
    """With the optimizer made first no weight changes by a single bit."""
    return stands_still(t, "before_sharding", "one_process", "weights")


@mechanism(HOLDS)
def knows_no_parameter(t: Tables) -> Finding:
    """The optimizer holds none of the model's parameters."""
    return counts(t, "before_sharding", "known", 0, "of the model's parameters in the optimizer")


@symptom(HOLDS)
def loss_stands_still(t: Tables) -> Finding:
    """On the same rows the loss is the same number at every step, on every rank."""
    return stands_still(t, "before_sharding", "one_process", "loss")


@mechanism(REFUTED)
def order_always_matters(t: Tables) -> Finding:
    """An optimizer made before the wrapper is stale with DDP, too."""
    return negated(like_one_process(t, "before_ddp"))


@remedy(HOLDS)
def make_it_after(t: Tables) -> Finding:
    """Make the optimizer after fully_shard: N ranks train like one process."""
    return like_one_process(t, "after_sharding")


SCENARIO = Scenario(
    title="An optimizer made before fully_shard steps nothing, on every rank, without an error",
    family="sharded layouts",
    cause="stale_optimizer",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        nothing_moves=("an optimizer made before fully_shard moves nothing", "weights move"),
        loss_stands_still=("the loss stands still", "the loss moves"),
        knows_no_parameter=("it holds none of the model's parameters", "it holds some of them"),
        order_always_matters=("DDP has the same trap", "with DDP the order does not matter"),
    ),
    arms=(
        one_process("one process", wrap="ddp", optimizer="after"),
        faulty(
            "before_sharding", "optimizer, then fully_shard", wrap="fully_shard", optimizer="before"
        ),
        fixed(
            "after_sharding", "fully_shard, then optimizer", wrap="fully_shard", optimizer="after"
        ),
        control("before_ddp", "optimizer, then DDP", wrap="ddp", optimizer="before"),
    ),
    claims=(
        nothing_moves,
        knows_no_parameter,
        loss_stands_still,
        order_always_matters,
        make_it_after,
    ),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
