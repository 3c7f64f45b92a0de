"""A gradient reduced with async_op=True and used before wait(): it is the rank's own one still.

A sharded optimizer reduces each part of the gradient to the rank that updates it, and goes on
meanwhile. A part that is used before its handle was waited for is reduced or not, depending on who
came last. Here the owner of a part is always the first to come, for certain: it tells the others
when to follow. Replicas agree and no error comes; where it is the last one, all is well. Reported,
for an all_reduce and the division behind it, in OpenNMT/OpenNMT-py#2295.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from harness.tables import relative_l2
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/work_not_awaited.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    momentum: float = field(metadata=at_least(0.0))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train, each rank updating its part of the weights; when the reduce is waited for differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss, pad
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    from scenarios._models import gradients, net, rows, weights

    model, world = net(rank), rank.world_size
    values = parameters_to_vector(model.parameters()).detach()
    flat = pad(values, (0, -len(values) % world))
    vector_to_parameters(flat[: len(values)], model.parameters())
    own = torch.nn.Parameter(flat.chunk(world)[rank.rank])
    optimizer = torch.optim.SGD([own], lr=p.lr, momentum=p.momentum)
    store = dist.PrefixStore(arm.name, dist.distributed_c10d._get_default_store())
    x, y = rows(rank, p.batch)

    def reduce_to(owner: int, part: torch.Tensor, turn: str) -> None:
        if owner != rank.rank:
            store.wait([turn])
            dist.reduce(part, owner)
            return
        rank.snapshot(step=step, alone=part / world)
        if arm["waits"] in ("before", "blocking"):
            store.set(turn, "follow")
        work = dist.reduce(part, owner, async_op=arm["waits"] != "blocking")
        if arm["waits"] == "before":
            work.wait()
        own.grad = part / world
        rank.snapshot(step=step, used=own.grad)
        if arm["waits"] in ("behind", "never"):
            store.set(turn, "follow")
        if arm["waits"] == "behind":
            work.wait()

    for step in range(p.steps):
        model.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        whole = pad(found := gradients(model), (0, len(flat) - len(found)))
        for owner, part in enumerate(whole.chunk(world)):
            reduce_to(owner, part, f"{rank.repeat}/{step}/{owner}")
        optimizer.step()
        dist.all_gather(list(flat.chunk(world)), own.detach().clone())
        rank.log(step=step, loss=loss)
        rank.snapshot(step=step, weights=weights(model))


@symptom(HOLDS, source="OpenNMT/OpenNMT-py#2295")
def training_is_off(t: Tables) -> Finding:
    """Used before wait(), the gradient trains other weights than one process does."""
    return negated(matches(t, "never", "one_process", "weights"))


@mechanism(HOLDS)
def own_gradient_alone(t: Tables) -> Finding:
    """What is used is the rank's own gradient, over the number of ranks, to the last bit."""
    t.require("never")
    gaps = [
        relative_l2(*(t.snapshot("never", name, step=0, rank=r) for name in ("used", "alone")))
        for r in t.ranks("never")
    ]
    said = f"the parts are {max(gaps):.2g} from what their ranks had before the reduce"
    return (holds if max(gaps) == 0.0 else refuted)(said, effect=max(gaps), unit="relative L2")


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "never", "weights"))


@remedy(REFUTED)
def wait_behind(t: Tables) -> Finding:
    """It is enough to wait at all, before the next collective begins."""
    return matches(t, "behind", "one_process", "weights")


@remedy(HOLDS)
def wait_before(t: Tables) -> Finding:
    """Waited for before they are used, the parts train the weights of one process."""
    return like_one_process(t, "before", "weights")


@remedy(HOLDS, source="OpenNMT/OpenNMT-py#2295")
def blocking(t: Tables) -> Finding:
    """Without async_op the call itself waits, and they do, too."""
    return like_one_process(t, "blocking", "weights")


SCENARIO = Scenario(
    title="async_op=True and no wait() before the result is used: the rank's own gradient",
    family="synchronisation",
    cause="work_not_awaited",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        training_is_off=("used before wait() a reduced gradient is off", "wait() is not needed"),
        own_gradient_alone=("it is the rank's own", "it is reduced in part"),
        wait_behind=("wait() behind it helps", "wait() behind it is too late"),
    ),
    arms=(
        one_process("one process", waits="before"),
        faulty("never", "the handle is dropped", waits="never"),
        faulty("behind", "wait() behind the use", waits="behind"),
        fixed("before", "wait() before the use", waits="before"),
        fixed("blocking", "async_op=False", waits="blocking"),
    ),
    claims=(training_is_off, own_gradient_alone, ranks_part, wait_behind, wait_before, blocking),
)
