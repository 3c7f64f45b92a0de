"""Ranks that load the checkpoint before rank 0 has written it: they get the one before.

Rank 0 saves, all ranks load, and nothing makes the others wait for the file. Where an older one is
still there they read that, without an error, and go on from other weights than rank 0. A barrier
before the save orders nothing; it belongs between the save and the load. Reported in
huggingface/transformers#10685, KempnerInstitute/KempnerForge#49.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/read_before_write.yaml."""

    steps: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train, save on rank 0, load on all ranks, train on; what orders the two is what differs."""
    import shutil
    import tempfile
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import net, rows, weights

    folder = [tempfile.mkdtemp() if rank.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "model.pt"
    store = dist.PrefixStore(folder[0], dist.distributed_c10d._get_default_store())
    layers = net(rank)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)

    def train(part: int) -> None:
        for step in range(part * p.steps, (part + 1) * p.steps):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            rank.snapshot(step=step, weights=weights(model))

    train(0)
    if rank.rank == 0:
        torch.save(layers.state_dict(), path)
    dist.barrier()
    train(1)
    if arm["barrier"] == "before":
        dist.barrier()
    if rank.rank == 0:
        if arm["barrier"] in ("none", "before"):
            # Nothing orders the others' load behind this save: here it is over first.
            store.wait([f"read by {other}" for other in range(1, rank.world_size)])
        torch.save(layers.state_dict(), path)
    if arm["barrier"] == "behind":
        dist.barrier()
    if arm["barrier"] != "sent" or rank.rank == 0:
        layers.load_state_dict(torch.load(path, weights_only=True))
    if arm["barrier"] == "sent":
        for value in layers.state_dict().values():
            dist.broadcast(value, src=0)
    store.set(f"read by {rank.rank}", "")
    rank.snapshot(step=2 * p.steps - 1, phase="loaded", loaded=weights(model))
    train(2)
    dist.barrier()
    if rank.rank == 0:
        shutil.rmtree(folder[0])


@symptom(HOLDS, source="huggingface/transformers#10685")
def older_one(t: Tables) -> Finding:
    """Ranks that do not wait load the checkpoint before, and no error comes."""
    t.require("no_barrier")
    steps, stale = t.root_params["steps"], []
    for rank in t.ranks("no_barrier"):
        loaded = t.last("no_barrier", "loaded.digest", rank=rank)
        if loaded == t.value("no_barrier", "weights.digest", step=steps - 1, rank=rank):
            stale.append(rank)
    due = stale == list(t.ranks("no_barrier"))[1:]
    return (holds if due else refuted)(f"ranks {stale} have the weights of {steps} updates before")


@symptom(HOLDS, source="KempnerInstitute/KempnerForge#49")
def ranks_part(t: Tables) -> Finding:
    """The ranks then go on from other weights, and stay apart."""
    return negated(ranks_agree(t, "no_barrier", "weights"))


@remedy(REFUTED)
def barrier_before(t: Tables) -> Finding:
    """A barrier before the save keeps them together."""
    return ranks_agree(t, "before", "weights")


@remedy(HOLDS)
def barrier_behind(t: Tables) -> Finding:
    """A barrier between the save and the load does: N ranks train like one process."""
    return like_one_process(t, "behind")


@remedy(HOLDS)
def send_it(t: Tables) -> Finding:
    """So does loading on rank 0 alone, and sending the weights around."""
    return like_one_process(t, "sent")


SCENARIO = Scenario(
    title="Loading before rank 0 has saved: the other ranks get the checkpoint before, silently",
    family="resume",
    cause="read_before_write",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        older_one=("ranks that do not wait load an older file", "all ranks load the new file"),
        ranks_part=("and part", "and stay together"),
        barrier_before=("a barrier before helps", "a barrier before the save does not help"),
    ),
    arms=(
        one_process("one process", barrier="not needed"),
        faulty("no_barrier", "save on rank 0, load on all", barrier="none"),
        faulty("before", "a barrier, save, load", barrier="before"),
        fixed("behind", "save, a barrier, load", barrier="behind"),
        fixed("sent", "rank 0 loads and broadcasts", barrier="sent"),
    ),
    claims=(older_one, ranks_part, barrier_before, barrier_behind, send_it),
)
