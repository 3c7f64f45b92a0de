"""Forward passes of DistributedDataParallel: through the wrapper, without synchronisation, past it.

`no_sync` counts where the forward pass is made, and a forward pass of the inner module alone arms
nothing at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import ALL_OF, Context
from harness.watch.instruments.forward_hooks import after_forward, before_forward


class Forward:
    """Observes every wrapper that the program makes."""

    def __init__(self, context: Context) -> None:
        """Wait for wrappers."""
        self._context = context
        self._handles: list[Any] = []
        self._inside: set[int] = set()
        self.first_forward: list[Callable[[DistributedDataParallel, int], None]] = []
        """Called before the first forward pass of each wrapper, with its number."""

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def wrapped(self, module: DistributedDataParallel, inner: nn.Module, number: int) -> None:
        """Observe a wrapper, and the module that is becoming its inner one, from now on."""
        own = weakref.ref(module)
        seen = False
        of_module = f"forwards of module {number}"
        without_sync = f"forwards_without_sync of module {number}"
        past = f"forwards_past_wrapper of module {number}"
        last = f"last_forward_synchronised of module {number}"

        def before(wrapper: nn.Module, arguments: tuple[Any, ...], _: Any) -> None:
            nonlocal seen
            # A copy of the wrapper is none of ours.
            if wrapper is not own() or not isinstance(wrapper, DistributedDataParallel):
                return
            self._inside.add(number)
            if not seen:
                seen = True
                for act in self.first_forward:
                    act(wrapper, number)
            if not (in_training(wrapper) and torch.is_grad_enabled()):
                return
            window = self._context.window
            window.count("forwards")
            window.count(of_module)
            if not wrapper.require_backward_grad_sync:
                window.count("forwards_without_sync")
                window.count(without_sync)
            window.put(last, bool(wrapper.require_backward_grad_sync))
            if self._context.updates < ALL_OF:
                window.add("forward_at", call_site())
            rows = next((a.shape[0] for a in arguments if _has_rows(a)), None)
            if rows is not None:
                window.add("rows", rows)

        def after(wrapper: nn.Module, *_: Any) -> None:
            if wrapper is own():
                self._inside.discard(number)

        def before_inner(called: nn.Module, *_: Any) -> None:
            if number in self._inside or not (called.training and torch.is_grad_enabled()):
                return
            self._context.window.count("forwards_past_wrapper")
            self._context.window.count(past)
            if self._context.updates < ALL_OF:
                self._context.window.add("forward_past_wrapper_at", call_site())

        name = "forward passes"
        self._handles += [
            before_forward(self._context, module, name, before),
            after_forward(self._context, module, name, after),
            before_forward(self._context, inner, name, before_inner),
        ]


def in_training(module: nn.Module) -> bool:
    """Say whether a module is in training mode; of a wrapper, whether it or its inner one is.

    Lightning puts the wrapper into evaluation mode, and afterwards only the inner one back.
    """
    inner = isinstance(module, DistributedDataParallel) and module.module.training
    return bool(module.training or inner)


def _has_rows(argument: object) -> bool:
    return isinstance(argument, torch.Tensor) and argument.dim() > 0
