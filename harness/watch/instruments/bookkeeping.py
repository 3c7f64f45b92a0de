"""Instruments for faults that leave replicas equal: data, randomness, schedules, losses."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from harness.watch.instruments.checkpoints import Checkpoints
from harness.watch.instruments.clipping import Clipping
from harness.watch.instruments.context import Context, Instrument
from harness.watch.instruments.copies import Copies
from harness.watch.instruments.draws import Draws
from harness.watch.instruments.frozen import Frozen
from harness.watch.instruments.inputs import Inputs
from harness.watch.instruments.losses import Losses
from harness.watch.instruments.ownership import AT, Ownership
from harness.watch.instruments.reductions import Reductions
from harness.watch.instruments.restores import Restores
from harness.watch.instruments.samples import Samples
from harness.watch.instruments.schedules import Schedules

LAST_COUNT = max(AT)
"""The update after which some instruments have nothing more to do."""


class Bookkeeping:
    """All of them; each fails on its own, and the others go on."""

    def __init__(self, context: Context) -> None:
        """Make them."""
        self._context = context
        self._samples = Samples(context)
        self._inputs = Inputs(context)
        self._schedules = Schedules(context)
        self._clipping = Clipping(context)
        self._ownership = Ownership(context)
        self._frozen = Frozen(context)
        self._copies = Copies(context, self._ownership.held)
        self._checkpoints = Checkpoints(context)
        self._all: list[Instrument] = [
            self._samples,
            self._inputs,
            self._schedules,
            self._clipping,
            self._ownership,
            self._copies,
            self._checkpoints,
            Draws(context),
            Losses(context, self._clipping),
            Reductions(context),
            Restores(context),
        ]
        safely = context.safely
        self._wrapped = safely("samples and randomness", self._inputs.wrapped)
        self._always = [
            safely("schedulers", self._schedules.before_update),
            safely("clips", self._clipping.before_update),
        ]
        self._at_first = [
            safely("optimizers", self._ownership.before_update),
            safely("checkpoints", self._checkpoints.before_update),
            safely("samples and randomness", self._inputs.before_update),
        ]
        self._now_and_then = safely("frozen layers", self._frozen.before_update)
        self._look_at_copies = safely("copies", self._copies.before_update)
        self._after = safely("loaders", self._samples.after_update)

    def close(self) -> None:
        """Remove every hook; some write what they have counted."""
        for instrument in self._all:
            instrument.close()

    def wrapped(self, module: DistributedDataParallel, number: int) -> None:
        """Note that a module is being wrapped."""
        self._wrapped(module, number)

    def before_update(self, number: int, optimizer: Optimizer, update: int) -> None:
        """Note that an optimizer is about to make an update."""
        for act in self._always:
            act(number, optimizer, update)
        if update <= LAST_COUNT:
            for act in self._at_first:
                act(number, optimizer, update)
        if self._context.window.is_sparse(self._context.updates):
            self._now_and_then(optimizer)
            self._look_at_copies()

    def after_update(self, number: int) -> None:
        """Note that it has made it."""
        self._after(number)
        self._clipping.after_update()
