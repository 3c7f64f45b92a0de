"""Wrappers: what DistributedDataParallel was given, how it was told to work, what became of it.

A wrapper puts its hooks on the parameters that are there, require a gradient and have the type that
they have when it is made. What is replaced, unfrozen or converted later has no hook.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.watch.digests.digest import Digester
from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import Context
from harness.watch.instruments.patches import Patches
from harness.watch.instruments.structure import MOST, structure
from harness.watch.modules import local_part

SYNCHRONISED, FROZEN, IGNORED, ABSENT = "synchronised", "frozen", "ignored", "absent"
"""What a parameter was to its wrapper when it was made: only the first kind has a hook."""
_AVERAGING = ("post_localSGD_hook",)
_CONVERSIONS = ("bfloat16", "cpu", "cuda", "double", "float", "half", "to", "type")
"""Methods of a module that may change the type or device of its parameters."""


class _Wrapper:
    """A wrapper, the parameters that it was given, and whether it has been described."""

    def __init__(self, module: DistributedDataParallel, inner: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.inner = weakref.ref(inner)
        self.parameters = [(name, weakref.ref(p)) for name, p in inner.named_parameters()]
        self.frozen = {name for name, p in inner.named_parameters() if not p.requires_grad}
        self.described = False

    def types(self) -> dict[str, str]:
        """Return type and device of each parameter that is still there."""
        alive = ((name, reference()) for name, reference in self.parameters)
        return {name: f"{_name(p.dtype)} on {p.device}" for name, p in alive if p is not None}


class Wrappers:
    """Observes every wrapper that the program makes, from its making on."""

    def __init__(self, context: Context) -> None:
        """Watch the methods of a module that convert it."""
        self._context = context
        self._digest = Digester()
        self._wrappers: dict[int, _Wrapper] = {}
        self.averaging: set[int] = set()
        """Those between whose averages the replicas differ on purpose."""
        self._types: dict[int, dict[str, str]] = {}
        self._patches = Patches()
        for name in _CONVERSIONS:
            self._patches.around(
                nn.Module,
                name,
                before=context.safely("conversions", self._before_conversion),
                after=context.safely("conversions", self._after_conversion),
            )

    def close(self) -> None:
        """Put torch's own methods back."""
        self._patches.close()

    def wrapped(self, module: DistributedDataParallel, inner: nn.Module, number: int) -> None:
        """Note a wrapper that is being made, and what it is given."""
        self._wrappers[number] = _Wrapper(module, inner)
        self._context.journal.write(
            "wrap",
            module=number,
            ranks=torch.distributed.get_process_group_ranks(module.process_group),
            **structure(inner),
            digests=self._digests(inner),
        )

    def describe(self, module: DistributedDataParallel, number: int) -> None:
        """Note how a wrapper was told to work; later than it is made, for it must be complete."""
        wrapper = self._wrappers.get(number)
        if wrapper is None or wrapper.described:
            return
        wrapper.described = True
        # Its name has changed in torch 2.13.
        buffers = getattr(
            module, "forward_sync_buffers", getattr(module, "broadcast_buffers", True)
        )
        hooks = [_title(hook) for hook, _ in getattr(module, "_comm_hooks", ())]
        if set(hooks) & set(_AVERAGING):
            self.averaging.add(number)
        self._context.journal.write(
            "wrapper",
            module=number,
            sync_buffers=bool(buffers),
            find_unused_parameters=bool(module.find_unused_parameters),
            static_graph=bool(module.static_graph),
            hooks=hooks,
            ignored=sorted(getattr(module, "parameters_to_ignore", ()))[:MOST],
            digests=self._digests(module.module),
        )

    def before_update(self) -> None:
        """Describe the wrappers whose forward was never called."""
        for number, wrapper in self._wrappers.items():
            if not wrapper.described and (module := wrapper.module()) is not None:
                self.describe(module, number)

    def owners(self) -> dict[int, tuple[int, str]]:
        """Return for each parameter below a wrapper, by `id`, its number and what it was to it."""
        found: dict[int, tuple[int, str]] = {}
        for number, wrapper in self._wrappers.items():
            module = wrapper.module()
            if module is None:
                continue
            ignored = set(getattr(module, "parameters_to_ignore", ()))
            given = {
                id(p): IGNORED
                if name in ignored
                else FROZEN
                if name in wrapper.frozen
                else SYNCHRONISED
                for name, reference in wrapper.parameters
                if (p := reference()) is not None
            }
            for parameter in module.parameters():
                key = id(parameter)
                # Wrapped twice: the wrapper that has hooks on it counts.
                if found.get(key, (0, ABSENT))[1] != SYNCHRONISED:
                    found[key] = number, given.get(key, ABSENT)
        return found

    def _digests(self, module: nn.Module) -> list[int]:
        tensors = [local_part(parameter) for parameter in module.parameters()][:MOST]
        if any(tensor.is_meta for tensor in tensors):
            return []
        return self._digest(tensors)

    def _before_conversion(self, converted: nn.Module, *_: Any, **__: Any) -> None:
        self._types = {
            number: wrapper.types()
            for number, wrapper in self._wrappers.items()
            if (inner := wrapper.inner()) is not None and _share(converted, inner)
        }

    def _after_conversion(self, _: Any, *__: Any, **___: Any) -> None:
        types, self._types = self._types, {}
        for number, before in types.items():
            after = self._wrappers[number].types()
            changed = [name for name in before if after.get(name, before[name]) != before[name]]
            if changed:
                self._context.journal.write(
                    "conversion",
                    module=number,
                    parameters=changed[:MOST],
                    before=before[changed[0]],
                    after=after[changed[0]],
                    at=call_site(),
                )


def _title(hook: Any) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


def _share(one: nn.Module, other: nn.Module) -> bool:
    held = set(map(id, other.parameters()))
    return any(id(parameter) in held for parameter in one.parameters())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
