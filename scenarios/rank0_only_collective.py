"""Evaluation through the wrapper on rank 0 alone: DDP's forward sends buffers, and nobody is there.

`if rank == 0: evaluate(model)` looks local. But DDP's forward hands out rank 0's buffers, under
no_grad, too: rank 0 waits in it, the others in the barrier behind it. Without a barrier it meets
the others' next forward, and since DDP leaves out the broadcast after a no_grad forward, training
stays in step: only the last evaluation hangs. Reported in pytorch/pytorch#54059, #53979, #143647.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, like_one_process, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/rank0_only_collective.yaml."""

    epochs: int = field(metadata=at_least(2))
    updates: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    hang_timeout_s: float = field(metadata=at_least(0.1))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train, evaluate after each epoch; who evaluates through what is all that differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel

    from harness.collectives import count_collectives
    from harness.waiting import gives_up
    from scenarios._models import FEATURES, net, rows, weights

    layers = net(rank)
    if arm.get("buffer", True):
        # Any will do; those of batch norm would make N ranks train unlike one process.
        layers.register_buffer("mean", torch.zeros(FEATURES, device=rank.device))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    held_x, held_y = rows(rank, p.batch, name="validation", whole=True)
    with gives_up(rank, arm, p.hang_timeout_s):
        for epoch in range(p.epochs):
            model.train()
            for number in range(p.updates):
                x, y = rows(rank, p.batch, name=f"batch/{number}")
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
            rank.snapshot(step=epoch, weights=weights(model))
            if rank.rank == 0 or arm.get("who") == "all":
                model.eval()
                with torch.no_grad(), count_collectives() as calls:
                    output = layers(held_x) if arm.get("through") == "module" else model(held_x)
                rank.log(step=epoch, validation=mse_loss(output, held_y), sent=calls.count())
            if arm.get("barrier", True):
                dist.barrier()


def trains_and_evaluates(t: Tables, arm: str, missing: int = 0) -> Finding:
    """Say whether rank 0 gets through all evaluations but `missing`, with the right weights."""
    passed, epochs = len(t.series(arm, "validation")), t.root_params["epochs"]
    due = passed == epochs - missing
    finding = (holds if due else refuted)(f"{arm}: {passed} of {epochs} evaluations pass")
    return all_of(finding, like_one_process(t, arm))


def waiting(t: Tables, arm: str) -> list[int]:
    """Return the ranks of an arm that waited in vain."""
    t.require(arm)
    return [r for r in t.ranks(arm) if t.value(arm, "raised", step=0, phase="gave up", rank=r)]


@symptom(HOLDS, source="pytorch/pytorch#54059")
def all_wait(t: Tables) -> Finding:
    """Rank 0 never gets through its first evaluation, nor the others through the barrier."""
    waits, ranks = waiting(t, "with_barrier"), list(t.ranks("with_barrier"))
    epochs = [len(t.series("with_barrier", "weights.digest", rank=rank)) for rank in ranks]
    due = waits == ranks and set(epochs) == {1} and not t.has("with_barrier", "validation")
    return (holds if due else refuted)(f"ranks {waits} wait in vain, after {epochs} epochs each")


@mechanism(REFUTED, source="pytorch/pytorch#53979")
def no_grad_is_local(t: Tables) -> Finding:
    """Under eval() and no_grad() DDP's forward communicates nothing."""
    return counts(t, "all_evaluate", "sent", 0, "collectives in an evaluation")


@mechanism(HOLDS)
def buffers_matter(t: Tables) -> Finding:
    """In a model without buffers rank 0 may evaluate through the wrapper alone."""
    return trains_and_evaluates(t, "no_buffers")


@remedy(REFUTED, source="pytorch/pytorch#54059")
def drop_the_barrier(t: Tables) -> Finding:
    """It is the barrier: without it nobody waits."""
    waits, evaluated = waiting(t, "rank0_alone"), len(t.series("rank0_alone", "validation"))
    reason = f"after {evaluated} evaluations ranks {waits or 'none'} wait in vain in the next"
    return (refuted if waits else holds)(reason)


@symptom(HOLDS)
def last_one_waits(t: Tables) -> Finding:
    """Without it all evaluations but the last pass, and the weights are right."""
    return trains_and_evaluates(t, "rank0_alone", missing=1)


@remedy(HOLDS, source="pytorch/pytorch#54059")
def unwrap(t: Tables) -> Finding:
    """With model.module on rank 0, or the wrapper on all, N ranks train like one process."""
    return all_of(*(trains_and_evaluates(t, arm) for arm in ("unwrapped", "all_evaluate")))


SCENARIO = Scenario(
    title="Evaluation through DDP on rank 0 alone waits for ranks that never come",
    family="hangs",
    cause="rank0_only_collective",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        all_wait=("rank 0 alone in DDP's forward waits for ever", "nobody waits"),
        no_grad_is_local=("no_grad keeps it local", "no_grad does not keep it local"),
        buffers_matter=("only buffers make it so", "with or without buffers"),
        drop_the_barrier=("without a barrier all goes well", "without a barrier at the very end"),
    ),
    arms=(
        one_process("one process"),
        faulty("with_barrier", "rank 0 calls the wrapper, then a barrier", isolated=True),
        faulty("rank0_alone", "the same without a barrier", barrier=False, isolated=True),
        control("no_buffers", "a model without buffers", buffer=False),
        fixed("unwrapped", "rank 0 calls model.module", through="module"),
        fixed("all_evaluate", "all ranks call the wrapper", who="all"),
    ),
    claims=(all_wait, no_grad_is_local, buffers_matter, drop_the_barrier, last_one_waits, unwrap),
)
