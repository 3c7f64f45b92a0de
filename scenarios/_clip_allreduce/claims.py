"""What is claimed about clipping on several ranks, by whom, and what this project found."""

from __future__ import annotations

from collections.abc import Mapping

from harness.scenario import Claim, Finding, Kind, Outcome
from scenarios._clip_allreduce import gradients, lone, report, traffic

CLAIMS = (
    Claim(
        name="ddp_reduces_the_norm",
        kind=Kind.MECHANISM,
        text="Under DDP, clip_grad_norm_ all-reduces the global norm.",
        expects=Outcome.REFUTED,
        judge=traffic.ddp_reduces_the_norm,
        settles=("A63",),
    ),
    Claim(
        name="value_clip_is_silent",
        kind=Kind.MECHANISM,
        text="clip_grad_value_ sends nothing.",
        expects=Outcome.HOLDS,
        judge=traffic.value_clip_is_silent,
        settles=("A64",),
    ),
    Claim(
        name="value_clip_saves_traffic",
        kind=Kind.REMEDY,
        text="Under DDP, clip_grad_value_ saves the communication of clip_grad_norm_.",
        expects=Outcome.REFUTED,
        judge=traffic.value_clip_saves_traffic,
        settles=("A64",),
    ),
    Claim(
        name="sharded_norm_is_one_all_reduce",
        kind=Kind.COST,
        text="With sharded gradients, a norm clip is one all-reduce.",
        expects=Outcome.HOLDS,
        judge=traffic.sharded_norm_is_one_all_reduce,
        settles=("A63",),
    ),
    Claim(
        name="traffic_grows_with_the_model",
        kind=Kind.COST,
        text="What the clip sends grows with the model.",
        expects=Outcome.REFUTED,
        judge=traffic.traffic_grows_with_the_model,
    ),
    Claim(
        name="clip_takes_as_long_as_backward",
        kind=Kind.COST,
        text="Under DDP, clip_grad_norm_ takes as long as backward with its all-reduce.",
        expects=Outcome.REFUTED,
        judge=traffic.clip_takes_as_long_as_backward,
    ),
    Claim(
        name="distributed_clip_is_right",
        kind=Kind.REMEDY,
        text="Called on every rank the documented way, the clip gives one process's gradient.",
        expects=Outcome.HOLDS,
        # The 1e-6 added to the norm was added to the norm of each shard.
        before={"2.10": Outcome.REFUTED},
        judge=gradients.distributed_clip_is_right,
    ),
    Claim(
        name="local_norm_is_the_models",
        kind=Kind.SYMPTOM,
        text="Clipping the shards each rank holds, or its layers' shards, is clipping the model.",
        expects=Outcome.REFUTED,
        judge=gradients.local_norm_is_the_models,
    ),
    Claim(
        name="shard_norm_is_sqrt_n_smaller",
        kind=Kind.MECHANISM,
        text="In root mean square over N ranks, a shard's norm is the model's divided by sqrt(N).",
        expects=Outcome.HOLDS,
        judge=gradients.shard_norm_is_sqrt_n_smaller,
    ),
    Claim(
        name="one_call_takes_both_kinds",
        kind=Kind.SYMPTOM,
        text="clip_grad_norm_ takes fully_shard's and replicated parameters in one call.",
        expects=Outcome.REFUTED,
        judge=gradients.one_call_takes_both_kinds,
        source="huggingface/accelerate#4219",
    ),
    Claim(
        name="returned_norm_can_be_logged",
        kind=Kind.SYMPTOM,
        text="Under fully_shard, clip_grad_norm_ returns the model's norm on every rank.",
        expects=Outcome.REFUTED,
        before={"2.10": Outcome.REFUTED, "2.11": Outcome.HOLDS},
        judge=gradients.returned_norm_can_be_logged,
        source="pytorch/torchtitan#766",
    ),
    Claim(
        name="lone_call_hangs_ddp",
        kind=Kind.SYMPTOM,
        text="Under DDP, clipping on rank 0 alone hangs.",
        expects=Outcome.REFUTED,
        judge=lone.lone_call_hangs_ddp,
    ),
    Claim(
        name="lone_call_is_harmless_under_ddp",
        kind=Kind.SYMPTOM,
        text="Under DDP, clipping on rank 0 alone is harmless: the ranks stay equal.",
        expects=Outcome.REFUTED,
        judge=lone.lone_call_is_harmless_under_ddp,
    ),
    Claim(
        name="lone_call_hangs_when_sharded",
        kind=Kind.SYMPTOM,
        text="With sharded gradients, clipping on rank 0 alone hangs.",
        expects=Outcome.HOLDS,
        judge=lone.lone_call_hangs_when_sharded,
    ),
    Claim(
        name="inf_norm_works_where_l2_does",
        kind=Kind.SYMPTOM,
        text="Under fully_shard, an infinity norm works wherever L2 does.",
        expects=Outcome.REFUTED,
        judge=lone.inf_norm_works_where_l2_does,
    ),
    Claim(
        name="by_hand_first",
        kind=Kind.MECHANISM,
        text="Clipping each rank's gradient and then averaging by hand is the same.",
        expects=Outcome.REFUTED,
        judge=gradients.by_hand_first,
        settles=("A68",),
    ),
    Claim(
        name="in_hook",
        kind=Kind.MECHANISM,
        text="Clipping in a DDP communication hook is the same.",
        expects=Outcome.REFUTED,
        judge=gradients.in_hook,
    ),
    Claim(
        name="in_no_sync",
        kind=Kind.MECHANISM,
        text="Clipping inside no_sync, between micro-batches, is the same.",
        expects=Outcome.REFUTED,
        judge=gradients.in_no_sync,
    ),
    Claim(
        name="without_unscale",
        kind=Kind.MECHANISM,
        text="With a GradScaler, clipping needs no unscale_ first.",
        expects=Outcome.REFUTED,
        judge=gradients.without_unscale,
        source="pytorch/examples#1196",
    ),
    Claim(
        name="averaging_first_is_right",
        kind=Kind.REMEDY,
        text="Averaged and unscaled first, then clipped, N ranks get one process's gradient.",
        expects=Outcome.HOLDS,
        judge=gradients.averaging_first_is_right,
    ),
    Claim(
        name="report_arithmetic",
        kind=Kind.MECHANISM,
        text="999 ones and one 1000, max_norm 500: L2 leaves 499.75 of the 1000, L1 250.1.",
        expects=Outcome.HOLDS,
        judge=report.report_arithmetic,
        settles=("A60",),
    ),
    Claim(
        name="norm_choice_changes_direction",
        kind=Kind.MECHANISM,
        text="L2 keeps the spike's relative strength, L1 averages the dimensions.",
        expects=Outcome.REFUTED,
        judge=report.norm_choice_changes_direction,
        settles=("A61",),
    ),
    Claim(
        name="l2_cuts_a_spike_harder",
        kind=Kind.MECHANISM,
        text="At the same bound, L2 cuts a spike that L1 would leave.",
        expects=Outcome.REFUTED,
        judge=report.l2_cuts_a_spike_harder,
        settles=("A14",),
    ),
    Claim(
        name="below_the_bound_is_untouched",
        kind=Kind.MECHANISM,
        text="A gradient whose norm is below the bound comes out unchanged.",
        expects=Outcome.REFUTED,
        judge=report.below_the_bound_is_untouched,
    ),
)


