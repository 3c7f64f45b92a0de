"""What clip_allreduce measures: traffic, steps, lone calls, time, arithmetic; no arm's branch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from harness.collectives import count_collectives
from scenarios._clip_allreduce.records import NORMS
from scenarios._models import mlp

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.scenario import Arm

    Clip = Callable[[nn.Module, str, str, float], torch.Tensor | None]
    Step = Callable[..., torch.Tensor | None]
    Hook = Callable[[float, Any], Any]

FEATURES, HIDDEN = 8, 64
"""Sharded over up to 8 ranks, 64 rows leave none of them without a row."""
SPIKE = 50.0
"""One row's target is so many times the others': one rank holds a batch far steeper than theirs."""
WARM_UP = 2
"""Steps before those that count: DDP rebuilds its buckets after the first."""


def wrap(kind: str, model: nn.Sequential, device: str) -> nn.Module:
    """Return the model as `kind` distributes it; `..._part` leaves its last layer replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    world = dist.get_world_size()
    where = torch.device(device)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind in ("fsdp1", "fsdp1_part"):
        replicated = [model[-1]] if kind == "fsdp1_part" else None
        return FullyShardedDataParallel(model, device_id=where, ignored_modules=replicated)
    if kind == "hsdp":
        shape, names = (_replicas(world), world // _replicas(world)), ("replica", "shard")
        fully_shard(model, mesh=init_device_mesh(where.type, shape, mesh_dim_names=names))
    elif kind in ("fsdp2", "fsdp2_part"):
        mesh = init_device_mesh(where.type, (world,))
        fully_shard(model if kind == "fsdp2" else model[0], mesh=mesh)
    return model


def average(parameters: Sequence[nn.Parameter]) -> None:
    """Average the gradients of all ranks, as one does without DDP."""
    for parameter in parameters:
        dist.all_reduce(_gradient(parameter))
        _gradient(parameter).div_(dist.get_world_size())


def count_traffic(rank: Rank, arm: Arm, p: Any, clip: Clip) -> None:
    """Count what a backward pass and a clip send, for every norm, from the same gradient."""
    dtype = torch.float32 if arm["dtype"] == "float32" else torch.float64
    inner, features, targets = _problem(rank, p, dtype)
    numel = sum(parameter.numel() for parameter in inner.parameters())
    model = wrap(arm["wrap"], inner, rank.device)
    with count_collectives() as sync:
        _loss(model, features, targets, rank.world_size / p.batch).backward()
        if arm["wrap"].endswith("_part"):
            average(list(inner[-1].parameters()))
    parameters = list(model.parameters())
    gradients = [_gradient(parameter).clone() for parameter in parameters]
    orders = [
        rank.permutation(gradient.numel(), name=f"elements {number}").to(rank.device)
        for number, gradient in enumerate(gradients if rank.repeat else ())
    ]
    for number, norm in enumerate(NORMS):
        if norm == "layer" and arm["wrap"].startswith("fsdp1"):
            continue  # its flat parameter knows no layers
        if norm == "inf" and _empty_shard(arm["wrap"], rank.world_size):
            rank.log(step=number, phase=norm, skipped="a rank holds an empty shard")
            continue
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        holder = _shuffled(parameters, orders) if rank.repeat else model
        with count_collectives() as calls:
            total = clip(holder, arm["clip"], norm, p.bound)
        rank.log(
            step=number,
            phase=norm,
            sync_collectives=sync.count(),
            sync_bytes=sync.bytes(),
            clip_collectives=calls.count(),
            clip_bytes=calls.bytes(),
            clip_ops=",".join(call.op for call in calls.ops),
            tensors=len(parameters),
            norm=None if total is None else getattr(total, "_local_tensor", total),
            full_norm=None if total is None else _full(total),
        )
        rank.snapshot(step=number, phase=norm, grad=_gathered(holder, numel))
    if arm["wrap"] == "fsdp2_part":
        refusal = ""
        try:
            nn.utils.clip_grad_norm_(model.parameters(), p.bound)
        except RuntimeError as error:
            refusal = str(error).splitlines()[0]
        rank.log(step=len(NORMS), phase="one call", refusal=refusal)


def train(rank: Rank, arm: Arm, p: Any, step: Step, hook: Hook) -> None:
    """Train a few steps; where the clip stands is up to the arm."""
    model, features, targets = _problem(rank, p, torch.float64, whole=arm["whole"])
    ddp = arm["ddp"] and rank.world_size > 1
    wrapped = wrap("ddp", model, rank.device) if ddp else model
    if arm["how"] == "hook_before":
        wrapped.register_comm_hook(p.bound, hook)  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    weight = (1 if arm["whole"] else rank.world_size) / p.batch
    half = len(features) // 2

    def loss(rows: slice) -> torch.Tensor:
        return _loss(wrapped, features[rows], targets[rows], weight)

    halves = [lambda: loss(slice(None, half)), lambda: loss(slice(half, None))]
    rank.digest(step=0, phase="start", weights=_flat(model))
    for number in range(p.steps):
        with count_collectives() as calls:
            norm = step(arm["how"], wrapped, halves, optimizer, p.bound, rank.rank)
        with torch.no_grad():
            after = _loss(model, features, targets, weight)
        rank.log(step=number, loss=after, norm=norm, collectives=calls.count())
        weights = _flat(model)
        rank.digest(step=number, weights=weights)
        if number == 0:
            rank.snapshot(step=0, grad=_gathered(model, weights.numel()))


def call_alone(rank: Rank, p: Any, clip: Clip) -> None:
    """Clip sharded gradients on rank 0 only; then on all, where a rank holds an empty shard."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    # Without it NCCL's watchdog ends the process; with it the waiting rank raises, as gloo's does.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    where = torch.device(rank.device)
    meeting = dist.new_group()
    cases = {
        "fsdp2": (HIDDEN, "L2", True),
        "fsdp1": (HIDDEN, "L2", True),
        "empty L2": (1, "L2", False),
        "empty": (1, "inf", False),
    }
    for number, (case, (rows, norm, lone)) in enumerate(cases.items()):
        group = dist.new_group()
        model: nn.Module = mlp((FEATURES, HIDDEN, rows), generator=rank.generator("alone"))
        model.to(rank.device, torch.float32)
        if case == "fsdp1":
            model = FullyShardedDataParallel(model, process_group=group, device_id=where)
        else:
            mesh = DeviceMesh.from_group(group, where.type, mesh_dim_names=(case,))
            fully_shard(model, mesh=mesh)
        model(torch.ones(2, FEATURES, device=rank.device)).sum().backward()
        called, raised = rank.rank == 0 or not lone, ""
        # Set only now, and not where all ranks call: those may take as long as a loaded machine
        # needs.
        if case != "empty L2":
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=p.hang_timeout_s), group)
        begin = time.perf_counter()
        with count_collectives() as calls:
            try:
                if called:
                    clip(model, "method" if case == "fsdp1" else "function", norm, p.bound)
                _finish(rank.device)
            except RuntimeError as error:
                raised = str(error).splitlines()[0]
        rank.log(
            step=number,
            phase=case,
            called=called,
            raised=raised,
            waited=calls.count(),
            seconds=time.perf_counter() - begin,
            timeout_s=p.hang_timeout_s,
        )
        dist.barrier(meeting)


def measure_time(rank: Rank, arm: Arm, p: Any) -> None:
    """Time the clip against backward and its collectives; count both at two widths."""
    for number, (name, width) in enumerate((("narrow", p.width // 2), ("wide", p.width))):
        model, batch, parameters = _timed_model(rank, arm["wrap"], width)
        for foreach in (False,) * WARM_UP + (True, False):
            with count_collectives() as sync:
                model.zero_grad()
                model(batch).square().mean().backward()
            with count_collectives() as calls:
                _clip_timed(model, p.bound, foreach=foreach)
            rank.log(
                step=number,
                phase=f"{name} {'foreach' if foreach else 'loop'}",
                sync_bytes=sync.bytes(),
                clip_bytes=calls.bytes(),
                clip_collectives=calls.count(),
                parameters=parameters,
            )
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    # The method of FSDP1 has no such switch.
    modes = ("foreach",) if arm["wrap"] == "fsdp1" else ("foreach", "loop")
    # Only DDP's time decides a claim; the more steps, the less a busy machine widens its interval.
    for number in range(p.timed_steps if arm["wrap"] == "ddp" else 1 + p.timed_steps // 4):
        for mode in modes:
            model.zero_grad()
            begin = time.perf_counter()
            loss = model(batch).square().mean()
            _finish(rank.device)
            start = time.perf_counter()
            loss.backward()
            _finish(rank.device)
            middle = time.perf_counter()
            _clip_timed(model, p.bound, foreach=mode == "foreach")
            _finish(rank.device)
            end = time.perf_counter()
            optimizer.step()
            _finish(rank.device)
            done = time.perf_counter()
            rank.log(
                step=number,
                phase=mode,
                forward_s=start - begin,
                backward_s=middle - start,
                clip_s=end - middle,
                optimizer_s=done - end,
            )


def _problem(
    rank: Rank, p: Any, dtype: torch.dtype, *, whole: bool = False
) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Return the model and this rank's rows, in this repeat's order; `whole` = all rows."""
    model = mlp((FEATURES, HIDDEN, HIDDEN), generator=rank.generator("weights"))
    generator = rank.generator("rows")
    features = torch.randn(p.batch, FEATURES, dtype=torch.float64, generator=generator)
    targets = torch.randn(p.batch, HIDDEN, dtype=torch.float64, generator=generator)
    targets[0] *= SPIKE
    order = rank.permutation(p.batch)
    rows = [features[order], targets[order]]
    features, targets = rows if whole else map(rank.shard, rows)
    return (
        model.to(rank.device, dtype),
        features.to(rank.device, dtype),
        targets.to(rank.device, dtype),
    )


def _shuffled(parameters: Sequence[nn.Parameter], orders: Sequence[torch.Tensor]) -> nn.Module:
    """Return parameters with the same gradients, their elements in another order.

    What a norm sums runs in another order too: on shards it does.
    """
    holder = nn.ParameterList()
    for parameter, order in zip(parameters, orders, strict=True):
        holder.append(nn.Parameter(parameter.detach().reshape(-1)[order]))
        holder[-1].grad = _gradient(parameter).reshape(-1)[order]
        holder[-1].order = order
    return holder


def _loss(
    model: nn.Module, features: torch.Tensor, targets: torch.Tensor, weight: float
) -> torch.Tensor:
    """Return a sum weighted so that the mean over ranks is the mean over the global batch."""
    loss: torch.Tensor = (model(features) - targets).square().sum() * weight
    return loss


def _gathered(model: nn.Module, numel: int) -> torch.Tensor:
    """Return the whole gradient in the order of the parameters, whoever holds which part of it."""
    parts = []
    for parameter in model.parameters():
        grad = _gradient(parameter)
        if hasattr(parameter, "_unpadded_unsharded_size"):  # FSDP1: an even share of a flat vector
            whole = grad.new_empty(dist.get_world_size() * grad.numel())
            dist.all_gather_into_tensor(whole, grad)
            grad = whole[: parameter._unpadded_unsharded_size.numel()]
        grad = _full(grad).reshape(-1)
        if hasattr(parameter, "order"):
            grad = torch.empty_like(grad).scatter_(0, parameter.order, grad)
        parts.append(grad)
    gradient = torch.cat(parts)
    assert gradient.numel() == numel
    return gradient


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _full(tensor: torch.Tensor) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _replicas(world: int) -> int:
    """Return how many replicas HSDP's mesh has; the shards are what is left."""
    return 2 if world % 2 == 0 and world > 2 else 1


def _empty_shard(kind: str, world: int) -> bool:
    """Say whether a rank gets no row of 64, which torch deals out in equal chunks, rounded up."""
    shards = world // _replicas(world) if kind == "hsdp" else world
    return kind in ("fsdp2", "fsdp2_part", "hsdp") and -(-HIDDEN // shards) * (shards - 1) >= HIDDEN


def _timed_model(rank: Rank, kind: str, width: int) -> tuple[nn.Module, torch.Tensor, int]:
    inner = mlp((64, width, width, 64), generator=rank.generator("timed"))
    generator = rank.generator(f"timed rows {rank.rank}")
    batch = torch.randn(32, 64, generator=generator).to(rank.device)
    parameters = sum(parameter.numel() for parameter in inner.parameters())
    return wrap(kind, inner.to(rank.device, torch.float32), rank.device), batch, parameters


def _clip_timed(model: nn.Module, bound: float, *, foreach: bool) -> None:
    if hasattr(model, "clip_grad_norm_"):
        model.clip_grad_norm_(bound)  # type: ignore[operator]
    else:
        nn.utils.clip_grad_norm_(model.parameters(), bound, foreach=foreach)


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
