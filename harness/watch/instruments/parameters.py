"""Parameters of an optimizer: whose they are, which have no gradient, which somebody has written.

Looked at before every update, so only at what costs nothing to read: flags and version counters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness.watch.digests.digest import Digester
from harness.watch.instruments.context import Context
from harness.watch.instruments.structure import MOST
from harness.watch.modules import local_part

Owners = Callable[[], dict[int, tuple[int, str]]]
"""Returns for each parameter below a wrapper, by `id`, its number and what it was to it."""


class Held:
    """A parameter that an optimizer holds."""

    def __init__(self, name: str, parameter: torch.Tensor, *, replicated: bool) -> None:
        """Remember it without keeping it alive.

        Args:
            name: as its user knows it.
            parameter: the tensor.
            replicated: False for a shard.
        """
        self.name = name
        self.parameter = weakref.ref(parameter)
        self.replicated = replicated


_State = dict[Any, tuple[int, int]] | None
"""Key -> which tensor it is, and how often it has been written to."""


class _Optimizer:
    """What was seen of the parameters of one optimizer."""

    def __init__(self, kind: str, held: Sequence[Held]) -> None:
        self.kind = kind
        self.held = held
        self.after: int | None = None
        """The first optimizer that has held the same parameters, if it is not the first itself."""
        self.wrappers = 0
        """How many there were when the owners of its parameters were looked up."""
        self.modules: frozenset[int] = frozenset()
        """Numbers of the wrappers that its parameters are below."""
        self.flags: list[tuple[bool, bool]] = []
        self.versions: list[int] = []
        self.states: list[_State] = []
        """Of each parameter, as the last update has left it; empty where that cannot be told."""

    def alive(self) -> list[tuple[str, torch.Tensor]]:
        return [(one.name, p) for one in self.held if (p := one.parameter()) is not None]

    def same(self, parameters: set[int]) -> bool:
        """Say whether these, by `id`, are its parameters."""
        return {id(p) for _, p in self.alive()} == parameters


class Parameters:
    """Observes the parameters of all optimizers."""

    def __init__(self, context: Context, owners: Owners) -> None:
        """Ask `owners` whenever an optimizer has other parameters than before."""
        self._context = context
        self._owners = owners
        self._digest = Digester()
        self._optimizers: dict[int, _Optimizer] = {}
        self.made_anew = 0
        """Optimizers of parameters that another one has held before."""

    def close(self) -> None:
        """There is nothing to remove."""

    def described(
        self, number: int, optimizer: torch.optim.Optimizer, update: int, held: Sequence[Held]
    ) -> None:
        """Note what an optimizer holds from now on."""
        after = None
        if number not in self._optimizers:
            mine = {id(one.parameter()) for one in held}
            after = next((n for n, o in self._optimizers.items() if o.same(mine)), None)
            self.made_anew += after is not None
        self._optimizers[number] = known = _Optimizer(type(optimizer).__name__, held)
        known.after = after
        self._describe(number, known, update)

    def _describe(self, number: int, known: _Optimizer, update: int) -> None:
        known.wrappers = len(self._context.wrappers)
        owners = self._owners()
        of = {owners[id(p)][0] for _, p in known.alive() if id(p) in owners}
        known.modules = frozenset(of)
        self._context.journal.write(
            "optimizer",
            optimizer=number,
            update=update,
            after=known.after,
            parts=sum(not one.replicated for one in known.held),
            **{"class": known.kind},
            parameters=[
                [name, *owners.get(id(p), (None, "")), p.requires_grad] for name, p in known.alive()
            ][:MOST],
        )

    def alive(self, number: int) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters of an optimizer, each with its name; none before the first look."""
        known = self._optimizers.get(number)
        return [] if known is None else known.alive()

    def modules(self, number: int) -> frozenset[int]:
        """Return the numbers of the wrappers that an optimizer's parameters are below."""
        known = self._optimizers.get(number)
        return frozenset() if known is None else known.modules

    def before_update(
        self,
        number: int,
        optimizer: torch.optim.Optimizer,
        update: int,
        alive: list[tuple[str, torch.Tensor]],
    ) -> None:
        """Note parameters without a gradient, and what was written since the last update."""
        known = self._optimizers.get(number)
        if known is None:
            return
        if known.wrappers != len(self._context.wrappers):
            self._describe(number, known, update)
        flags = [(p.requires_grad, p.grad is None) for _, p in alive]
        if flags != known.flags:
            known.flags = flags
            marked = list(zip(alive, flags, strict=True))
            self._context.journal.write(
                "parameters",
                optimizer=number,
                update=update,
                frozen=[name for (name, _), (requires, _) in marked if not requires][:MOST],
                without_gradient=[
                    name for (name, _), (requires, none) in marked if requires and none
                ][:MOST],
            )
        versions = [p._version for _, p in alive]
        if len(known.versions) == len(versions) and versions != known.versions:
            pairs = zip(alive, versions, known.versions, strict=True)
            for name in [name for (name, _), now, before in pairs if now != before]:
                self._context.window.count("parameters_written")
                self._context.window.add("written", name)
        if known.states:
            self._note_states(known, _states(optimizer, [p for _, p in alive]), alive)

    def _note_states(
        self, known: _Optimizer, states: list[_State], alive: list[tuple[str, torch.Tensor]]
    ) -> None:
        if states == known.states or len(states) != len(known.states):
            return
        for (name, _), now, before in zip(alive, states, known.states, strict=True):
            if now != before:
                self._context.window.count("states_written")
                self._context.window.add("state_written", name)

    def after_update(self, number: int, optimizer: torch.optim.Optimizer, update: int) -> None:
        """Remember the parameters as the update has left them; now and then, the state too."""
        known = self._optimizers.get(number)
        if known is None:
            return
        held = [p for one in known.held if (p := one.parameter()) is not None]
        known.versions = [p._version for p in held]
        known.states = _states(optimizer, held)
        if self._context.window.is_sparse(update):
            self._write_state(number, optimizer, update, known)

    def _write_state(
        self, number: int, optimizer: torch.optim.Optimizer, update: int, known: _Optimizer
    ) -> None:
        names: dict[str, list[str]] = {}
        tensors: dict[str, list[torch.Tensor]] = {}
        for one in known.held[:MOST]:
            parameter = one.parameter()
            if parameter is None or not one.replicated:
                continue
            # `state` is a defaultdict: indexing would create what is not there.
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    names.setdefault(str(key), []).append(one.name)
                    tensors.setdefault(str(key), []).append(local_part(value))
        if not tensors:
            return
        digests: dict[str, Any] = {
            key: dict(zip(names[key], self._digest(held), strict=True))
            for key, held in tensors.items()
        }
        self._context.journal.write("state", optimizer=number, update=update, digests=digests)


def _states(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> list[_State]:
    """Return which tensors an optimizer keeps for each parameter, and how often they were written.

    That needs no look at their values, so no GPU is waited for.
    """
    state = optimizer.state
    try:
        return [
            {k: (id(v), v._version) for k, v in of.items() if isinstance(v, torch.Tensor)}
            # It is a defaultdict: indexing would create what is not there.
            if (of := state.get(parameter)) is not None
            else None
            for parameter in parameters
        ]
    except RuntimeError:
        # Tensors that were made in inference mode do not count.
        return []
