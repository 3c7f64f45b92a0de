"""Resuming with the weights alone: Adam forgets its moments, and training goes another way.

A checkpoint of `model.state_dict()` looks complete: the first loss after the resume is the last one
before it. But Adam restarts with zero moments, and its first update is then the sign of the
gradient at full learning rate. All ranks do so alike, so that no comparison of ranks sees it. When
the optimizer's state is loaded on rank 0 only, the replicas part although their gradients agree.
Reported in KempnerInstitute/KempnerForge#115 and wenet-e2e/wenet#2619.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/optimizer_state_lost.yaml."""

    before: int = field(metadata=at_least(1))
    after: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train, stop, load what the arm has kept, train on."""
    import io

    import torch
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import net, rows, weights

    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.Adam(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.before + p.after):
        if step == p.before and arm["resume"] != "never":
            checkpoint = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], checkpoint)
            checkpoint.seek(0)
            saved_model, saved_optimizer = torch.load(checkpoint, weights_only=True)
            model = DistributedDataParallel(net(rank))
            model.load_state_dict(saved_model)
            optimizer = torch.optim.Adam(model.parameters(), lr=p.lr)
            if arm["resume"] == "all" or (arm["resume"] == "rank0" and rank.rank == 0):
                optimizer.load_state_dict(saved_optimizer)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        rank.log(step=step, loss=loss)
        rank.snapshot(step=step, weights=weights(model))


@symptom(HOLDS, source="KempnerInstitute/KempnerForge#115")
def off_track(t: Tables) -> Finding:
    """One update after a resume from weights alone the weights are others."""
    return negated(
        matches(t, "weights_only", "one_process", "weights", step=t.root_params["before"])
    )


@symptom(REFUTED)
def first_loss_shows_it(t: Tables) -> Finding:
    """The first loss after the resume shows that something is missing."""
    arms = ("weights_only", "uninterrupted")
    t.require(*arms)
    step = t.root_params["before"]
    lost, whole = ([t.value(a, "loss", step=step, rank=r) for r in t.ranks(a)] for a in arms)
    if lost == whole:
        return refuted(f"the first loss after the resume is exactly the right one, {lost[0]:.4g}")
    return holds(f"the first loss after the resume is {lost[0]:.4g}, not {whole[0]:.4g}")


@symptom(REFUTED)
def ranks_differ(t: Tables) -> Finding:
    """The ranks then hold different weights."""
    return negated(ranks_agree(t, "weights_only", "weights"))


@symptom(HOLDS)
def rank0_parts(t: Tables) -> Finding:
    """Optimizer state loaded on rank 0 only parts the replicas."""
    return negated(ranks_agree(t, "rank0_only", "weights"))


@remedy(HOLDS)
def load_both(t: Tables) -> Finding:
    """With both states on every rank the run goes on as if it had never stopped."""
    return like_one_process(t, "both")


SCENARIO = Scenario(
    title="Resuming with the weights alone: Adam's moments are lost, the loss looks right",
    family="resume",
    cause="optimizer_state_lost",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        off_track=(
            "a resume without optimizer state goes astray in its first update",
            "a resume without optimizer state stays on track",
        ),
        first_loss_shows_it=("which its first loss shows", "its first loss is the right one"),
        ranks_differ=("the ranks part", "the ranks agree"),
        rank0_parts=("state loaded on rank 0 only parts the replicas", "rank 0's state is enough"),
    ),
    arms=(
        one_process("one process, never stopped", resume="never"),
        control("uninterrupted", "all ranks, never stopped", resume="never"),
        faulty("weights_only", "model.load_state_dict only", resume="none"),
        faulty("rank0_only", "optimizer state loaded on rank 0 only", resume="rank0"),
        fixed("both", "model and optimizer state on every rank", resume="all"),
    ),
    claims=(off_track, first_loss_shows_it, ranks_differ, rank0_parts, load_both),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
