"""Buffers of wrapped modules that somebody writes between two forward passes of the wrapper."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.watch.instruments.context import Context
from harness.watch.instruments.forward_hooks import after_forward, before_forward

MOST = 16
"""Times that are written down, of each wrapper."""


class Buffers:
    """Compares version counters: every write in place raises one."""

    def __init__(self, context: Context) -> None:
        """Wait for wrappers."""
        self._context = context
        self._handles: list[Any] = []

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _overwritten(self, inner: Any, number: int, written: list[tuple[str, Any]]) -> None:
        """Note what was written, and what is another value when the module inside is called.

        Between the two the wrapper has sent rank 0's buffers around.
        """
        held = [
            (name, buffer, buffer.detach().clone())
            for name, buffer in written
            if buffer is not None
        ]

        def inside(*_: Any) -> None:
            handle.remove()
            self._context.journal.write(
                "buffers_written",
                module=number,
                update=self._context.updates,
                buffers=[name for name, _ in written],
                overwritten=[name for name, now, was in held if not torch.equal(now, was)],
            )

        handle = before_forward(self._context, inner, "buffers", inside)
        self._handles.append(handle)

    def wrapped(self, module: DistributedDataParallel, number: int) -> None:
        """Look at the buffers of a wrapper before and after its forward passes."""
        own = weakref.ref(module)
        known: list[tuple[str, weakref.ref[Any], int]] = []
        times = 0

        def before(called: nn.Module, *_: Any) -> None:
            nonlocal times
            if called is not own() or times >= MOST:
                return
            # One that is gone has made place for another.
            written = [
                (name, buffer)
                for name, reference, version in known
                if (buffer := reference()) is None or buffer._version != version
            ]
            if written:
                times += 1
                self._overwritten(called.module, number, written[:MOST])

        def after(called: nn.Module, *_: Any) -> None:
            if times >= MOST or called is not own():
                return
            # Whether a module without buffers has been given one is looked up now and then.
            if not known and not self._context.window.is_sparse(self._context.updates):
                return
            if isinstance(called, DistributedDataParallel):
                known[:] = [
                    (name, weakref.ref(buffer), buffer._version)
                    for name, buffer in called.module.named_buffers()
                ]

        self._handles += [
            before_forward(self._context, module, "buffers", before),
            after_forward(self._context, module, "buffers", after),
        ]
