"""no_sync() around the wrong half of a step: gradients are never averaged, or averaged each time.

Gradient accumulation wants one reduction per update. DDP decides it in forward: what runs inside
`no_sync()` is forward, and backward follows that decision wherever it stands. Forward inside and
backward outside: never reduced, the replicas part. Forward outside and backward inside: reduced at
every micro-batch, right and no faster. Reported where a library entered the context around
backward only (huggingface/accelerate#1726, facebookresearch/ClassyVision#706).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, cost, mechanism, remedy, symptom
from harness.findings import all_of, counts, like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/no_sync_wrong_half.yaml."""

    updates: int = field(metadata=at_least(2))
    micro: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Accumulate the gradient of an update over micro-batches."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from harness.collectives import count_collectives
    from scenarios._models import net, rows, weights

    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    batches = [rows(rank, p.batch, name=f"micro/{number}") for number in range(p.micro)]
    for update in range(p.updates):
        optimizer.zero_grad()
        with count_collectives() as calls:
            accumulate(model, batches, arm["inside"])
        optimizer.step()
        # DDP regroups its buckets once, after the first reduction, and sends their order around.
        if update:
            rank.log(step=update, reductions=calls.count("all_reduce"))
        rank.snapshot(step=update, weights=weights(model))


def accumulate(model: DistributedDataParallel, batches: Sequence[Any], inside: str) -> None:
    """Run forward and backward; which of them stands inside no_sync() is all that differs."""
    import torch
    from torch.nn.functional import mse_loss

    *early, (last_x, last_y) = batches
    if inside == "forward":
        with model.no_sync():
            losses = [mse_loss(model(x), y) for x, y in batches]
        torch.stack(losses).mean().backward()
        return
    for x, y in early:
        if inside == "backward":
            loss = mse_loss(model(x), y) / len(batches)
            with model.no_sync():
                loss.backward()
        else:
            with model.no_sync():
                (mse_loss(model(x), y) / len(batches)).backward()
    (mse_loss(model(last_x), last_y) / len(batches)).backward()


def one_reduction(t: Tables, arm: str) -> Finding:
    """Say whether an update of the arm takes one reduction."""
    return counts(t, arm, "reductions", 1, "all-reduces an update")


@mechanism(REFUTED, source="huggingface/accelerate#1726")
def decided_in_backward(t: Tables) -> Finding:
    """Gradients are reduced exactly if backward runs outside no_sync()."""
    return all_of(one_reduction(t, "forward_inside"), one_reduction(t, "backward_inside"))


@symptom(HOLDS)
def ranks_part(t: Tables) -> Finding:
    """With forward inside and backward outside the ranks' weights part."""
    return negated(ranks_agree(t, "forward_inside", "weights"))


@symptom(REFUTED)
def wrong_weights(t: Tables) -> Finding:
    """With backward inside and forward outside the weights come out wrong."""
    return negated(like_one_process(t, "backward_inside"))


@cost(REFUTED)
def saves_reductions(t: Tables) -> Finding:
    """With backward inside and forward outside an update takes one reduction."""
    return one_reduction(t, "backward_inside")


@remedy(HOLDS)
def both_inside(t: Tables) -> Finding:
    """Forward and backward inside, save the last: one reduction, one process's weights."""
    return all_of(like_one_process(t, "both_inside"), one_reduction(t, "both_inside"))


SCENARIO = Scenario(
    title="no_sync() around the wrong half: never reduced, or reduced at every micro-batch",
    family="synchronisation",
    cause="no_sync_wrong_half",
    params=Params,
    run=run,
    check=equal_shares,
    differs=("accumulate",),
    headline=says(
        decided_in_backward=(
            "no_sync() acts on backward",
            "no_sync() acts on forward: backward follows wherever it stands",
        ),
        ranks_part=("forward alone inside it parts the replicas", "replicas stay equal"),
        saves_reductions=("backward alone saves reductions", "backward alone saves nothing"),
    ),
    arms=(
        one_process("one process, all rows", inside="both"),
        faulty("forward_inside", "all forwards inside, one backward outside", inside="forward"),
        faulty("backward_inside", "only backward inside", inside="backward"),
        fixed("both_inside", "both inside, except for the last micro-batch", inside="both"),
    ),
    claims=(decided_in_backward, ranks_part, wrong_weights, saves_reductions, both_inside),
)
