"""The loss scale of every GradScaler, which each rank decides on by itself."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from harness.watch.instruments.context import Context
from harness.watch.instruments.patches import Patches


class Scaling:
    """Reads the scale after it was updated: every time on the CPU, sparsely elsewhere."""

    def __init__(self, context: Context) -> None:
        """Put a function around torch's own."""
        self._context = context
        self._scalers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._before: dict[int, float] = {}
        self._patches = Patches()
        self._patches.around(
            torch.amp.GradScaler, "update", after=context.safely("loss scale", self._updated)
        )

    def close(self) -> None:
        """Put torch's own function back."""
        self._patches.close()

    def _updated(self, _: Any, scaler: torch.amp.GradScaler, *__: Any, **___: Any) -> None:
        scale = getattr(scaler, "_scale", None)
        if not isinstance(scale, torch.Tensor):
            return
        sparse = self._context.window.is_sparse(self._context.updates)
        if not scale.is_cpu and not sparse:
            return
        number = self._scalers.setdefault(scaler, len(self._scalers))
        value = float(scale)
        if value != self._before.get(number):
            self._before[number] = value
            self._context.journal.write("loss_scale", scaler=number, scale=value)
