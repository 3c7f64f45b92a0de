"""A clipped running_var does not stay clipped, and a frozen BatchNorm keeps moving. Who does it?

The report: under several GPUs SyncBatchNorm synchronises its statistics after backward and before
optimizer.step, so a running_var clipped after the step is overwritten by the next synchronisation;
and a frozen BatchNorm is updated all the same. The buffers of one layer are recorded bit for bit
at every point of a step. They change in forward only: SyncBatchNorm gathers the batch statistics
there and averages them into whatever the buffer holds, so an edit decays and is not overwritten.
What does overwrite is DDP, which copies rank 0's buffers at the entry of every forward. And what
moves a frozen layer is the next model.train(), or a loop that never met it. On CPU the five
kernels behind torch's SyncBatchNorm function are this project's; on a GPU everything is torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.scenario import (
    Arm,
    Finding,
    Outcome,
    Plot,
    Role,
    Scalar,
    Scenario,
    at_least,
    between,
)
from scenarios._syncbn_clip.claims import CLAIMS

if TYPE_CHECKING:
    from torch import nn

    from harness.rank import Rank


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/syncbn_clip.yaml."""

    clip: float = field(metadata=between(0.0, 3e38))
    steps: int = field(metadata=at_least(3))
    batch: int = field(metadata=at_least(1))
    momentum: float = field(metadata=between(0.0, 1.0))
    quiet: float = field(metadata=at_least(0.0))
    lr: float = field(metadata=at_least(0.0))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """Every rank needs a row."""
    if p.batch >= ranks:
        return []
    return [
        f"scenario.batch={p.batch} leaves some of {ranks} ranks without a row; "
        f"type scenario.batch={ranks} or more"
    ]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a small net, record the norm's buffers at every point of a step, then evaluate."""
    import torch
    import torch.nn.functional as F

    from scenarios._syncbn_clip.norm import Watch, normed_net, rows, wrapped

    eps = p.clip if arm.get("eps") == "clip" else 1e-5
    momentum = arm.get("momentum", p.momentum)
    sync = arm["norm"] == "sync"
    net = normed_net(sync=sync, eps=eps, momentum=momentum, quiet=p.quiet, device=rank.device)
    norm = net[1]
    before_wrapping(arm, p, net, norm)
    model = wrapped(
        net, rank, broadcast=arm.get("broadcast", True), find_unused=arm.get("find_unused", False)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    watch = Watch(rank, norm, count_at=p.steps - 1)
    rank.log(step=0, phase="layer", eps=norm.eps)
    for step in range(p.steps):
        x, y = rows(rank, count=p.batch, quiet=p.quiet, step=step)
        before_forward(arm, model, norm, step)
        optimizer.zero_grad()
        watch.at(step, "before_forward")
        try:
            with watch.during(step, "after_forward"):
                output = model(x)
        except RuntimeError as error:
            if arm.get("freeze") != "after_wrapping":
                raise
            rank.log(step=step, phase="raised", error=str(error).partition("\n")[0])
            return
        # DDP averages the ranks' gradients; so written, the average is that of the global batch.
        loss: Any = F.cross_entropy(output, y, reduction="sum") * rank.world_size / p.batch
        try:
            with watch.during(step, "after_backward"):
                loss.backward()
        except RuntimeError as error:
            if arm.get("clip") != "forward_hook":
                raise
            rank.log(step=step, phase="raised", error=str(error).partition("\n")[0])
            return
        with watch.during(step, "after_step"):
            optimizer.step()
        with watch.during(step, "after_edit"):
            after_step(rank, arm, p, norm)
        watch.learned(step, model)
    if arm.get("clip") == "at_export":
        norm.running_var.clamp_(min=p.clip)
    watch.checkpoint(p.steps, model)
    if rank.repeat:
        return
    model.eval()
    with watch.during(p.steps, "after_eval"), torch.no_grad():
        model(rows(rank, count=p.batch, quiet=p.quiet, step=p.steps)[0])


def after_step(rank: Rank, arm: Arm, p: Params, norm: Any) -> None:
    """The edit that the report is about, behind optimizer.step, on all ranks or on one."""
    if arm.get("clip") == "after_step" and arm.get("clip_on", rank.rank) == rank.rank:
        norm.running_var.clamp_(min=p.clip)


def unheard(layer: nn.Module, mode: bool = True) -> nn.Module:
    """Stand in for a layer's train(): it stays in the mode it is in."""
    return layer


def before_forward(arm: Arm, model: nn.Module, norm: Any, step: int) -> None:
    """What a training loop does at its top: model.train(), or freezing when it is too late."""
    if arm.get("train_every_step"):
        model.train()
    if arm.get("freeze") == "after_wrapping" and step == 1:
        norm.eval().requires_grad_(False)


def before_wrapping(arm: Arm, p: Params, net: nn.Module, norm: Any) -> None:
    """Hook or freeze the layer before DDP gets it: what people try."""
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    def clip(layer: Any, *_: Any) -> None:
        layer.running_var.clamp_(min=p.clip)

    if arm.get("clip") == "forward_hook":
        norm.register_forward_hook(clip)
    if arm.get("clip") == "before_freezing":
        clip(norm)
    way = arm.get("freeze")
    if way == "eval":
        norm.eval()
    elif way == "requires_grad":
        norm.requires_grad_(False)
    elif way == "isinstance_BatchNorm2d":
        for layer in net.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval().requires_grad_(False)
    elif way == "isinstance_BatchNorm_kept":
        for layer in net.modules():
            if isinstance(layer, _BatchNorm):
                layer.eval().requires_grad_(False)
                # model.train() would undo eval(): this layer no longer listens.
                layer.train = partial(unheard, layer)  # type: ignore[method-assign,assignment]


def arm(name: str, role: Role, about: str, **options: Scalar) -> Arm:
    """Return an arm; plain BatchNorm stands in its name, all others are synchronised."""
    norm = "plain" if name.startswith("plain") else "sync"
    return Arm(name=name, role=role, about=about, options={"norm": norm, **options})


REFERENCE, FAULTY, FIXED, CONTROL = Role.REFERENCE, Role.FAULTY, Role.FIXED, Role.CONTROL
STEP = {"clip": "after_step"}
OFF = {"broadcast": False}

ARMS = (
    Arm(
        name="one_process",
        role=REFERENCE,
        about="one process, BatchNorm on the whole batch",
        options={"norm": "plain"},
        ranks=1,
        repeats="permutations",
    ),
    arm("sync_no_clip", CONTROL, "nobody clips"),
    arm("sync_clip_all", FAULTY, "clip after each step, all ranks", **STEP),
    arm("sync_momentum_none", FIXED, "the same, momentum=None", momentum=None, **STEP),
    arm("sync_clip_rank0", FIXED, "clip on rank 0", clip_on=0, **STEP),
    arm("sync_forward_hook", FIXED, "clip in a forward hook", clip="forward_hook"),
    arm("sync_eps", FIXED, "eps raised to the bound, no clip", eps="clip"),
    arm("sync_clip_at_export", FIXED, "clip once, before saving", clip="at_export"),
    arm(
        "sync_clip_then_freeze",
        FIXED,
        "clip once, then freeze for good",
        clip="before_freezing",
        freeze="isinstance_BatchNorm_kept",
        train_every_step=True,
    ),
    arm("plain_forward_hook", FAULTY, "clip in a forward hook", clip="forward_hook"),
    arm("plain_clip_all", FAULTY, "clip on all ranks", **STEP),
    arm("plain_clip_rank0", FAULTY, "clip on rank 0", clip_on=0, **STEP),
    arm("plain_clip_rank1", FAULTY, "clip on rank 1", clip_on=1, **STEP),
    arm("plain_clip_all_off", FIXED, "all ranks, broadcast off", **STEP, **OFF),
    arm("plain_clip_rank0_off", FIXED, "rank 0, broadcast off", clip_on=0, **STEP, **OFF),
    arm("plain_clip_rank1_off", FIXED, "rank 1, broadcast off", clip_on=1, **STEP, **OFF),
    arm("freeze_eval", FIXED, "norm.eval()", freeze="eval"),
    arm(
        "freeze_eval_then_train",
        FAULTY,
        "norm.eval(), then model.train() each step",
        freeze="eval",
        train_every_step=True,
    ),
    arm("freeze_requires_grad", FAULTY, "requires_grad=False only", freeze="requires_grad"),
    arm(
        "freeze_isinstance_2d",
        FAULTY,
        "loop over isinstance(BatchNorm2d)",
        freeze="isinstance_BatchNorm2d",
    ),
    arm(
        "plain_freeze_2d",
        FIXED,
        "the same loop on plain BatchNorm",
        freeze="isinstance_BatchNorm2d",
    ),
    arm(
        "plain_freeze_2d_then_train",
        FAULTY,
        "and model.train() each step",
        freeze="isinstance_BatchNorm2d",
        train_every_step=True,
    ),
    arm("freeze_late", FAULTY, "requires_grad=False behind DDP", freeze="after_wrapping"),
    arm(
        "freeze_late_find_unused",
        FIXED,
        "the same, find_unused_parameters",
        freeze="after_wrapping",
        find_unused=True,
    ),
    arm(
        "freeze_kept",
        FIXED,
        "loop over _BatchNorm, train() switched off",
        freeze="isinstance_BatchNorm_kept",
        train_every_step=True,
    ),
)


def headline(findings: Mapping[str, Finding]) -> str:
    """Say in one sentence who moves the buffers, from the findings."""
    says = {name: finding.outcome for name, finding in findings.items()}

    def clause(claim: str, holds: str, refuted: str, about: str) -> str:
        words = {Outcome.HOLDS: holds, Outcome.REFUTED: refuted}
        return words.get(says[claim], f"{about} is undecided")

    return "; ".join(
        (
            clause(
                "written_in_forward",
                "SyncBatchNorm writes its statistics in forward, not after backward",
                "SyncBatchNorm's statistics do not change in forward alone",
                "where SyncBatchNorm writes",
            ),
            clause(
                "clip_overwritten",
                "the next sync overwrites a clip",
                "a clip is not overwritten there but averaged away",
                "what becomes of a clip",
            ),
            clause(
                "broadcast_overwrites",
                "on ranks other than 0 DDP's copy of rank 0's buffers erases it",
                "DDP's buffer broadcast does not erase it",
                "whether DDP erases it",
            ),
            clause(
                "frozen_still_updated",
                "a layer in eval mode is still updated",
                "a layer in eval mode stays frozen until someone calls train()",
                "whether a frozen layer moves",
            ),
        )
    )


SCENARIO = Scenario(
    title="A clipped running_var does not stay clipped, a frozen BatchNorm keeps moving",
    family="buffers",
    cause="buffer_broadcast",
    params=Params,
    run=run,
    check=check,
    headline=headline,
    differs=("after_step", "before_forward", "before_wrapping"),
    arms=ARMS,
    claims=CLAIMS,
    min_ranks=2,
    plots=(
        Plot(
            metric="running_var.min",
            title="Smallest running_var after forward",
            arms=("sync_no_clip", "sync_clip_all", "sync_momentum_none", "plain_clip_rank1"),
            phase="after_forward",
            log=True,
        ),
        Plot(
            metric="running_var.min",
            title="Smallest running_var after the edit",
            arms=("sync_no_clip", "sync_clip_all", "plain_clip_rank1", "plain_clip_rank1_off"),
            phase="after_edit",
            log=True,
        ),
    ),
)
