"""What is true of every arm and program that is run under the watcher: its cause, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import scenarios
from harness.scenario import Role, Scenario
from launch.compose import values
from launch.newest import own
from tests.watched.programs.bare import RIGHT, WRONG, hangs, stated


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where replicas part first."""

    step: int
    phase: str
    tensors: Sequence[str]
    """Names of the tensors that may come first; none where any may."""
    odd: tuple[int, ...] = ()
    """Ranks outside of the majority."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What is true of one case."""

    cause: str | None
    """None where nothing is wrong."""
    place: Place | None = None
    """None where replicas stay equal."""
    params: Mapping[str, Any] | None = None
    audit: bool = False
    """Whether the fault shows only where updates are replayed."""
    unseen: str = ""
    """Why nothing that watches from inside such a run can see the fault."""


OTHER_CAUSE = {
    "nan_one_rank/unchecked": "loss_not_finite_on_one_rank",
    "clip_allreduce/rank0": "gradient_changed_on_one_rank",
    "clip_allreduce/scaled": "clip_before_unscale",
    "clip_skips_replicas/torch": "clip_norm_of_shards",
    "context_parallel_loss/all_tokens": "loss_divided_by_world",
    "loss_gap/bypassed": "ddp_forward_bypassed",
    "optimizer_state_lost/rank0_only": "optimizer_state_differs",
    "syncbn_clip/freeze_late": "unused_parameters",
    "syncbn_clip/freeze_requires_grad": "frozen_module_changes",
    "syncbn_clip/plain_freeze_2d_then_train": "frozen_module_changes",
    # Cured of one fault, ill with another: with broadcast_buffers=False every rank evaluates with
    # statistics of its own.
    "syncbn_clip/plain_clip_all_off": "bn_stats_local",
    "syncbn_clip/plain_clip_rank0_off": "bn_stats_local",
    "syncbn_clip/plain_clip_rank1_off": "bn_stats_local",
}
"""Arms whose fault is not the one that their scenario is named after."""

