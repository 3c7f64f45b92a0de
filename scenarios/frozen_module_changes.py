"""A frozen backbone gives other features after fine-tuning: its running statistics went on moving.

`requires_grad=False` stops the optimizer, not the forward: in train mode a batch norm takes in the
statistics of every batch it sees. The frozen weights are the same bit for bit, so comparing them
says that all is well. `backbone.eval()` before the loop lasts until `model.train()` at the top of
the first epoch. Reported in pytorch/pytorch#86590, lightly-ai/lightly#1438, pytorch/pytorch#37823
(`track_running_stats` switched off later).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, like_one_process, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted, unknown
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/frozen_module_changes.yaml."""

    epochs: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a head on a frozen backbone; what is done besides requires_grad=False differs."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import FEATURES, mlp, rows, weights

    norm = nn.BatchNorm1d(12, dtype=torch.float64)
    linear = mlp((FEATURES, 12), generator=rank.generator("backbone"))
    backbone = nn.Sequential(linear, norm, nn.Tanh()).to(rank.device)
    head = mlp((12, 1), generator=rank.generator("head")).to(rank.device)
    backbone.requires_grad_(False)
    if arm["freezes"] == "eval_once":
        backbone.eval()
    if arm["freezes"] == "track_off":
        norm.track_running_stats = False
    model = DistributedDataParallel(nn.Sequential(backbone, head))
    optimizer = torch.optim.SGD(head.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    probe, _ = rows(rank, p.batch, name="probe", whole=True)
    for epoch in range(p.epochs):
        model.train()
        if arm["freezes"] == "eval_always":
            backbone.eval()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            rank.digest(step=epoch, features=backbone(probe), frozen_weights=weights(backbone))
        rank.snapshot(step=epoch, weights=weights(head))


def stays(t: Tables, arm: str, name: str) -> Finding:
    """Say whether something keeps its bits on every rank of the arm, while the head is trained."""
    t.require(arm)
    for rank in t.ranks(arm):
        if len(set(t.series(arm, "weights.digest", rank=rank).values())) == 1:
            return unknown(f"the head of {arm} never changes: nothing was trained")
        series = list(t.series(arm, f"{name}.digest", rank=rank).values())
        if len(set(series)) > 1:
            return refuted(f"the {name} of rank {rank} of {arm} change while the head is trained")
    return holds(f"the {name} of {arm} keep every bit over {len(series)} epochs")


@symptom(HOLDS, source="pytorch/pytorch#86590")
def features_change(t: Tables) -> Finding:
    """With requires_grad=False alone the backbone's features for the same rows change."""
    return negated(stays(t, "requires_grad_off", "features"))


@symptom(REFUTED)
def frozen_weights_show_it(t: Tables) -> Finding:
    """One sees it in the frozen weights."""
    return negated(stays(t, "requires_grad_off", "frozen_weights"))


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The trained weights part between ranks."""
    return negated(ranks_agree(t, "requires_grad_off", "weights"))


@remedy(REFUTED)
def eval_once_is_enough(t: Tables) -> Finding:
    """Calling backbone.eval() before the first epoch is enough."""
    return all_of(stays(t, "eval_once", "features"), like_one_process(t, "eval_once"))


@remedy(REFUTED, source="pytorch/pytorch#37823")
def tracking_off_is_enough(t: Tables) -> Finding:
    """Setting norm.track_running_stats = False is enough."""
    return all_of(stays(t, "track_off", "features"), like_one_process(t, "track_off"))


@remedy(HOLDS, source="lightly-ai/lightly#1438")
def eval_every_epoch(t: Tables) -> Finding:
    """backbone.eval() after every model.train(): features stay, N ranks train like one process."""
    return all_of(stays(t, "eval_always", "features"), like_one_process(t, "eval_always"))


SCENARIO = Scenario(
    title="A frozen backbone changes: requires_grad=False does not stop running statistics",
    family="buffers",
    cause="frozen_module_changes",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        features_change=("a frozen backbone's features change", "frozen features stay"),
        frozen_weights_show_it=("its weights show it", "its weights do not"),
        eval_once_is_enough=("eval() once is enough", "train() undoes an eval() before the loop"),
        eval_every_epoch=("eval() in every epoch freezes it", "eval() does not freeze it"),
    ),
    arms=(
        one_process("one process, backbone in eval", freezes="eval_always"),
        faulty("requires_grad_off", "requires_grad=False only", freezes="requires_grad_off"),
        faulty("eval_once", "and backbone.eval() before the loop", freezes="eval_once"),
        control("track_off", "and track_running_stats = False", freezes="track_off"),
        fixed("eval_always", "backbone.eval() after model.train()", freezes="eval_always"),
    ),
    claims=(
        features_change,
        frozen_weights_show_it,
        ranks_part,
        eval_once_is_enough,
        tracking_off_is_enough,
        eval_every_epoch,
    ),
)
