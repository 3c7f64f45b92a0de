"""Looks before and after a module's forward passes, on behalf of several instruments at once.

A module has one hook of ours on each side, which all instruments share: what torch does for a hook
takes longer than what most of them do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from harness.watch.instruments.compiling import is_compiling, is_transforming
from harness.watch.instruments.context import Context

Act = Callable[..., None]


class ForwardHook:
    """A hook that is left behind when its module is copied or pickled."""

    def __init__(self, context: Context) -> None:
        """Call nothing yet."""
        self.context = context
        self.acts: list[tuple[str, Act]] = []
        """What is called, each on behalf of the instrument that is named first."""
        self.handle: RemovableHandle | None = None

    def __call__(self, *args: Any) -> None:
        """Let a compiler see nothing, look at nothing without values, let nothing out."""
        if is_compiling() or is_transforming():
            return
        # One that removes itself must not make the next one be left out.
        for name, act in tuple(self.acts):
            if self.context.allows(name):
                try:
                    act(*args)
                except Exception as error:
                    self.context.failed(name, error)

    def __reduce__(self) -> tuple[Any, ...]:
        """Put a function of Python's own in its place that does nothing.

        A checkpoint made under the watcher has to load where there is none.
        """
        return getattr, (contextlib.nullcontext(), "__exit__")


class Handle:
    """One look, to be given up."""

    def __init__(self, hook: ForwardHook, act: tuple[str, Act]) -> None:
        """Remember which of the hook's looks it is."""
        self._hook = hook
        self._act = act

    def remove(self) -> None:
        """Look no more; a second call does nothing."""
        if self._act in self._hook.acts:
            self._hook.acts.remove(self._act)
        if not self._hook.acts and self._hook.handle is not None:
            self._hook.handle.remove()


def before_forward(context: Context, module: nn.Module, name: str, act: Act) -> Handle:
    """Call `act(module, args, kwargs)` before each forward pass of a module.

    Args:
        context: of the watcher.
        module: whose forward passes.
        name: the instrument that looks.
        act: what it does; what it raises ends that instrument only.
    """
    hook = _hook_of(context, module._forward_pre_hooks)
    if hook.handle is None:
        hook.handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    return _added(hook, name, act)


def after_forward(context: Context, module: nn.Module, name: str, act: Act) -> Handle:
    """Call `act(module, args, result)` after each forward pass; see `before_forward`."""
    hook = _hook_of(context, module._forward_hooks)
    if hook.handle is None:
        hook.handle = module.register_forward_hook(hook)
    return _added(hook, name, act)


def _hook_of(context: Context, hooks: dict[int, Callable[..., Any]]) -> ForwardHook:
    ours = (hook for hook in hooks.values() if isinstance(hook, ForwardHook))
    return next((hook for hook in ours if hook.context is context), ForwardHook(context))


def _added(hook: ForwardHook, name: str, act: Act) -> Handle:
    hook.acts.append((name, act))
    return Handle(hook, hook.acts[-1])