NO_UPDATE = "the arm makes no update, so there is nothing to watch"
HOOK = "what a communication hook does is a choice of the script's: said as a fact, not replayed"
PARTS = "ranks hold different parameters, which one process cannot replay"
SENDS = "a forward pass that sends is not replayed in one process"
RECOMPUTED = "a backward pass of the script's own is what a replay goes through as well"
STAGES = "stages hold different layers, and nobody says which are due"
TIED = "stages hold different weights, and which of them are one is known to the script alone"
SLICES = "the optimizer holds slices; the replicas that the script makes of them are in none"
EDIT = "buffers that a script writes on all ranks alike are what averaging them by hand looks like"
CAUGHT = "the arm catches the error that says it; tests of hangs leave it to the watcher"
NUMBERS = "which label a number stands for is known to the script alone"
REPLAYED = "a process that resumes has not seen what the one before it trained on"
CAUGHT = "the script catches what is raised, and its ranks go on"
LOGGED = "what a log calls the loss of a rank's own rows is a text of the script's"
READ = "reading a number of a tensor is no event, and what it is taken for is not known"
EARLY = "when a buffer is read, and whether it was reduced by then, is no event"
UNSEEN = {
    "work_not_awaited/never": EARLY,
    "work_not_awaited/behind": EARLY,
    "grad_norm_reported_local/item": READ,
    "grad_norm_reported_local/mean": READ,
    "log_is_rank0_only/rank_0": LOGGED,
    "log_is_rank0_only/reduced": LOGGED,
    "clip_allreduce/alone": CAUGHT,
    "nan_one_rank/own_assert": CAUGHT,
    "model_averaging_misused/bare_resumed": "ranks differ on purpose between averages",
    "resume_replays_epoch/from_epoch_0": REPLAYED,
    "resume_replays_epoch/with_random": REPLAYED,
    "resume_replays_epoch/from_batch_0": REPLAYED,
    "ids_differ/from_set": NUMBERS,
    "ids_differ/seeded": NUMBERS,
    "buffer_inplace/averaged": CAUGHT,
    "ready_twice/flag": CAUGHT,
    "static_graph_no_sync/static": CAUGHT,
    "iterable_not_split/not_split": NO_UPDATE,
    "iterable_not_split/by_rank": NO_UPDATE,
    "iterable_not_split/by_worker": NO_UPDATE,
    "loader_workers_same_on_ranks/one_seed": NO_UPDATE,
    "loader_workers_same_on_ranks/python_seed": NO_UPDATE,
    "loader_workers_same_on_ranks/init_fn": NO_UPDATE,
    "clip_allreduce/fsdp1_shards": NO_UPDATE,
    "clip_allreduce/fsdp2_shards": NO_UPDATE,
    "mean_of_means/one_process_batches": NO_UPDATE,
    "mean_of_means/own_share": NO_UPDATE,
    "mean_of_means/mean_of_batches": NO_UPDATE,
    "mean_of_means/mean_of_samples": NO_UPDATE,
    "metric_average/over_ranks": NO_UPDATE,
    "metric_average/over_batches": NO_UPDATE,
    "clip_allreduce/hook_before": HOOK,
    "clip_norm_counted_wrongly/all": PARTS,
    "clip_norm_counted_wrongly/all_over_n": PARTS,
    "clip_norm_counted_wrongly/rank_0": PARTS,
    "aux_loss_scale_tp/averaged": PARTS,
    "aux_loss_scale_tp/summed": PARTS,
    "amax_over_wrong_group/mean": PARTS,
    "amax_over_wrong_group/own": PARTS,
    "context_parallel_attention/chunk": SENDS,
    "context_parallel_loss/all_tokens": "a sum divided by a number: by which one is the script's",
    "context_parallel_loss/all_padding": "a mean of no labels is NaN and has no weight to compare",
    "expert_grad_scale/by_own_group": PARTS,
    "pipeline_stage_division/dropped": STAGES,
    "pipeline_stage_division/repeated": STAGES,
    "recompute_random_state/anew": RECOMPUTED,
    "recompute_wrong_input/chunk_input": RECOMPUTED,
    "row_parallel_bias/before": PARTS,
    "row_parallel_bias/over_n": PARTS,
    "sharded_update_not_gathered/late": SLICES,
    "low_precision_reduction/bfloat16": HOOK,
    "low_precision_reduction/float16": HOOK,
    "low_precision_reduction/sent_in_bfloat16": HOOK,
    "logsoftmax_drift/dice_loss": "a ratio of sums: no loss of a rank says what the whole one is",
    "label_smoothing_local/own": PARTS,
    "sequence_parallel_norm/averaged": PARTS,
    "vocab_parallel_loss/gathered": PARTS,
    "vocab_parallel_mask/not_zeroed": PARTS,
    "vocab_parallel_mask/divided": PARTS,
    "untied_embedding_pipeline/mean": TIED,
    "untied_embedding_pipeline/other_optimizer": TIED,
    "untied_embedding_pipeline/own": TIED,
    "syncbn_clip/plain_forward_hook": "the forward pass raises before the first update",
    "syncbn_clip/sync_clip_all": EDIT,
    "syncbn_clip/plain_clip_all": EDIT,
    "syncbn_clip/plain_clip_rank0": "rank 0's buffers are sent to all: what DDP is for",
    "syncbn_clip/freeze_eval_then_train": "a layer that trains as every other: meant was another",
    "syncbn_clip/freeze_isinstance_2d": "a layer that trains as every other: meant was another",
    "weights_not_resynced_on_load/broadcast": "all ranks go on from the same, wrong weights",
    "programs/wrong_mean_of_means": "the mean is taken in plain numbers of the script's own",
}
"""Faulty arms that a watcher inside the run cannot see, and why."""

LAST = ("2.weight", "2.bias")
"""The last layer of the nets that scenarios share: backward reaches it first."""

REPLICAS = ("param_groups[0]['params'][2]", "param_groups[0]['params'][3]")
"""The layer norm of optimizers that hold two parts of split layers first."""


