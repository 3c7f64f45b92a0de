"""Weights that no optimizer holds: a teacher, a target network, a copy in half precision.

They follow what is trained by the script's own writing, and nobody compares them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from harness.watch.digests.digest import Digester
from harness.watch.instruments.context import Context
from harness.watch.instruments.forward_hooks import before_forward
from harness.watch.instruments.patches import Patches
from harness.watch.modules import PLAIN

MOST = 16
"""Modules that are looked at."""
NAMES = 256
"""Parameters of a module that are looked at."""


class _Copy:
    """A module with parameters that no optimizer holds."""

    def __init__(self, number: int, module: nn.Module) -> None:
        self.number = number
        self.module = weakref.ref(module)
        self.calls = 0
        self.names: list[str] = []


class Copies:
    """Takes digests of such weights before some of the updates."""

    def __init__(self, context: Context, held: Callable[[], set[int]]) -> None:
        """Wait for updates.

        Args:
            context: of the watcher.
            held: returns the parameters that any optimizer holds, by `id`.
        """
        self._context = context
        self._held = held
        self._digest = Digester()
        self._known: list[_Copy] = []
        self._handles: list[Any] = []
        self._patches = Patches()
        # A copy of a module is nobody's part, and nobody knows of it until it is frozen.
        frozen = context.safely("copies", lambda module, *_, **__: context.modules.note(module))
        self._patches.around(nn.Module, "requires_grad_", before=frozen)

    def close(self) -> None:
        """Remove the hooks."""
        self._patches.close()
        for handle in self._handles:
            handle.remove()

    def before_update(self) -> None:
        """Look; called at some of the updates only."""
        held = self._held()
        for root in self._context.modules.roots():
            rows = [
                (name.removeprefix("module."), parameter)
                for name, parameter in root.named_parameters()
                if id(parameter) not in held and _readable(parameter)
            ][:NAMES]
            one = self._of(root) if rows else None
            if one is None:
                continue
            names = [name for name, _ in rows]
            event: dict[str, Any] = {} if names == one.names else {"names": names}
            one.names = names
            self._context.journal.write(
                "copy",
                number=one.number,
                update=self._context.updates,
                calls=one.calls,
                digests=self._digest([parameter for _, parameter in rows]),
                **{"class": type(getattr(root, "module", root)).__name__},
                **event,
            )

    def _of(self, root: nn.Module) -> _Copy | None:
        for one in self._known:
            if one.module() is root:
                return one
        if len(self._known) >= MOST:
            return None
        made = _Copy(len(self._known), root)
        self._known.append(made)
        own = made.module

        def called(module: nn.Module, *_: Any) -> None:
            if module is own():
                made.calls += 1

        self._handles.append(before_forward(self._context, root, "copies", called))
        return made


def _readable(parameter: torch.Tensor) -> bool:
    plain = type(parameter) in PLAIN and parameter.layout == torch.strided
    return plain and not parameter.is_meta
