"""Instruments: each observes one side of the program and writes to the journal what it saw."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from harness.watch.instruments.backward import Backward
from harness.watch.instruments.bookkeeping import Bookkeeping
from harness.watch.instruments.buffers import Buffers
from harness.watch.instruments.by_hand import ByHand
from harness.watch.instruments.context import Context, Instrument
from harness.watch.instruments.forward import Forward
from harness.watch.instruments.loads import Loads
from harness.watch.instruments.parameters import Held, Parameters
from harness.watch.instruments.scaling import Scaling
from harness.watch.instruments.wrappers import Wrappers


class Instruments:
    """All instruments of a rank, and what they are told of wrappers and updates."""

    def __init__(self, context: Context) -> None:
        """Make them; from here on they observe."""
        self._context = context
        self._backward = Backward(context)
        self._forward = Forward(context)
        self._bookkeeping = Bookkeeping(context)
        self._wrappers = Wrappers(context)
        self._parameters = Parameters(context, self._wrappers.owners)
        self._buffers = Buffers(context)
        self._by_hand = ByHand(context)
        self._forward.first_forward.append(self._wrappers.describe)
        self._all: list[Instrument] = [
            self._backward,
            self._forward,
            self._wrappers,
            self._parameters,
            self._buffers,
            self._by_hand,
            Loads(context),
            Scaling(context),
        ]
        safely = context.safely
        # Made once: they are called at every update.
        self._backward_before = safely("backward passes", self._backward.before_update)
        self._describe_wrappers = safely("wrappers", self._wrappers.before_update)
        self._parameters_before = safely("parameters", self._parameters.before_update)
        self._parameters_after = safely("parameters", self._parameters.after_update)
        self._reduced_by_hand = safely("gradients reduced by hand", self._by_hand.before_update)

    def close(self) -> None:
        """Remove every hook."""
        for instrument in self._all:
            instrument.close()
        self._bookkeeping.close()

    def wrapped(self, module: DistributedDataParallel, inner: torch.nn.Module, number: int) -> None:
        """Note that a module is being wrapped."""
        self._context.wrappers[number] = weakref.ref(module)
        self._context.safely("wrappers", self._wrappers.wrapped)(module, inner, number)
        self._forward.wrapped(module, inner, number)
        self._buffers.wrapped(module, number)
        self._bookkeeping.wrapped(module, number)

    def described(
        self, number: int, optimizer: torch.optim.Optimizer, update: int, held: Sequence[Held]
    ) -> None:
        """Note which parameters an optimizer holds from this update on."""
        safely = self._context.safely
        safely("parameters", self._parameters.described)(number, optimizer, update, held)
        self._look(number, optimizer, update)

    @property
    def sees_averages(self) -> bool:
        """Whether the script itself has reduced the weights of an optimizer, as a whole or not.

        Or may have done so in another way, where it makes a new optimizer after each time.
        """
        return self._by_hand.sees_averages or self._parameters.made_anew > 1

    def averages(self, number: int) -> bool:
        """Say whether an optimizer's replicas differ on purpose between averages."""
        return bool(self._parameters.modules(number) & self._wrappers.averaging)

    def before_update(self, number: int, optimizer: torch.optim.Optimizer, update: int) -> None:
        """Note that an optimizer is about to make an update."""
        self._bookkeeping.before_update(number, optimizer, update)
        self._backward_before(number, optimizer)
        self._describe_wrappers()
        self._look(number, optimizer, update)

    def _look(self, number: int, optimizer: torch.optim.Optimizer, update: int) -> None:
        held = self._parameters.alive(number)
        if held:
            self._parameters_before(number, optimizer, update, held)
            self._reduced_by_hand(number, update, held)

    def after_update(self, number: int, optimizer: torch.optim.Optimizer, update: int) -> None:
        """Note that it has made it, and close the window between two updates."""
        self._backward.after_update(number, optimizer)
        self._bookkeeping.after_update(number)
        self._parameters_after(number, optimizer, update)
        window = self._context.window.take(number, update)
        if window is not None:
            self._context.journal.write("update", optimizer=number, update=update, **window)
        self._context.updates += 1
        self._context.journal.step = self._context.updates