def places(name: str, params: Mapping[str, Any]) -> dict[str, Place]:
    """Return where the replicas of a scenario's faulty arms part, as its code says."""
    first = Place(step=0, phase="gradients", tensors=LAST)
    evaluation = Place(
        step=1, phase="evaluation", tensors=("0.running_mean", "1.running_mean"), odd=()
    )
    observed = Place(step=1, phase="evaluation", tensors=("0.scale", "0.zero_point"))
    thaw = Place(step=params.get("frozen", 0), phase="gradients", tensors=("0.bias", "0.weight"))
    unequal = Place(step=0, phase="start", tensors=("0.weight",))
    return {
        "bn_stats_local": {"never_sent": evaluation, "default": evaluation},
        "clip_skips_replicas": {
            "counted": Place(step=0, phase="gradients", tensors=REPLICAS, odd=(0,)),
            "torch": Place(step=0, phase="gradients", tensors=REPLICAS),
        },
        "wrong_group_after_remesh": {
            "all_ranks": Place(step=0, phase="start", tensors=(), odd=(1,))
        },
        "strided_view_reduced": {
            "columns": Place(step=0, phase="gradients", tensors=("param_groups[0]['params'][0]",))
        },
        "missing_reduce_for_one_layer": {
            arm: Place(step=0, phase="gradients", tensors=("norm.bias", "norm.weight"))
            for arm in ("left_out", "averaged_once")
        },
        "clip_allreduce": {"rank0": Place(step=0, phase="gradients", tensors=LAST, odd=(0,))},
        "ddp_forward_bypassed": {"bypassed": first},
        "ema_buffers_local": {"local": evaluation},
        "freeze_after_wrap": dict.fromkeys(
            ("after_wrap", "small_buckets", "static_graph"),
            Place(step=params.get("whole", 0), phase="gradients", tensors=LAST),
        ),
        "grad_none_on_one_rank": {
            "rank0": Place(
                step=1,
                phase="gradients",
                tensors=("heads.0.0.weight", "heads.0.0.bias"),
                odd=(0,),
            )
        },
        "init_differs": {"by_hand": unequal, "init_sync_off": unequal},
        "loss_gap": {"bypassed": first},
        "no_sync_wrong_half": {"forward_inside": first},
        "optimizer_state_lost": {
            "rank0_only": Place(step=0, phase="start", tensors=("0.weight",), odd=(0,))
        },
        "observer_ranges": {"never_sent": observed, "default": observed},
        "params_replaced": {"flag_on": first, "flag_off": first},
        "rank_dependent_warmup": {
            "before_wrapping": Place(step=0, phase="gradients", tensors=("param_groups[0]['lr']",))
        },
        "ready_twice": {"shared": Place(step=0, phase="gradients", tensors=())},
        "sequence_parallel_norm": {
            "not_reduced": Place(step=0, phase="gradients", tensors=REPLICAS)
        },
        "syncbn_clip": {
            "freeze_late": Place(step=1, phase="gradients", tensors=()),
            "plain_clip_all_off": Place(step=3, phase="evaluation", tensors=()),
            "plain_clip_rank0_off": Place(step=3, phase="evaluation", tensors=()),
            "plain_clip_rank1_off": Place(step=3, phase="evaluation", tensors=()),
        },
        "syncbn_count": {
            "own_count": Place(step=3, phase="evaluation", tensors=("1.running_var",))
        },
        "unused_parameters": {
            "unused": Place(step=0, phase="gradients", tensors=("used.2.weight", "used.2.bias"))
        },
        "unfrozen_after_wrap": {"thawed": thaw, "flag": thaw},
    }.get(name, {})


SEEN_BY_AUDIT = {
    "accumulation_factor/never",
    "accumulation_factor/twice",
    "logsoftmax_drift/class_weights",
    "logsoftmax_drift/uneven_soft",
}
"""Replicas are equal, and nothing that the script does looks wrong: only a replay tells."""


def truths(only: Sequence[str] = ()) -> dict[str, Truth]:
    """Return what is true of every case that ranks can share, by name.

    Args:
        only: beginnings of names; nothing else is read then.
    """
    found: dict[str, Truth] = {}
    for name in _own_scenarios(only):
        found |= _of_scenario(name)
    for program in RIGHT:
        found[f"programs/{program}"] = Truth(cause=None)
    for program in WRONG:
        if not hangs(program):
            case = f"programs/{program}"
            found[case] = _of_program(program)
            found[f"{case} --fixed"] = Truth(cause=None)
    return found


def alone(only: Sequence[str] = ()) -> dict[str, Truth]:
    """Return what is true of the arms that may hang or raise: each has ranks of its own."""
    found: dict[str, Truth] = {}
    for name in _own_scenarios(only):
        found |= _of_scenario(name, isolated=True)
    return found


def _own_scenarios(only: Sequence[str]) -> list[str]:
    heads = tuple(word.partition("/")[0] for word in only) or ("",)
    return [name for name in own() if name.startswith(heads)]


def _of_scenario(name: str, *, isolated: bool = False) -> dict[str, Truth]:
    scenario = scenarios.load(name)
    if scenario.min_ranks == 1:
        return {}  # Of one process: there are no ranks to compare.
    typed = values(name)
    where = places(name, typed)
    found = {}
    for arm in scenario.arms:
        case = f"{name}/{arm.name}"
        # Time is not of interest here; the same loss in a dtype that does not decide takes some.
        again = name == "logsoftmax_drift" and arm.get("dtype", "float64") != "float64"
        if arm.isolated is not isolated or arm.get("part") == "time" or again:
            continue
        found[case] = Truth(
            cause=OTHER_CAUSE.get(case, _cause(scenario, arm.role)),
            place=where.get(arm.name),
            params=typed,
            audit=case in SEEN_BY_AUDIT,
            unseen=UNSEEN.get(case, ""),
        )
    return found


def _cause(scenario: Scenario, role: Role) -> str | None:
    return scenario.cause or None if role is Role.FAULTY else None


def _of_program(program: str) -> Truth:
    said = stated(program)
    expected, place = said["EXPECTED"], None
    if expected["tensor"] is not None and expected["odd_ranks"] is not None:
        place = Place(
            step=expected["step"],
            phase=expected["phase"],
            tensors=expected["tensor"],
            odd=expected["odd_ranks"],
        )
    return Truth(cause=said["CAUSE"], place=place, unseen=UNSEEN.get(f"programs/{program}", ""))
