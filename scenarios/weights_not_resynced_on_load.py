"""Shards loaded and not gathered: a resumed run takes one update from patched models, then agrees.

With a sharded optimizer each rank steps its own part of the weights, and a gather after the step
makes the ranks equal. A checkpoint holds the parts. Loading writes each rank's part into a fresh
model; the gather that has to follow is left out, or runs over an empty list. The next gradient then
comes from models that never existed, one per rank. The gather after that update makes the ranks
equal again, so that comparing them later finds nothing. Reported in NVIDIA/Megatron-LM#6920.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import like_one_process, matches, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """The values are in conf/scenario/weights_not_resynced_on_load.yaml."""

    before: int = field(metadata=at_least(1))
    after: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def parts(rank: Rank, flat: torch.Tensor) -> torch.Tensor:
    """Return flat values as one row per rank, with zeros behind the last value."""
    import torch

    short = -flat.numel() % rank.world_size
    return torch.nn.functional.pad(flat, (0, short)).view(rank.world_size, -1)


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train with a sharded optimizer, stop, load, train on; what follows the loading differs."""
    import copy

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import vector_to_parameters

    from scenarios._models import gradients, net, rows, weights

    model = DistributedDataParallel(net(rank))
    own = torch.nn.Parameter(parts(rank, weights(model))[rank.rank].clone())
    optimizer = torch.optim.Adam([own], lr=p.lr)

    def gather() -> None:
        everyone = [torch.empty_like(own) for _ in range(rank.world_size)]
        dist.all_gather(everyone, own.detach())
        vector_to_parameters(torch.cat(everyone), model.parameters())

    x, y = rows(rank, p.batch)
    for step in range(p.before + p.after):
        if step == p.before and arm["loads"] != "nothing":
            saved, state = copy.deepcopy((own.detach(), optimizer.state_dict()))
            model = DistributedDataParallel(net(rank))
            own = torch.nn.Parameter(saved)
            optimizer = torch.optim.Adam([own], lr=p.lr)
            optimizer.load_state_dict(state)
            patched = parts(rank, weights(model))
            patched[rank.rank] = saved
            vector_to_parameters(patched.flatten(), model.parameters())
            if arm["loads"] == "and broadcasts":
                for parameter in model.parameters():
                    dist.broadcast(parameter.detach(), src=0)
            elif arm["loads"] == "and gathers":
                gather()
        rank.snapshot(step=step, weights=weights(model))
        model.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        own.grad = parts(rank, gradients(model))[rank.rank]
        optimizer.step()
        gather()


@symptom(HOLDS, source="NVIDIA/Megatron-LM#6920")
def differ_once(t: Tables) -> Finding:
    """The ranks' weights differ between loading and the next update, and at no other step."""
    t.require("not_gathered")
    ranks = [t.series("not_gathered", "weights.digest", rank=r) for r in t.ranks("not_gathered")]
    parted = [step for step in ranks[0] if len({digests[step] for digests in ranks}) > 1]
    reason = f"weights differ between ranks before the updates {parted} of {len(ranks[0])}"
    return (holds if parted == [t.root_params["before"]] else refuted)(reason)


@mechanism(REFUTED)
def update_repairs(t: Tables) -> Finding:
    """The gather after the first update repairs it: the run goes on where it stopped."""
    return matches(t, "not_gathered", "one_process", "weights")


@remedy(REFUTED)
def broadcast_helps(t: Tables) -> Finding:
    """Sending rank 0's weights around after loading is enough."""
    return matches(t, "broadcast", "one_process", "weights")


@mechanism(HOLDS)
def sharding_is_right(t: Tables) -> Finding:
    """Never stopped, the sharded optimizer trains like one process."""
    return like_one_process(t, "uninterrupted")


@remedy(HOLDS, source="NVIDIA/Megatron-LM#6920")
def gather_first(t: Tables) -> Finding:
    """Gather after loading, too: the run goes on as if it had never stopped."""
    return like_one_process(t, "gathered")


SCENARIO = Scenario(
    title="Shards loaded and not gathered: one update from patched models, then ranks agree",
    family="resume",
    cause="weights_not_resynced_on_load",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        differ_once=("loaded shards without a gather part the ranks for one step", "ranks agree"),
        update_repairs=("the next update repairs it", "the run goes astray for good"),
        broadcast_helps=("rank 0's weights are enough", "rank 0's weights are wrong as well"),
        gather_first=("a gather after loading is right", "a gather is wrong, too"),
    ),
    arms=(
        one_process("one process, never stopped", loads="nothing"),
        control("uninterrupted", "all ranks, never stopped", loads="nothing"),
        faulty("not_gathered", "each rank loads its part", loads="own part"),
        faulty("broadcast", "then rank 0's weights are sent", loads="and broadcasts"),
        fixed("gathered", "then the parts are gathered", loads="and gathers"),
    ),
    claims=(differ_once, update_repairs, broadcast_helps, sharding_is_right, gather_first),
)
