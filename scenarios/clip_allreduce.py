"""Gradient clipping sends nothing under DDP; what hurts is clipping before gradients are averaged.

The report says that clip_grad_norm_ must all-reduce the global norm under DDP, that
clip_grad_value_ needs no communication, and asks whether the norm is worth its cost. After DDP's
backward every rank holds the same averaged gradient, so the local norm is the global norm. Only
sharded gradients need a collective, one of a few bytes, and there every rank has to call it.
Clipping does not commute with averaging: a rank whose gradient is clipped before the average (by
hand, in a communication hook, inside no_sync, or while a GradScaler still scales it) loses its
weight, and N ranks no longer train like one process on the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.scenario import Arm, Plot, Role, Scenario, at_least
from scenarios._clip_allreduce.claims import CLAIMS, headline
from scenarios._clip_allreduce.gradients import SCALE

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.rank import Rank

ORDERS = {"L1": 1.0, "L2": 2.0, "inf": float("inf")}


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/clip_allreduce.yaml."""

    bound: float = field(metadata=at_least(1e-4))
    batch: int = field(metadata=at_least(2))
    steps: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(0.0))
    width: int = field(metadata=at_least(2))
    timed_steps: int = field(metadata=at_least(1))
    hang_timeout_s: float = field(metadata=at_least(0.01))
    permutations: int = field(metadata=at_least(1))


def check(p: Params, ranks: int) -> list[str]:
    """Every rank needs a row of each half of the batch."""
    if p.batch >= 2 * ranks:
        return []
    return [
        f"scenario.batch={p.batch} leaves some of {ranks} ranks without a row; "
        f"type scenario.batch={2 * ranks} or more"
    ]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Carry out the part of the scenario that the arm belongs to."""
    from scenarios._clip_allreduce import parts
    from scenarios._clip_allreduce.report import check_report

    if arm["part"] == "traffic":
        parts.count_traffic(rank, arm, p, clip)
    elif arm["part"] == "order":
        parts.train(rank, arm, p, step, clip_in_hook)
    elif arm["part"] == "alone":
        parts.call_alone(rank, p, clip)
    elif arm["part"] == "time":
        parts.measure_time(rank, arm, p)
    else:
        check_report(rank, clip)


def clip(model: nn.Module, how: str, norm: str, bound: float) -> torch.Tensor | None:
    """Clip the gradients of a model and return the norm a user would log; arms differ in `how`."""
    import torch.distributed as dist
    from torch.nn.utils import (
        clip_grad_norm_,
        clip_grad_value_,
        clip_grads_with_norm_,
        get_total_norm,
    )

    parameters = list(model.parameters())
    # Some are DTensors, some plain tensors: torch refuses to take both kinds in one call.
    sharded = [item for item in parameters if hasattr(item, "full_tensor")]
    plain = [item for item in parameters if not hasattr(item, "full_tensor")]
    # What this rank holds of each parameter: all of it, unless it is sharded and told otherwise.
    held = [_shard(parameter) for parameter in parameters] if how == "shards" else parameters
    if norm == "value":
        for kind in filter(None, (sharded, plain)):
            clip_grad_value_(kind, bound)
        return None
    if norm == "layer":
        for parameter in held:
            clip_grad_norm_([parameter], bound)
        return None
    order = ORDERS[norm]
    if how == "method":  # FSDP1: the wrapper knows that its gradients are shards
        return model.clip_grad_norm_(bound, order)  # type: ignore[operator, no-any-return]
    if how == "kinds":
        part: Any = get_total_norm(_gradients(sharded), order)
        total = get_total_norm(
            [part.full_tensor(), get_total_norm(_gradients(plain), order)], order
        )
        clip_grads_with_norm_(sharded, bound, total)
        clip_grads_with_norm_(plain, bound, total)
        return total
    total = clip_grad_norm_(held, bound, order)
    if how == "reduced":  # what the report believes to happen; proves that the counter would see it
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return total


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _shard(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's shard of a parameter with the gradient it holds, both without a copy."""
    shard = parameter.detach().to_local()  # type: ignore[attr-defined]
    shard.grad = parameter.grad.to_local()  # type: ignore[union-attr]
    return shard  # type: ignore[no-any-return]


