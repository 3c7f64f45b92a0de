"""Ranks with batches of different sizes: DDP gives each rank the same weight, not each row.

A mean loss divides by the rows of the rank, and DDP then takes the plain mean over ranks: a row on
the rank with the fewest rows counts most. So where batches are filled up to a budget of tokens, or
each rank reads a file of its own, the result depends on how the rows are spread. The ranks agree on
every weight. Reported in pytorch/pytorch#67253 and #37359.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, like_one_process, matches, negated, ranks_agree, says
from harness.floor import Size
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, unknown
from harness.tables import relative_l2

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """The values are in conf/scenario/unequal_batches_equal_weight.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """Each rank gets a row."""
    if p.batch >= ranks**2:
        return []
    return [f"scenario.batch={p.batch} is too small to be spread; type scenario.batch={ranks**2}"]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Fit a small net on files of different lengths; what a rank's loss is divided by differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import net, rows, weights

    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch, whole=True)
    # The file of the last rank is the longest.
    start, end = (p.batch * n**2 // rank.world_size**2 for n in (rank.rank, rank.rank + 1))
    x, y = x[start:end], y[start:end]
    for step in range(p.steps):
        optimizer.zero_grad()
        errors = (model(x) - y) ** 2
        if arm["divide_by"] == "own":
            loss = errors.mean()
        elif arm["divide_by"] == "all":
            count = torch.tensor(len(errors), device=rank.device)
            dist.all_reduce(count)
            loss = errors.sum() * rank.world_size / count
        else:
            loss = errors.sum() / (p.batch / rank.world_size)
        own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()
        rank.log(step=step, loss=loss, rows=len(x))
        rank.snapshot(step=step, weights=weights(model), own=torch.cat([g.flatten() for g in own]))


@symptom(HOLDS, source="pytorch/pytorch#67253")
def off_one_process(t: Tables) -> Finding:
    """With mean losses over unequal batches the weights are not those of one process."""
    return negated(matches(t, "own_mean", "one_process", "weights"))


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "own_mean", "weights"))


@mechanism(HOLDS)
def only_the_weight_is_wrong(t: Tables) -> Finding:
    """Weighted by rows the very same gradients of the ranks give that of one process."""
    t.require("own_mean", "one_process")
    ranks = t.ranks("own_mean")
    own = [t.snapshot("own_mean", "own", step=0, rank=r) for r in ranks]
    count = [t.value("own_mean", "rows", step=0, rank=r) for r in ranks]
    due = t.snapshot("one_process", "own", step=0)
    floor = rounding(t, "one_process", "own", step=0)
    plain = relative_l2(sum(own[1:], own[0]) / len(own), due)
    if floor.size(plain) is not Size.FAULT:
        return unknown(f"the plain mean is {plain:.2g} from one process: the weights do not matter")
    parts = [n * gradient for n, gradient in zip(count, own, strict=True)]
    gap = relative_l2(sum(parts[1:], parts[0]) / sum(count), due)
    reason = (
        f"weighted by rows the gradients are {gap:.2g} from one process, unweighted {plain:.2g}"
    )
    return is_rounding(gap, floor, reason, "relative L2 distance")


@remedy(HOLDS, source="pytorch/pytorch#37359")
def divide_by_all(t: Tables) -> Finding:
    """Sum the errors, divide by all rows over N: N ranks train like one process."""
    return like_one_process(t, "all_rows")


@remedy(HOLDS)
def divide_by_nominal(t: Tables) -> Finding:
    """Where all rows are a fixed number, dividing by it needs no communication: the same."""
    return like_one_process(t, "nominal")


SCENARIO = Scenario(
    title="Batches of different sizes: DDP weighs ranks, so rows of a small batch count more",
    family="normalisation",
    cause="unequal_batches_equal_weight",
    params=Params,
    run=run,
    check=check,
    headline=says(
        off_one_process=("unequal batches train something else", "unequal batches do no harm"),
        ranks_part=("the ranks part", "all ranks agree on it"),
        only_the_weight_is_wrong=("only their weights are wrong", "more than weights is wrong"),
        divide_by_all=("dividing by all rows cures it", "dividing by all rows does not help"),
    ),
    arms=(
        one_process("one process", divide_by="own"),
        faulty("own_mean", "mean over the rank's rows", divide_by="own"),
        fixed("all_rows", "sum * N / rows of all ranks", divide_by="all"),
        fixed("nominal", "sum / (batch / N)", divide_by="nominal"),
    ),
    claims=(
        off_one_process,
        ranks_part,
        only_the_weight_is_wrong,
        divide_by_all,
        divide_by_nominal,
    ),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
