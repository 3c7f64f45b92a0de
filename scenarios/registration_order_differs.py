"""Layers of one shape, registered in another order on each rank: DDP pairs them by position.

Layers built from a set of names, or from a listing, come in an order of each process's own. DDP
hands out rank 0's weights by position, averages gradients by position, and compares shapes only,
which fit. So the weights of "age" on one rank are those of "blood" on another: the lists of tensors
stay equal bit for bit, while every rank computes another function of the same row, and an average
mixes the gradients of different columns. pytorch/pytorch#32426 is the case that DDP notices, of
shapes that do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least
from scenarios._models import equal_shares

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables

COLUMNS = ("age", "blood", "height", "pulse", "sleep", "weight")


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; the values are in conf/scenario/registration_order_differs.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def additive(rank: Rank, names: Sequence[str]) -> torch.nn.Module:
    """Return a sum of small nets, one for each column of a table, registered in this order."""
    import torch

    from scenarios._models import mlp

    class Additive(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, mlp((1, 4, 1), generator=rank.generator(name)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [self.get_submodule(c)(x[:, [at]]) for at, c in enumerate(COLUMNS)]
            return torch.stack(parts).sum(dim=0)

    return Additive().to(rank.device)


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train one layer per column; in which order they are registered is what differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import rows, weights

    # A set of strings has an order of its own in every process; here one that repeats.
    first = rank.rank % len(COLUMNS)
    names = [*COLUMNS[first:], *COLUMNS[:first]]
    layers = additive(rank, sorted(names) if arm["order"] == "sorted" else names)
    model = DistributedDataParallel(layers)
    if arm.get("sent_by_name"):
        for _, parameter in sorted(layers.named_parameters()):
            dist.broadcast(parameter.detach(), src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    held_x, _ = rows(rank, p.batch, name="validation", whole=True)
    for step in range(p.steps):
        by_name = torch.cat([q.detach().flatten() for _, q in sorted(layers.named_parameters())])
        with torch.no_grad():
            rank.digest(step=step, listed=weights(layers), prediction=layers(held_x))
        rank.snapshot(step=step, by_name=by_name)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        rank.log(step=step, loss=loss)


@symptom(HOLDS)
def names_differ(t: Tables) -> Finding:
    """Under one name each rank holds other weights."""
    return negated(ranks_agree(t, "own_order", "by_name"))


@symptom(REFUTED)
def lists_show_it(t: Tables) -> Finding:
    """Comparing the ranks' model.parameters() one by one finds it."""
    return negated(ranks_agree(t, "own_order", "listed"))


@symptom(HOLDS)
def predictions_differ(t: Tables) -> Finding:
    """Ranks predict different values for the same rows."""
    return negated(ranks_agree(t, "own_order", "prediction"))


@remedy(REFUTED)
def send_by_name(t: Tables) -> Finding:
    """Sending rank 0's weights around by name, after wrapping, is enough."""
    return like_one_process(t, "sent_by_name", "by_name")


@remedy(HOLDS)
def sort_names(t: Tables) -> Finding:
    """Register the layers in sorted order: N ranks train like one process."""
    return like_one_process(t, "sorted", "by_name")


SCENARIO = Scenario(
    title="Layers registered in another order per rank: DDP averages unrelated gradients",
    family="initial state",
    cause="structure_differs",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        names_differ=("an own order per rank mixes up the layers", "layers keep their weights"),
        lists_show_it=("a comparison by position shows it", "a comparison by position is content"),
        predictions_differ=("ranks predict different values", "ranks predict the same"),
        send_by_name=("weights sent by name cure it", "weights sent by name do not cure it"),
    ),
    arms=(
        one_process("one process", order="own"),
        faulty("own_order", "each rank registers in its own order", order="own"),
        faulty("sent_by_name", "weights sent by name", order="own", sent_by_name=True),
        fixed("sorted", "registered in sorted order", order="sorted"),
    ),
    claims=(names_differ, lists_show_it, predictions_differ, send_by_name, sort_names),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
