"""Which parameters belong to whom: to a module that trains, and to an optimizer.

A parameter that gets gradients and is in no optimizer is not trained; one that an optimizer holds
and no module has is trained for nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from harness.watch.instruments.context import Context
from harness.watch.instruments.patches import Patches
from harness.watch.modules import PLAIN, parameters_of

MOST = 64
AT = (0, 2, 16)
"""Updates of an optimizer before which its parameters are counted."""
_SHOWN = 4


class Ownership:
    """Counts at some of the first updates; costs nothing in between."""

    def __init__(self, context: Context) -> None:
        """Learn of every optimizer that is made, also of one that never makes an update."""
        self._context = context
        self._patches = Patches()
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._numbers: dict[int, int] = {}
        """The numbers of those that have made an update, by `id`."""
        self._versions: dict[int, int] = {}
        self._patches.around(Optimizer, "__init__", after=context.safely("optimizers", self._made))

    def close(self) -> None:
        """Put torch's own function back."""
        self._patches.close()

    def held(self) -> set[int]:
        """Return the parameters that any optimizer holds, by `id`."""
        known = [known for reference in self._optimizers if (known := reference()) is not None]
        return {id(p) for one in known for p in parameters_of(one)}

    def before_update(self, number: int, optimizer: Optimizer, update: int) -> None:
        """Count."""
        self._numbers[id(optimizer)] = number
        if update not in AT:
            return
        known = [known for reference in self._optimizers if (known := reference()) is not None]
        held = [p for one in (*known, optimizer) for p in parameters_of(one)]
        optimized, memory = set(map(id, held)), set(map(_memory, held)) - {None}
        others = {id(p): one for one in known if one is not optimizer for p in parameters_of(one)}
        mine = parameters_of(optimizer)
        trained = [m for m in self._context.modules.roots() if _has_gradient(m)]
        inside = {id(p): n for m in trained for n, p in m.named_parameters()}
        # Without a gradient, in no module that trains, and nobody else's either.
        idle = [p for p in mine if p.grad is None and id(p) not in inside]
        stray = [p for p in idle if id(p) not in others]
        # Trained by itself: prompts, images, and the like are in no module either.
        free = sum(p.grad is not None and id(p) not in inside for p in mine)
        orphans = {
            id(p): (inside[id(p)], list(p.shape))
            for m in trained
            for p in m.parameters()
            # A view of what an optimizer holds, such as of one flat vector, moves with it.
            if p.grad is not None and id(p) not in optimized and _memory(p) not in memory
        }
        versions = {id(p): p._version for m in trained for p in m.parameters() if id(p) in orphans}
        written = sum(self._versions.get(key, now) != now for key, now in versions.items())
        self._versions |= versions
        ties = [tie for m in trained for tie in _broken_ties(m)]
        if stray or orphans or ties:
            self._context.journal.write(
                "ownership",
                optimizer=number,
                update=update,
                held=len(mine),
                stray=len(stray),
                free=free,
                orphans=len(orphans),
                written=written,
                models_in_none=sum(
                    any(id(p) in orphans for p in m.parameters())
                    and not any(id(p) in optimized for p in m.parameters())
                    for m in _models(trained)
                ),
                all_held_by=self._also_hold(mine, others),
                some_orphans=list(orphans.values())[:_SHOWN],
                broken_ties=ties[:_SHOWN],
            )

    def _also_hold(
        self, mine: Sequence[torch.Tensor], others: Mapping[int, Optimizer]
    ) -> list[int]:
        """Return the numbers of other optimizers that hold all of these between them, or none."""
        if not all(id(p) in others for p in mine):
            return []
        numbers = {self._numbers.get(id(others[id(p)])) for p in mine}
        return sorted(number for number in numbers if number is not None)

    def _made(self, _: None, optimizer: Optimizer, *__: Any, **___: Any) -> None:
        if len(self._optimizers) < MOST:
            self._optimizers.append(weakref.ref(optimizer))


def _memory(tensor: torch.Tensor) -> int | None:
    """Return what tells one piece of memory from another, None where a tensor has none of its own.

    Views of it have the same.
    """
    if type(tensor) not in PLAIN:
        return None
    return tensor.untyped_storage().data_ptr() or None


def _has_gradient(module: nn.Module) -> bool:
    return any(p.grad is not None for p in module.parameters())


def _models(roots: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield modules and their parts: a pair of networks may be one module."""
    for root in roots:
        yield root
        yield from root.children()


def _broken_ties(root: nn.Module) -> Iterator[list[str]]:
    """Yield an embedding and an output layer with the same values in two places.

    Two that were never tied are not equal by chance.
    """
    # Not `module.weight`: that of a spectral norm makes a step of its iteration where it is read.
    named = [
        (name, weight)
        for name, module in root.named_modules()
        if isinstance(module, nn.Embedding | nn.Linear)
        and (weight := module._parameters.get("weight")) is not None
    ]
    tables = [(n, w) for n, w in named if isinstance(root.get_submodule(n), nn.Embedding)]
    layers = [(n, w) for n, w in named if not isinstance(root.get_submodule(n), nn.Embedding)]
    for name, table in tables:
        for other, layer in layers:
            alike = table is not layer and table.shape == layer.shape
            if alike and type(table) is type(layer) is nn.Parameter and table.is_cpu:
                apart = table.data_ptr() != layer.data_ptr()
                if not apart or not torch.equal(table, layer):
                    continue
                # With the same gradient for both they stay what they are.
                one, same = table.grad, layer.grad
                if one is not None and same is not None and torch.equal(one, same):
                    continue
                if bool(table.ne(table[0, 0]).any()):
                    yield [name, other]
