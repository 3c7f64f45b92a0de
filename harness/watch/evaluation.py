"""Buffers where equality is due: at an evaluation through DistributedDataParallel.

Between a forward pass and the next one, batch norm's statistics differ between ranks by design.
An evaluation through the wrapper is another thing: the wrapper has made buffers equal by then,
unless it was told not to. An evaluation of the inner module, or on one rank, is nobody else's
business.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.watch.digest import Digester
from harness.watch.instruments.forward import ForwardHook
from harness.watch.layout import EVALUATION, Entry, Layout
from harness.watch.modules import local_part


class Evaluations:
    """The evaluations of one wrapped module; calls `seen` at the first forward of each."""

    def __init__(
        self, module: DistributedDataParallel, seen: Callable[[Evaluations], None]
    ) -> None:
        """Register torch's own forward hook on the wrapper."""
        self.kind = "module"
        self.module = weakref.ref(module)
        self._seen = seen
        self._digest = Digester()
        self._training = True
        self._buffers: list[torch.Tensor] = []
        self._handle = module.register_forward_hook(ForwardHook(self._after_forward))

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def layout(self) -> Layout:
        """Return what the digests stand for."""
        return Layout({EVALUATION: self._entries})

    def digests(self) -> list[int]:
        """Return the digests of the buffers."""
        return self._digest([local_part(buffer) for buffer in self._buffers])

    def _after_forward(self, module: nn.Module, *_: Any) -> None:
        if not isinstance(module, DistributedDataParallel):
            return
        started = self._training and not module.training
        self._training = module.training
        if not started:
            return
        ignored = set(getattr(module, "parameters_to_ignore", ()))
        named = [(n, b) for n, b in module.module.named_buffers() if n not in ignored]
        self.kind = type(module.module).__name__
        self._buffers = [buffer for _, buffer in named]
        self._entries = tuple(
            Entry(
                name=name,
                kind="buffer",
                shape=tuple(buffer.shape),
                dtype=str(buffer.dtype).removeprefix("torch."),
                wrapped=True,
            )
            for name, buffer in named
        )
        if named:
            self._seen(self)
        self._buffers = []
