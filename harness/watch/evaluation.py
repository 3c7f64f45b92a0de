"""Buffers where equality is due: at an evaluation that all ranks make of the same module.

Between a forward pass and the next one, batch norm's statistics differ between ranks by design. An
evaluation is another thing: one model has one score. DistributedDataParallel has made buffers equal
by then if it is called itself, unless it was told not to; who evaluates the module inside it, or an
average of the weights, is on his own. An evaluation on one rank is nobody else's business.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.watch.digests.digest import Digester, method_of
from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import Context
from harness.watch.instruments.forward import in_training
from harness.watch.instruments.forward_hooks import after_forward, before_forward
from harness.watch.instruments.patches import Patches
from harness.watch.layout import EVALUATION, Entry, Layout
from harness.watch.modules import group_of, local_part

MOST = 64
"""Modules that nobody wraps, and whose evaluations are looked at."""
_ALL = 8
"""Evaluations of such a module that are all looked at; of later ones it is fewer and fewer."""


class Evaluated:
    """A module that is evaluated, and what of it has to be equal."""

    def __init__(self, what: str, module: nn.Module, number: int | None, stream: str) -> None:
        """Look at nothing yet.

        Args:
            what: wrapper, inner (the module inside a wrapper) or other.
            module: the wrapper, or the module itself.
            number: the wrapper's.
            stream: where its digests are exchanged.
        """
        self.what = what
        self.module = weakref.ref(module)
        self.number = number
        self.stream = stream
        self.updates: int | None = None
        """After so many updates it was evaluated last."""
        self.times = 0
        self.entries: tuple[Entry, ...] = ()
        self.group = ""
        """The ranks that the wrapper around it reduces over, where these are not all ranks."""
        self._digest = Digester()

    @property
    def kind(self) -> str:
        """The class of the module."""
        module = self.module()
        if isinstance(module, DistributedDataParallel):
            module = module.module
        return type(module).__name__

    @property
    def source(self) -> str:
        """What it is called in an answer."""
        if self.what == "other":
            return f"{self.kind}, which no wrapper holds"
        inside = " without its wrapper" if self.what == "inner" else ""
        return f"module {self.number} ({self.kind}){inside}"

    def is_due(self, updates: int) -> bool:
        """Say whether this evaluation is looked at; counts it."""
        if self.updates == updates:
            return False
        self.updates = updates
        self.times += 1
        return self.what != "other" or self.times <= _ALL or self.times & (self.times - 1) == 0

    def layout(self) -> Layout:
        """Return what the digests stand for."""
        return Layout({EVALUATION: self.entries})

    def digests(self) -> list[int]:
        """Take stock of the module, and return the digests."""
        module = self.module()
        assert module is not None
        ignored = set(getattr(module, "parameters_to_ignore", ()))
        if isinstance(module, DistributedDataParallel):
            module = module.module
        named: list[tuple[str, str, torch.Tensor]] = [
            (name, "buffer", buffer)
            for name, buffer in module.named_buffers()
            if name not in ignored
        ]
        if self.what == "other":
            # Unequal weights say that ranks evaluate models of their own: nothing is due then.
            named += [(name, "parameter", p) for name, p in module.named_parameters()]
        self.entries = tuple(
            Entry(
                name=name.removeprefix("module."),
                kind=kind,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                cohort=self.group,
                wrapped=self.what != "other",
                method=method_of(local_part(tensor)),
            )
            for name, kind, tensor in named
        )
        return self._digest([local_part(tensor) for _, _, tensor in named])


class Evaluations:
    """Looks at the forward passes of modules in evaluation mode."""

    def __init__(self, context: Context, seen: Callable[[Evaluated], None]) -> None:
        """Wait for wrappers, and for modules that are put into evaluation mode."""
        self._context = context
        self._seen = seen
        self._handles: list[Any] = []
        self._inside: set[int] = set()
        self._others: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._streams: dict[str, int] = {}
        self._patches = Patches()
        self._patches.around(nn.Module, "eval", before=context.safely("evaluations", self._eval))

    def close(self) -> None:
        """Remove the hooks."""
        self._patches.close()
        for handle in self._handles:
            handle.remove()

    def wrapped(self, module: DistributedDataParallel, inner: nn.Module, number: int) -> None:
        """Look at the evaluations of a wrapper, and of the module that becomes its inner one."""
        own = weakref.ref(module)
        whole = Evaluated("wrapper", module, number, f"module{number}")
        part = Evaluated("inner", inner, number, f"inner{number}")
        whole.group = part.group = group_of(module)
        training = True

        def before(called: nn.Module, *_: Any) -> None:
            # A copy of the wrapper is none of ours.
            if called is own():
                self._inside.add(number)

        def after(called: nn.Module, *_: Any) -> None:
            nonlocal training
            if called is not own():
                return
            self._inside.discard(number)
            before_this, training = training, in_training(called)
            started = before_this and not training
            if started:
                self._look(whole)

        def after_inner(called: nn.Module, *_: Any) -> None:
            if called is part.module() and number not in self._inside and not called.training:
                self._look(part)

        name = "evaluations"
        self._handles += [
            before_forward(self._context, module, name, before),
            after_forward(self._context, module, name, after),
            after_forward(self._context, inner, name, after_inner),
        ]

    def _eval(self, module: nn.Module, *_: Any, **__: Any) -> None:
        """Look at a module that is put into evaluation mode, unless a wrapper has to do with it."""
        if module in self._others or len(self._others) >= MOST:
            return
        if isinstance(module, torch.jit.ScriptModule) or self._is_wrapped(module):
            return
        if not any(True for _ in module.buffers()):
            return
        self._others[module] = None
        own = weakref.ref(module)
        one: Evaluated | None = None
        wrapped, wrappers = False, len(self._context.wrappers)

        def after(called: nn.Module, *_: Any) -> None:
            nonlocal one, wrapped, wrappers
            if called is not own() or called.training or torch.is_grad_enabled():
                return
            # It may have been wrapped, or become a part of what is wrapped, since.
            if wrappers != len(self._context.wrappers):
                wrappers = len(self._context.wrappers)
                wrapped = self._is_wrapped(called)
            if wrapped:
                return
            if one is None:
                one = Evaluated("other", called, None, self._stream(called))
            self._look(one)

        self._handles.append(after_forward(self._context, module, "evaluations", after))

    def _is_wrapped(self, module: nn.Module) -> bool:
        wrappers = [w for r in self._context.wrappers.values() if (w := r()) is not None]
        if any(module is part for wrapper in wrappers for part in wrapper.modules()):
            return True
        return any(isinstance(part, DistributedDataParallel) for part in module.modules())

    def _stream(self, module: nn.Module) -> str:
        """Return a name that is the same on all ranks which evaluate it in the same place."""
        made_of = [(name, tuple(b.shape)) for name, b in module.named_buffers()]
        about = f"{type(module).__name__} {made_of} {call_site()}"
        name = f"evaluated{hashlib.sha256(about.encode()).hexdigest()[:12]}"
        self._streams[name] = self._streams.get(name, 0) + 1
        return f"{name}-{self._streams[name]}"

    def _look(self, one: Evaluated) -> None:
        module = one.module()
        if module is None or not any(True for _ in module.buffers()):
            return
        if one.times == 0:
            self._context.journal.write(
                "evaluation",
                source=one.source,
                what=one.what,
                module=one.number,
                average=isinstance(module, torch.optim.swa_utils.AveragedModel),
                at=call_site(),
                **{"class": one.kind},
            )
        self._seen(one)
