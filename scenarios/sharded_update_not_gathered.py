"""A sharded optimizer whose new weights do not reach all ranks, or reach them too late.

Each rank updates its slice of every bucket of weights, and an all-gather hands the slices around.
If one bucket is left out, each rank goes on with its own new slice among old ones: replicas part in
the first update, in that bucket only. If the gather ends behind the next forward, every forward
sees weights one update old, others on each rank; in between, and at the end, the replicas are equal
again, and look as if nothing were wrong. Reported in NVIDIA/Megatron-LM#663 and #950.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, like_one_process, matches, negated, ranks_agree, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Scenario, at_least
from harness.tables import relative_l2
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

FIRST = 12 * 6 + 12
"""Weights of the first layer, which are the first bucket."""


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values, explained: conf/scenario/sharded_update_not_gathered.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    momentum: float = field(metadata=at_least(0.0))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train; a layer is a bucket, a rank updates its slice of each; what is gathered differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss, pad
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    from scenarios._models import gradients, net, rows, weights

    model, world = net(rank), rank.world_size
    buckets = []
    for layer in (model[0], model[2]):
        values = parameters_to_vector(layer.parameters()).detach()
        flat = pad(values, (0, -len(values) % world))
        # From now on the layer's weights are views of the bucket.
        vector_to_parameters(flat[: len(values)], layer.parameters())
        buckets.append((layer, flat, torch.nn.Parameter(flat.chunk(world)[rank.rank])))
    optimizer = torch.optim.SGD([own for *_, own in buckets], lr=p.lr, momentum=p.momentum)
    x, y = rows(rank, p.batch)

    def gather() -> None:
        for _, flat, own in buckets[: 1 if arm["gathers"] == "the first bucket" else None]:
            dist.all_gather(list(flat.chunk(world)), own.detach().clone())

    for step in range(p.steps):
        rank.snapshot(step=step, used=weights(model))
        model.zero_grad()
        loss = mse_loss(model(x), y)
        if arm["gathers"] == "behind forward":
            gather()
        loss.backward()
        for layer, flat, own in buckets:
            gradient = pad(found := gradients(layer), (0, len(flat) - len(found)))
            dist.all_reduce(gradient)
            own.grad = gradient.chunk(world)[rank.rank] / world
        optimizer.step()
        if arm["gathers"] != "behind forward":
            gather()
        rank.log(step=step, loss=loss)
    gather()
    rank.snapshot(step=p.steps, used=weights(model), end=weights(model))


@symptom(HOLDS, source="NVIDIA/Megatron-LM#663")
def ranks_part(t: Tables) -> Finding:
    """With a bucket left out the ranks' weights part."""
    return negated(ranks_agree(t, "left_out", "used"))


@mechanism(HOLDS)
def own_slice_only(t: Tables) -> Finding:
    """After the first update each rank has its own new slice of that bucket, among old ones."""
    t.require("left_out", "one_process")
    old, new = (t.snapshot("one_process", "used", step=step) for step in (0, 1))
    ranks = t.ranks("left_out")
    size, gaps = -(-(len(old) - FIRST) // len(ranks)), []
    for rank in ranks:
        due, own = old.copy(), slice(FIRST + rank * size, FIRST + (rank + 1) * size)
        due[:FIRST], due[own] = new[:FIRST], new[own]
        gaps.append(relative_l2(t.snapshot("left_out", "used", step=1, rank=rank), due))
    floor = rounding(t, "one_process", "used", step=1)
    reason = f"the ranks' weights are {max(gaps):.2g} from old ones with their own new slice"
    return is_rounding(max(gaps), floor, reason, "relative L2 distance")


@symptom(HOLDS, source="NVIDIA/Megatron-LM#950")
def late_is_off(t: Tables) -> Finding:
    """With the gather behind the next forward the weights end up other than in one process."""
    return negated(matches(t, "late", "one_process", "used"))


@symptom(REFUTED)
def late_shows_it(t: Tables) -> Finding:
    """Then the replicas still differ when training is over."""
    return negated(ranks_agree(t, "late", "end"))


@mechanism(HOLDS)
def late_forward(t: Tables) -> Finding:
    """Each forward sees its own rank's new slices among old ones: no two ranks see the same."""
    return negated(ranks_agree(t, "late", "used"))


@remedy(HOLDS)
def gather_all(t: Tables) -> Finding:
    """With every bucket gathered before the next forward the ranks train like one process."""
    return like_one_process(t, "gathered", "used")


SCENARIO = Scenario(
    title="A sharded update that is not gathered, or after the next forward: stale weights",
    family="parallel layouts",
    cause="sharded_update_not_gathered",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        ranks_part=("a bucket that is not gathered parts", "a bucket may be left out"),
        late_is_off=("one gathered late is off", "a late gather does no harm"),
        late_shows_it=("and stays unequal", "and ends equal on all ranks"),
    ),
    arms=(
        one_process("one process", gathers="all"),
        faulty("left_out", "the second bucket is not gathered", gathers="the first bucket"),
        faulty("late", "gathered behind the next forward", gathers="behind forward"),
        fixed("gathered", "gathered behind the update", gathers="all"),
    ),
    claims=(ranks_part, own_slice_only, late_is_off, late_shows_it, late_forward, gather_all),
)
