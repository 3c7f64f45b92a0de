"""A flag that turns the reduction off for one kind of layer: only its replicas part.

Gradients are averaged by hand, and a flag or a filter of names, made for a layout in which the
norms are reduced elsewhere, leaves the norms out. Everything else stays equal on all ranks; the
norms are each trained on a rank's own rows. The loss falls, and a checkpoint of rank 0 holds one of
N norms. Averaging its replicas before it is saved makes them equal, and does not make them right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values, explained: conf/scenario/missing_reduce_for_one_layer.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train linear -> norm -> linear, averaging by hand; which gradients that reaches differs."""
    import torch
    import torch.distributed as dist

    from scenarios._models import FEATURES, gradients, mlp, rows, weights

    draw = rank.generator("net")
    first, last = mlp((FEATURES, 8), generator=draw), mlp((8, 1), generator=draw)
    norm = torch.nn.LayerNorm(8, dtype=torch.float64)
    net = torch.nn.ModuleDict({"first": first, "norm": norm, "last": last}).to(rank.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(last(torch.tanh(norm(first(x)))), y)
        loss.backward()
        for name, parameter in net.named_parameters():
            if arm["reduces"] == "all but norms" and "norm" in name:
                continue
            dist.all_reduce(parameter.grad)
            assert parameter.grad is not None
            parameter.grad /= rank.world_size
        rank.snapshot(step=step, of_linears=torch.cat([gradients(first), gradients(last)]))
        optimizer.step()
        if arm.get("averages_norms") and step == p.steps - 1:
            for parameter in norm.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= rank.world_size
        rank.log(step=step, loss=loss)
        rank.snapshot(step=step, norm=weights(norm), weights=weights(net))


@symptom(HOLDS)
def norms_part(t: Tables) -> Finding:
    """The norm's replicas part in the first update."""
    return negated(ranks_agree(t, "left_out", "norm"))


@symptom(REFUTED)
def others_differ(t: Tables) -> Finding:
    """In the first update gradients of other layers are off, or differ between ranks, as well."""
    return negated(matches(t, "left_out", "one_process", "of_linears", step=0))


@symptom(HOLDS)
def everything_off(t: Tables) -> Finding:
    """In the end all layers are off, as they are trained behind other norms."""
    return negated(matches(t, "left_out", "one_process", "of_linears"))


@remedy(REFUTED)
def average_in_the_end(t: Tables) -> Finding:
    """Averaging the norm's replicas before the model is saved makes up for it."""
    return matches(t, "averaged_once", "one_process", "weights")


@remedy(HOLDS)
def reduce_all(t: Tables) -> Finding:
    """With every gradient averaged the ranks train like one process."""
    return like_one_process(t, "all")


SCENARIO = Scenario(
    title="A reduction turned off for one kind of layer: its replicas part, all others agree",
    family="synchronisation",
    cause="reduction_left_out",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        norms_part=("norms that are not reduced part", "norms need no reduction"),
        others_differ=("other gradients are off at once", "other gradients are right at first"),
        average_in_the_end=("averaging in the end helps", "averaging in the end does not help"),
    ),
    arms=(
        one_process("one process", reduces="all"),
        faulty("left_out", "all but norms", reduces="all but norms"),
        faulty(
            "averaged_once",
            "averaged in the end",
            reduces="all but norms",
            averages_norms=True,
        ),
        fixed("all", "every gradient", reduces="all"),
    ),
    claims=(norms_part, others_differ, everything_off, average_in_the_end, reduce_all),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
