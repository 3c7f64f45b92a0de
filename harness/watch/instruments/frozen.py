"""Normalisation layers whose parameters are frozen while their running statistics move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from harness.watch.instruments.context import Context
from harness.watch.modules import parameters_of

MOST = 64


class Frozen:
    """Compares running statistics between some of the updates."""

    def __init__(self, context: Context) -> None:
        """Look from the first update on."""
        self._context = context
        self._before: dict[str, tuple[float, ...]] = {}
        self._said = False

    def close(self) -> None:
        """Nothing was put in place."""

    def before_update(self, optimizer: Optimizer) -> None:
        """Look; called at some of the updates only."""
        if self._said:
            return
        updated = set(map(id, parameters_of(optimizer)))
        now: dict[str, tuple[float, ...]] = {}
        for root in self._context.modules.roots():
            if any(id(p) in updated for p in root.parameters()):
                now |= _frozen(root)
        moved = []
        for name, (statistics, weights) in now.items():
            before = self._before.get(name, (statistics, weights))
            # What follows another module, as an average of its weights does, is not frozen.
            if before[0] != statistics and before[1] == weights:
                moved.append(name)
        self._before |= now
        if moved:
            self._said = True
            self._context.journal.write("frozen", moved=moved[:4], count=len(moved))


def _frozen(root: nn.Module) -> dict[str, tuple[float, ...]]:
    """Return numbers for statistics and weights of each frozen layer in training mode."""
    found: dict[str, tuple[float, ...]] = {}
    for name, module in root.named_modules():
        own: dict[str, Any] = module._parameters
        mean = module._buffers.get("running_mean")
        if not module.training or mean is None or len(found) >= MOST:
            continue
        weights = [p for p in own.values() if p is not None]
        if weights and not any(p.requires_grad for p in weights):
            spread = module._buffers.get("running_var")
            held = [[t for t in (mean, spread) if t is not None], weights]
            # One copy to the host.
            sums = torch.stack([_sum_of(tensors) for tensors in held]).tolist()
            found[name.removeprefix("module.")] = tuple(sums)
    return found


def _sum_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a number that changes when one of them does."""
    return torch.stack([tensor.detach().double().sum() for tensor in tensors]).sum()