def headline(findings: Mapping[str, Finding]) -> str:
    """Say what this run found, in one sentence."""
    ddp, sharded = findings["ddp_reduces_the_norm"], findings["sharded_norm_is_one_all_reduce"]
    order, timed = findings["by_hand_first"], findings["clip_takes_as_long_as_backward"]
    parts = []
    if ddp.outcome is Outcome.REFUTED:
        share = f" and takes {timed.effect:.1%} of backward plus clip" if timed.effect else ""
        parts.append(f"under DDP clip_grad_norm_ sends nothing{share}")
    elif ddp.outcome is Outcome.HOLDS:
        parts.append(f"under DDP clip_grad_norm_ issues up to {ddp.effect:.0f} collectives")
    if sharded.outcome is Outcome.HOLDS:
        parts.append(f"sharded gradients need one all-reduce of {sharded.effect:.0f} bytes")
    if order.outcome is Outcome.REFUTED:
        parts.append(
            f"clipping before the average is the failure: the gradient is {order.effect:.0%} off, "
            f"{order.multiple:.0e} floors"
        )
    elif order.outcome is Outcome.HOLDS:
        parts.append("clipping before or after the average is the same")
    text = (
        "; ".join(parts) or "this run decides neither what the clip sends nor what its place does"
    )
    return text[0].upper() + text[1:] + "."
