"""The small net of `syncbn_clip`, its data, and the recorder that watches one norm layer's buffers.

Imports torch at its top: only `run` may import this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.collectives import count_collectives
from harness.sync_batch_norm import convert_sync_batch_norm

if TYPE_CHECKING:
    from harness.rank import Rank

CHANNELS = 4
SIDE = 4
CLASSES = 3
VALUES = ("after_forward", "after_edit")
"""Phases in which all values of the buffers are kept, not only digest and extremes."""


def normed_net(*, sync: bool, eps: float, momentum: float | None, quiet: float, device: str) -> Any:
    """Return conv, norm, tanh, linear; the norm's first channel has long been nearly dead."""
    norm = nn.BatchNorm2d(CHANNELS, eps=eps, momentum=momentum)
    assert norm.running_var is not None
    norm.running_var[0] = quiet**2
    net = nn.Sequential(
        # Depthwise: a quiet feature of the input stays a quiet channel, whatever is learned.
        nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS),
        norm,
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(CHANNELS * (SIDE - 2) ** 2, CLASSES),
    ).to(device)
    return convert_sync_batch_norm(net, device=device) if sync else net


def wrapped(net: nn.Module, rank: Rank, *, broadcast: bool, find_unused: bool) -> nn.Module:
    """Return the net under DDP, its buffer broadcast switched in this torch's spelling."""
    if rank.world_size == 1:
        return net
    legal = inspect.signature(DistributedDataParallel.__init__).parameters
    # torch 2.13 renames the switch and warns about the old name.
    renamed = "forward_sync_buffers" in legal
    switch = "forward_sync_buffers" if renamed else "broadcast_buffers"
    options: dict[str, Any] = {switch: broadcast, "find_unused_parameters": find_unused}
    if rank.device != "cpu":
        options["device_ids"] = [rank.local_rank]
    return DistributedDataParallel(net, **options)


def rows(rank: Rank, *, count: int, quiet: float, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of `count` rows; feature 0 is `quiet` times the others."""
    draw = rank.generator(f"batch/{step}")
    x = torch.randn(count, CHANNELS, SIDE, SIDE, generator=draw)
    x[:, 0] *= quiet
    y = torch.randint(CLASSES, (count,), generator=draw)
    order = rank.permutation(count, step=step)
    return rank.shard(x[order]).to(rank.device), rank.shard(y[order]).to(rank.device)


class Watch:
    """Records one norm layer: its buffers at each moment, and the collectives up to it."""

    def __init__(self, rank: Rank, norm: Any, *, count_at: int) -> None:
        """Watch `norm`; its buffers as they reach the layer itself are phase `at_layer`.

        Collectives are counted in steps from `count_at` on: counting doubles a step's cost.
        """
        self._rank, self._norm, self._step, self._count_at = rank, norm, 0, count_at
        norm.register_forward_pre_hook(lambda *_: self.at(self._step, "at_layer"))

    def at(self, step: int, phase: str) -> None:
        """Record the buffers as they are now; the permuted repeats of the reference do not."""
        self._step = step
        if self._rank.repeat == 0:
            mean, var = self._norm.running_mean, self._norm.running_var
            # The fate of an edit is followed value by value; elsewhere bits and extremes do.
            keep = self._rank.snapshot if phase in VALUES else self._rank.digest
            keep(step=step, phase=phase, running_mean=mean, running_var=var)

    @contextmanager
    def during(self, step: int, phase: str) -> Iterator[None]:
        """Record the buffers at the end of a region, and the region's collectives by kind."""
        self._step = step
        if step < self._count_at or self._rank.repeat:
            yield
            self.at(step, phase)
            return
        with count_collectives() as calls:
            yield
        self.at(step, phase)
        kinds = {op: calls.count(op) for op in ("all_gather", "all_reduce", "broadcast")}
        self._rank.log(step=step, phase=phase, collectives=calls.count(), **kinds)

    def learned(self, step: int, model: nn.Module) -> None:
        """Record digests of what DDP reduced, of all parameters, and of the norm's own."""
        if self._rank.repeat:
            return
        parameters = list(model.parameters())
        grads = [q.grad.flatten() for q in parameters if q.grad is not None]
        self._rank.digest(
            step=step,
            phase="after_edit",
            grad=torch.cat(grads),
            params=torch.cat([q.detach().flatten() for q in parameters]),
            affine=torch.cat([self._norm.weight.detach(), self._norm.bias.detach()]),
        )

    def checkpoint(self, step: int, model: nn.Module) -> None:
        """Record the buffers that this rank's state_dict would carry to disk."""
        state = {name.rpartition(".")[2]: value for name, value in model.state_dict().items()}
        saved = {name: state[name] for name in ("running_mean", "running_var")}
        self._rank.snapshot(step=step, phase="checkpoint", **saved)
