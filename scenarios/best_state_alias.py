"""state_dict() hands out the weights themselves: the best checkpoint kept by it is the last one.

`best = model.state_dict()` copies no tensor. Training goes on in place, and what was kept follows
it. A buffer read without clone() is the same: running_mean compared with itself never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import counts, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, one_of, refuted, unknown
from scenarios._digits import prerequisite

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/best_state_alias.yaml."""

    scale: str = field(metadata=one_of("toy", "real"))
    rows: int = field(metadata=at_least(4))
    steps: int = field(metadata=at_least(8))
    lr: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train, keep the best state, restore it at the end; how it is kept is what differs."""
    import copy
    import io

    import torch
    from torch import nn

    from scenarios._digits import held_out, rows
    from scenarios._models import mlp

    (x, y), (held_x, held_y) = (deal(rank, p.rows, p.scale) for deal in (rows, held_out))
    y[::4] = y.roll(1, dims=0)[::4]  # Wrong labels: a net that learns them gets worse.
    norm = nn.BatchNorm1d(x.shape[1], dtype=torch.float64)
    net = mlp((x.shape[1], 24, y.shape[1]), generator=rank.generator("net"))
    model = nn.Sequential(norm, net).to(rank.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr, momentum=0.9)
    assert norm.running_mean is not None
    before = norm.running_mean if arm["keeps"] == "state_dict" else norm.running_mean.clone()
    best, smallest = model.state_dict(), float("inf")
    for step in range(p.steps):
        model.train()
        optimizer.zero_grad()
        (model(x) - y).square().sum(dim=1).mean().backward()
        optimizer.step()
        loss = nn.functional.mse_loss(model.eval()(held_x), held_y).item()
        rank.log(step=step, loss=loss)
        if loss >= smallest:
            continue
        smallest = loss
        if arm["keeps"] == "state_dict":
            best = model.state_dict()
        if arm["keeps"] == "copy":
            best = copy.copy(model.state_dict())
        if arm["keeps"] == "deepcopy":
            best = copy.deepcopy(model.state_dict())
        if arm["keeps"] == "file":
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            best = torch.load(io.BytesIO(file.getvalue()))
    model.load_state_dict(best)
    rank.log(step=p.steps, restored=nn.functional.mse_loss(model.eval()(held_x), held_y))
    rank.log(step=p.steps, smallest=smallest, mean_same=int(torch.equal(before, norm.running_mean)))


def is_the_best(t: Tables, arm: str) -> Finding:
    """Decide: restored, the arm's state has the smallest loss that was seen, to the last bit."""
    t.require(arm)
    smallest, restored, last = (t.last(arm, name) for name in ("smallest", "restored", "loss"))
    if last == smallest:
        return unknown(f"{arm}: the last step is the best one, so that nothing is to be restored")
    said = f"{arm}: smallest loss {smallest:.4g}, restored {restored:.4g}, last {last:.4g}"
    return (holds if restored == smallest else refuted)(said, effect=restored, unit="loss")


@symptom(HOLDS)
def best_is_the_last(t: Tables) -> Finding:
    """Kept by best = model.state_dict(), the best state is not the best one once it is restored."""
    return negated(is_the_best(t, "state_dict"))


@remedy(REFUTED)
def shallow_copy_keeps_it(t: Tables) -> Finding:
    """A copy of the dictionary keeps it."""
    return is_the_best(t, "copy")


@remedy(HOLDS)
def deep_copy_keeps_it(t: Tables) -> Finding:
    """copy.deepcopy(model.state_dict()) keeps it."""
    return is_the_best(t, "deepcopy")


@remedy(HOLDS)
def file_keeps_it(t: Tables) -> Finding:
    """So does a file written at once."""
    return is_the_best(t, "file")


@mechanism(HOLDS, settles="A69")
def running_mean_changes(t: Tables) -> Finding:
    """A forward pass in train mode changes running_mean, as a copy of it taken before shows."""
    return counts(t, "deepcopy", "mean_same", 0, "copies equal to running_mean")


@symptom(HOLDS)
def alias_shows_no_change(t: Tables) -> Finding:
    """Without clone() it is compared with itself and seems never to change."""
    return counts(t, "state_dict", "mean_same", 1, "tensors equal to running_mean")


SCENARIO = Scenario(
    title="best = model.state_dict() keeps no copy: the best checkpoint is the last one",
    family="buffers",
    cause="state_dict_aliased",
    params=Params,
    run=run,
    min_ranks=1,
    check=lambda p, ranks: prerequisite(p.scale),
    headline=says(
        best_is_the_last=("state_dict() follows the training", "state_dict() is a copy"),
        shallow_copy_keeps_it=("copy.copy keeps it", "copy.copy does too, deepcopy does not"),
    ),
    arms=(
        reference("deepcopy", "copy.deepcopy", ranks=1, keeps="deepcopy"),
        faulty("state_dict", "model.state_dict()", ranks=1, keeps="state_dict"),
        faulty("copy", "copy.copy of it", ranks=1, keeps="copy"),
        fixed("file", "torch.save", ranks=1, keeps="file"),
    ),
    claims=(
        best_is_the_last,
        shallow_copy_keeps_it,
        deep_copy_keeps_it,
        file_keeps_it,
        running_mean_changes,
        alias_shows_no_change,
    ),
)
