"""A strided view in a collective: gloo takes its memory for a dense tensor's, and says nothing.

A slice of columns is a view with gaps. Gloo reduces as many numbers as the view has, from its first
one on, gaps and all: numbers beside the view are summed as well, and the last ones of the view are
not. Gradients that are averaged in slices of columns then part between ranks, or are summed twice.
Slices of rows have no gaps. Measured with torch 2.13; other backends may refuse such a view.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, mechanism, remedy, symptom
from harness.findings import is_rounding, like_one_process, negated, ranks_agree, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Scenario, at_least
from harness.tables import relative_l2
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

WIDE = (4, 6)
"""Rows and columns of the weight, whose gradient is averaged in two halves."""


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/strided_view_reduced.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a layer whose gradient is averaged by hand in two halves; how they are cut differs."""
    import torch
    import torch.distributed as dist

    from scenarios._models import rows

    drawn = torch.randn(WIDE, generator=rank.generator("net"), dtype=torch.float64)
    weight = drawn.to(rank.device).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        optimizer.zero_grad()
        output = torch.tanh(x @ weight.T).sum(dim=1, keepdim=True)
        torch.nn.functional.mse_loss(output, y).backward()
        gradient = weight.grad
        assert gradient is not None
        rank.snapshot(step=step, own=gradient)
        if arm["halves"] == "whole":
            dist.all_reduce(gradient)
        for half in gradient.chunk(2, dim=0) if arm["halves"] == "rows" else ():
            dist.all_reduce(half)
        for half in gradient.chunk(2, dim=1) if arm["halves"].startswith("columns") else ():
            if arm["halves"] == "columns, copied":
                dense = half.contiguous()
                dist.all_reduce(dense)
                half.copy_(dense)
            else:
                dist.all_reduce(half)
        gradient /= rank.world_size
        rank.snapshot(step=step, gradient=gradient)
        optimizer.step()
        rank.snapshot(step=step, weight=weight)


@symptom(HOLDS)
def ranks_part(t: Tables) -> Finding:
    """Averaged in halves of columns the gradients differ between ranks."""
    return negated(ranks_agree(t, "columns", "gradient"))


@mechanism(HOLDS)
def dense_memory(t: Tables) -> Finding:
    """What is summed is the memory from the view's first number on, as if it had no gaps."""
    import numpy as np

    t.require("columns")
    ranks, half = t.ranks("columns"), WIDE[0] * WIDE[1] // 2
    memory = np.stack([t.snapshot("columns", "own", step=0, rank=r) for r in ranks])
    for start in (0, WIDE[1] // 2):
        part = slice(start, start + half)
        memory[:, part] = memory[:, part].sum(axis=0)
    found = [t.snapshot("columns", "gradient", step=0, rank=r) for r in ranks]
    gap = max(relative_l2(found[r], memory[r] / len(ranks)) for r in ranks)
    floor = rounding(t, "one_process", "gradient", step=0)
    reason = f"the gradients are {gap:.2g} from sums over such memory"
    return is_rounding(gap, floor, reason, "relative L2 distance")


@symptom(HOLDS)
def rows_are_right(t: Tables) -> Finding:
    """Averaged in halves of rows, which are dense, they are those of one process."""
    return like_one_process(t, "rows", "weight")


@remedy(HOLDS)
def copy(t: Tables) -> Finding:
    """With each half copied, reduced and copied back, the ranks train like one process."""
    return like_one_process(t, "copied", "weight")


@remedy(HOLDS)
def at_once(t: Tables) -> Finding:
    """With the gradient reduced at once they do, too."""
    return like_one_process(t, "whole", "weight")


SCENARIO = Scenario(
    title="A slice of columns in an all-reduce: gloo sums the memory in between, without an error",
    family="synchronisation",
    cause="strided_view_reduced",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        ranks_part=("a reduced slice of columns makes ranks part", "a slice of columns is reduced"),
        dense_memory=("its memory is summed as if dense", "by another rule"),
        rows_are_right=("slices of rows are right", "slices of rows are wrong, too"),
    ),
    arms=(
        one_process("one process", halves="whole"),
        faulty("columns", "in halves of columns", halves="columns"),
        control("rows", "in halves of rows", halves="rows"),
        fixed("copied", "in copies of these", halves="columns, copied"),
        fixed("whole", "at once", halves="whole"),
    ),
    claims=(ranks_part, dense_memory, rows_are_right, copy, at_once),
)
