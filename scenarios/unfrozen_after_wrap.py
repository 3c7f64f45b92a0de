"""Layers thawed after wrapping: DDP never reduces them, and each rank fine-tunes its own backbone.

DDP takes only parameters that require a gradient when it is made, and a parameter frozen then stays
outside for good. A callback that thaws the backbone after some epochs trains it with each rank's
own gradients: no error, no warning, the loss falls. Head and weights agree until the thaw, so a
check at the start finds nothing. Reported in Lightning-AI/pytorch-lightning#20340,
huggingface/transformers#416.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import like_one_process, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/unfrozen_after_wrap.yaml."""

    frozen: int = field(metadata=at_least(1))
    thawed: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train the head alone, then the backbone, too; how the backbone is kept still differs."""
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import SGD

    from scenarios._models import net, rows, weights

    layers = net(rank)
    backbone, head = layers[0], layers[2]
    backbone.requires_grad_(arm["frozen_by"] == "lr")
    model = DistributedDataParallel(layers, find_unused_parameters=arm.get("find_unused", False))
    optimizer = SGD(head.parameters(), lr=p.lr)
    optimizer.add_param_group({"params": backbone.parameters(), "lr": 0.0})
    x, y = rows(rank, p.batch)
    for step in range(p.frozen + p.thawed):
        if step == p.frozen:
            backbone.requires_grad_(True)
            optimizer.param_groups[1]["lr"] = p.lr
            if arm.get("wraps_again"):
                model = DistributedDataParallel(model.module)
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        rank.log(step=step, loss=loss)
        rank.snapshot(step=step, weights=weights(model))
        rank.digest(step=step, backbone=weights(backbone), head=weights(head))


def parts_at_the_thaw(t: Tables, arm: str) -> Finding:
    """Say whether the ranks' backbones agree until the thaw, and differ at every step after it."""
    t.require(arm)
    steps, thaw = t.series(arm, "backbone.digest"), t.root_params["frozen"]
    others = [t.series(arm, "backbone.digest", rank=rank) for rank in t.ranks(arm)[1:]]
    parted = [step for step in steps if any(other[step] != steps[step] for other in others)]
    reason = f"{arm}: backbones differ between ranks at steps {parted or 'none'}, thawed at {thaw}"
    return (holds if parted == [step for step in steps if step >= thaw] else refuted)(reason)


@symptom(HOLDS, source="Lightning-AI/pytorch-lightning#20340")
def backbones_part(t: Tables) -> Finding:
    """From the thaw on each rank has a backbone of its own, and not before."""
    return parts_at_the_thaw(t, "thawed")


@symptom(REFUTED)
def loss_stops(t: Tables) -> Finding:
    """One sees it in the loss, which stops falling at the thaw."""
    t.require("thawed")
    thaw = t.root_params["frozen"]
    losses = [t.series("thawed", "loss", rank=rank) for rank in t.ranks("thawed")]
    falls = max(list(loss.values())[-1] / loss[thaw] for loss in losses)
    reason = f"on every rank the last loss is at most {falls:.3f} of that at the thaw"
    return (refuted if falls < 1.0 else holds)(reason, effect=falls, unit="last loss / at the thaw")


@remedy(REFUTED)
def flag_helps(t: Tables) -> Finding:
    """find_unused_parameters=True makes DDP notice the thawed layers."""
    return ranks_agree(t, "flag", "backbone")


@mechanism(HOLDS)
def head_agrees(t: Tables) -> Finding:
    """The head, which DDP knew from the start, stays equal bit for bit."""
    return ranks_agree(t, "thawed", "head")


@remedy(HOLDS)
def wrap_again(t: Tables) -> Finding:
    """Wrap the module again after the thaw: N ranks fine-tune like one process."""
    return like_one_process(t, "wrapped_again")


@remedy(HOLDS)
def freeze_by_lr(t: Tables) -> Finding:
    """Freeze by a learning rate of 0 instead, so that DDP knows all parameters: the same."""
    return like_one_process(t, "lr_zero")


SCENARIO = Scenario(
    title="Layers thawed after wrapping are never reduced: each rank fine-tunes its own backbone",
    family="synchronisation",
    cause="unfrozen_after_wrap",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        backbones_part=("a backbone thawed after wrapping parts", "thawed backbones stay equal"),
        loss_stops=("the loss stops falling", "the loss goes on falling"),
        flag_helps=("find_unused_parameters helps", "find_unused_parameters does not help"),
        wrap_again=("wrapping again does", "nor does wrapping again"),
    ),
    arms=(
        one_process("one process", frozen_by="flag"),
        faulty("thawed", "wrap while frozen, then thaw", frozen_by="flag"),
        faulty("flag", "with find_unused_parameters", frozen_by="flag", find_unused=True),
        fixed("wrapped_again", "thaw, then wrap again", frozen_by="flag", wraps_again=True),
        fixed("lr_zero", "frozen by a learning rate of 0", frozen_by="lr"),
    ),
    claims=(backbones_part, loss_stops, flag_helps, head_agrees, wrap_again, freeze_by_lr),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