def step(
    how: str,
    model: nn.Module,
    losses: Sequence[Callable[[], torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    bound: float,
    place: int,
) -> torch.Tensor | None:
    """Go one step: where the clip stands is all that differs. `losses`: of two halves of a batch.

    Returns the norm that the last clip saw.
    """
    import torch
    from torch.nn.utils import clip_grad_norm_

    from scenarios._clip_allreduce.parts import average

    parameters, norm = list(model.parameters()), None
    optimizer.zero_grad()
    if how in ("manual_before", "manual_after"):
        (losses[0]() + losses[1]()).backward()
        if how == "manual_before":
            norm = clip_grad_norm_(parameters, bound)
        average(parameters)
        if how == "manual_after":
            norm = clip_grad_norm_(parameters, bound)
    elif how in ("no_sync_before", "no_sync_after"):
        with model.no_sync():  # type: ignore[operator]
            losses[0]().backward()
        if how == "no_sync_before":
            norm = clip_grad_norm_(parameters, bound)
        losses[1]().backward()
        norm = clip_grad_norm_(parameters, bound)
    elif how in ("scaled", "unscaled"):
        scaler = torch.amp.GradScaler(parameters[0].device.type, init_scale=SCALE)
        scaler.scale(losses[0]() + losses[1]()).backward()
        if how == "unscaled":
            scaler.unscale_(optimizer)
        norm = clip_grad_norm_(parameters, bound)
        scaler.step(optimizer)
        return norm
    else:
        (losses[0]() + losses[1]()).backward()
        if how == "hook_before":  # `clip_in_hook` has clipped each rank's gradient already
            pass
        elif how == "after" or place == 0:  # how == "rank0": only one rank clips
            norm = clip_grad_norm_(parameters, bound)
    optimizer.step()
    return norm


def clip_in_hook(bound, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """DDP communication hook that clips this rank's gradient, then averages: the wrong order.

    Bare of annotations because DDP refuses those that `from __future__` has turned into text.
    """
    import torch.distributed as dist

    gradient = bucket.buffer()
    gradient.mul_((bound / (gradient.norm() + 1e-6)).clamp(max=1.0)).div_(dist.get_world_size())
    work = dist.all_reduce(gradient, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def _arm(name: str, role: Role, about: str, part: str, **options: Any) -> Arm:
    """Return an arm; what is not a place to run is an option that `run` branches on."""
    places = {key: options.pop(key) for key in ("ranks", "repeats", "isolated") if key in options}
    return Arm(name=name, role=role, about=about, options={"part": part, **options}, **places)


def _traffic(name: str, role: Role, about: str, wrap: str, how: str, **options: Any) -> Arm:
    dtype = "float32" if wrap.startswith("fsdp1") else "float64"
    return _arm(name, role, about, "traffic", wrap=wrap, clip=how, **{"dtype": dtype, **options})


def _order(name: str, role: Role, about: str, **options: Any) -> Arm:
    return _arm(name, role, about, "order", **{"how": name, "ddp": True, "whole": False, **options})


ALONE: dict[str, Any] = {"ranks": 1, "repeats": "permutations"}
ARMS = (
    _traffic(
        "one_process", Role.REFERENCE, "global batch, clipped once", "none", "function", **ALONE
    ),
    _traffic(
        "one_process_fp32",
        Role.REFERENCE,
        "the same in float32, all that FSDP1's clip computes in",
        "none",
        "function",
        dtype="float32",
        **ALONE,
    ),
    _traffic("ddp", Role.FIXED, "DDP, clip_grad_norm_ on every rank", "ddp", "function"),
    _traffic(
        "ddp_reduced", Role.CONTROL, "DDP, one explicit all-reduce in the clip", "ddp", "reduced"
    ),
    _traffic("fsdp1", Role.FIXED, "FSDP1, the wrapper's clip_grad_norm_", "fsdp1", "method"),
    _traffic("fsdp1_part", Role.FIXED, "FSDP1, last layer replicated", "fsdp1_part", "method"),
    _traffic(
        "fsdp1_shards", Role.FAULTY, "FSDP1, torch.nn.utils' clip_grad_norm_", "fsdp1", "function"
    ),
    _traffic("fsdp2", Role.FIXED, "fully_shard, clip_grad_norm_ on DTensors", "fsdp2", "function"),
    _traffic("fsdp2_part", Role.FIXED, "fully_shard, last layer replicated", "fsdp2_part", "kinds"),
    _traffic(
        "fsdp2_shards", Role.FAULTY, "fully_shard, clipped on local shards", "fsdp2", "shards"
    ),
    _traffic(
        "hsdp", Role.FIXED, "fully_shard on a mesh of replicas and shards", "hsdp", "function"
    ),
    _order(
        "trained_alone",
        Role.REFERENCE,
        "one process trains on the global batch",
        how="after",
        **ALONE,
    ),
    _order("after", Role.FIXED, "DDP averages in backward, then clip"),
    _order("manual_before", Role.FAULTY, "clip, then average by hand", ddp=False),
    _order("manual_after", Role.FIXED, "average by hand, then clip", ddp=False),
    _order("no_sync_before", Role.FAULTY, "clip between two micro-batches, inside no_sync"),
    _order("no_sync_after", Role.FIXED, "clip after the last micro-batch"),
    _order("hook_before", Role.FAULTY, "communication hook clips, then averages"),
    _order("scaled", Role.FAULTY, "GradScaler without unscale_"),
    _order("unscaled", Role.FIXED, "GradScaler, unscale_, then clip"),
    _order(
        "same_rows",
        Role.CONTROL,
        "clip, then average, the same rows on every rank",
        how="manual_before",
        ddp=False,
        whole=True,
    ),
    _order("rank0", Role.FAULTY, "DDP, only rank 0 clips"),
    _arm("timed_ddp", Role.CONTROL, "DDP, timed", "time", wrap="ddp"),
    _arm("timed_fsdp1", Role.CONTROL, "FSDP1, timed", "time", wrap="fsdp1"),
    _arm("timed_fsdp2", Role.CONTROL, "fully_shard, timed", "time", wrap="fsdp2"),
    _arm("report", Role.CONTROL, "the report's vector, in one process", "report", ranks=1),
    _arm("alone", Role.FAULTY, "sharded, only rank 0 clips", "alone", isolated=True),
)
SCENARIO = Scenario(
    title="Clipping sends nothing under DDP; clipping before the average changes the gradient",
    family="clipping",
    cause="clip_before_average",
    claims=CLAIMS,
    arms=ARMS,
    params=Params,
    run=run,
    check=check,
    headline=headline,
    min_ranks=2,
    differs=("clip", "step", "clip_in_hook"),
    plots=(
        Plot(
            metric="loss",
            title="Loss of each rank's rows after the step",
            arms=("trained_alone", "after", "manual_before", "hook_before", "scaled", "rank0"),
            log=True,
        ),
        Plot(metric="clip_s", title="Time of the clip", phase="foreach", unit="s", log=True),
        Plot(metric="backward_s", title="Time of backward", phase="foreach", unit="s", log=True),
    ),
)
