"""What is claimed in `syncbn_clip`: the statements of the report, and every remedy people try."""

from __future__ import annotations

from functools import partial

from harness.scenario import Claim, Kind, Outcome
from scenarios._syncbn_clip import clip, freeze, remedies

STATEMENTS = (
    Claim(
        name="sync_after_backward",
        kind=Kind.MECHANISM,
        text="SyncBatchNorm synchronises its statistics after backward, before optimizer.step.",
        expects=Outcome.REFUTED,
        judge=clip.sync_after_backward,
        settles=("A27",),
    ),
    Claim(
        name="written_in_forward",
        kind=Kind.MECHANISM,
        text="The statistics change in forward only, carried by the layer's one all_gather.",
        expects=Outcome.HOLDS,
        judge=clip.written_in_forward,
    ),
    Claim(
        name="clip_overwritten",
        kind=Kind.SYMPTOM,
        text="Under SyncBatchNorm a running_var clipped after the step is gone at the next sync.",
        expects=Outcome.REFUTED,
        judge=clip.clip_overwritten,
        settles=("A27",),
    ),
    Claim(
        name="clip_decays",
        kind=Kind.MECHANISM,
        text="The next forward leaves (1 - momentum) * clipped + momentum * batch variance.",
        expects=Outcome.HOLDS,
        judge=clip.clip_decays,
    ),
    Claim(
        name="clip_lost_off_rank0",
        kind=Kind.SYMPTOM,
        text="With plain BatchNorm under DDP, a clip on rank 1 is gone at the next forward.",
        expects=Outcome.HOLDS,
        judge=clip.clip_lost_off_rank0,
        settles=("A27",),
    ),
    Claim(
        name="broadcast_overwrites",
        kind=Kind.MECHANISM,
        text="What overwrites it is DDP: every forward, in eval too, begins with rank 0's buffers.",
        expects=Outcome.HOLDS,
        judge=clip.broadcast_overwrites,
    ),
    Claim(
        name="plain_ranks_agree",
        kind=Kind.SYMPTOM,
        text="Under DDP, plain BatchNorm's running statistics are the same on all ranks.",
        expects=Outcome.REFUTED,
        judge=clip.plain_ranks_agree,
        source="pytorch/pytorch#13711",
    ),
    Claim(
        name="matches_one_process",
        kind=Kind.MECHANISM,
        text="SyncBatchNorm's statistics are those of one process on the whole batch.",
        expects=Outcome.HOLDS,
        judge=clip.matches_one_process,
    ),
)

CLIP_REMEDIES = (
    Claim(
        name="clip_on_all_ranks",
        kind=Kind.REMEDY,
        text="Clip after each step on every rank: checkpoint and eval are at the bound.",
        expects=Outcome.HOLDS,
        judge=partial(
            remedies.keeps_bound, arms=("sync_clip_all", "plain_clip_all", "plain_clip_all_off")
        ),
    ),
    Claim(
        name="clip_on_rank0",
        kind=Kind.REMEDY,
        text="Clip on rank 0 only: DDP hands it to the other ranks.",
        expects=Outcome.REFUTED,
        judge=partial(remedies.keeps_bound, arms=("sync_clip_rank0", "plain_clip_rank0")),
    ),
    Claim(
        name="broadcast_off",
        kind=Kind.REMEDY,
        text="Switch DDP's buffer broadcast off, and a clip on one rank is enough.",
        expects=Outcome.REFUTED,
        judge=partial(remedies.keeps_bound, arms=("plain_clip_rank0_off", "plain_clip_rank1_off")),
    ),
    Claim(
        name="momentum_none",
        kind=Kind.REMEDY,
        text="With momentum=None a clipped running_var stays at the bound.",
        expects=Outcome.REFUTED,
        judge=remedies.momentum_none,
    ),
    Claim(
        name="forward_hook",
        kind=Kind.REMEDY,
        text="Clip in a forward hook of a SyncBatchNorm: checkpoint and eval are at the bound.",
        expects=Outcome.HOLDS,
        judge=partial(remedies.keeps_bound, arms=("sync_forward_hook",)),
    ),
    Claim(
        name="forward_hook_on_plain",
        kind=Kind.REMEDY,
        text="The same forward hook does it for plain BatchNorm.",
        expects=Outcome.REFUTED,
        judge=remedies.forward_hook_on_plain,
    ),
    Claim(
        name="raise_eps",
        kind=Kind.REMEDY,
        text="Raise eps to the bound: running_var then needs no clip.",
        expects=Outcome.REFUTED,
        judge=remedies.raise_eps,
    ),
    Claim(
        name="clip_at_export",
        kind=Kind.REMEDY,
        text="Clip once, on every rank, just before saving and evaluating.",
        expects=Outcome.HOLDS,
        judge=partial(remedies.keeps_bound, arms=("sync_clip_at_export",)),
    ),
    Claim(
        name="clip_then_freeze",
        kind=Kind.REMEDY,
        text="Clip once and freeze the layer for good: the bound outlives all further training.",
        expects=Outcome.HOLDS,
        judge=partial(remedies.keeps_bound, arms=("sync_clip_then_freeze",)),
    ),
)

FREEZING = (
    Claim(
        name="frozen_still_updated",
        kind=Kind.SYMPTOM,
        text="A SyncBatchNorm in eval mode is still synchronised and updated under DDP.",
        expects=Outcome.REFUTED,
        judge=freeze.frozen_still_updated,
        source="pytorch/pytorch#48988",
        settles=("A72",),
    ),
    Claim(
        name="eval_outlives_train",
        kind=Kind.REMEDY,
        text="One norm.eval() before the loop freezes the statistics, model.train() or not.",
        expects=Outcome.REFUTED,
        judge=partial(freeze.freezes, arm="freeze_eval_then_train"),
        source="pytorch/pytorch#66073",
    ),
    Claim(
        name="requires_grad_freezes",
        kind=Kind.REMEDY,
        text="requires_grad=False freezes a BatchNorm.",
        expects=Outcome.REFUTED,
        judge=partial(freeze.freezes, arm="freeze_requires_grad"),
        source="pytorch/pytorch#86590",
    ),
    Claim(
        name="isinstance_2d_freezes",
        kind=Kind.REMEDY,
        text="A loop over isinstance(layer, BatchNorm2d) freezes every norm, SyncBatchNorm too.",
        expects=Outcome.REFUTED,
        judge=partial(freeze.freezes, arm="freeze_isinstance_2d"),
        settles=("A73",),
    ),
    Claim(
        name="isinstance_2d_on_plain",
        kind=Kind.REMEDY,
        text="That loop, with eval() and requires_grad=False, freezes every plain BatchNorm2d.",
        expects=Outcome.HOLDS,
        judge=partial(freeze.freezes_all, arm="plain_freeze_2d"),
        settles=("A73",),
    ),
    Claim(
        name="isinstance_2d_outlives_train",
        kind=Kind.REMEDY,
        text="What the loop has frozen stays so when the next epoch begins with model.train().",
        expects=Outcome.REFUTED,
        judge=partial(freeze.freezes_all, arm="plain_freeze_2d_then_train"),
        settles=("A73",),
    ),
    Claim(
        name="late_freeze_silent",
        kind=Kind.SYMPTOM,
        text="The first step after requires_grad=False behind DDP uses unsynchronised gradients.",
        expects=Outcome.HOLDS,
        judge=freeze.late_freeze_silent,
        source="pytorch/pytorch#22049",
        settles=("~A74",),
    ),
    Claim(
        name="late_freeze_raises",
        kind=Kind.SYMPTOM,
        text="The forward after that raises RuntimeError on every rank.",
        expects=Outcome.HOLDS,
        judge=freeze.late_freeze_raises,
        source="pytorch/pytorch#43259",
        settles=("~A74",),
    ),
    Claim(
        name="find_unused_allows_it",
        kind=Kind.REMEDY,
        text="With find_unused_parameters=True a layer may be frozen behind DDP.",
        expects=Outcome.HOLDS,
        judge=freeze.find_unused,
    ),
    Claim(
        name="freeze_kept",
        kind=Kind.REMEDY,
        text="Freeze every _BatchNorm before DDP and switch its train() off: nothing moves it.",
        expects=Outcome.HOLDS,
        judge=partial(freeze.freezes_all, arm="freeze_kept"),
    ),
)

CLAIMS = STATEMENTS + CLIP_REMEDIES + FREEZING
