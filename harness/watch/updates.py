"""The updates of this process: digests before and after each, compared with what peers wrote."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from harness.watch.digests.pending import Pending
from harness.watch.divergence import NOT_ALIKE, Divergence, Seen, divergence, not_alike
from harness.watch.instruments import Instruments
from harness.watch.layout import GRADIENTS, PARAMETERS, index_of
from harness.watch.meeting.exchange import Exchange
from harness.watch.meeting.presence import Presence
from harness.watch.meeting.ring import KEPT
from harness.watch.modules import Modules, parameters_of
from harness.watch.naming import ranks
from harness.watch.stream import AVERAGING, Stream

if TYPE_CHECKING:
    from harness.watch.audit.auditor import Auditor
    from harness.watch.twin.recorder import Recorder

MOST = 64
"""Optimizers that are followed; each has a file of its own."""
Posted = Callable[[str, int, str], None]
"""Called with the stream, the index and the optimizer after each thing written."""


class _Observed:
    """An optimizer with the number of its updates."""

    def __init__(self, number: int, optimizer: Optimizer) -> None:
        self.number = number
        self.kind = type(optimizer).__name__
        self.reference = weakref.ref(optimizer)
        self.updates = 0
        self.stream: Stream | None = None
        self.exchange: Exchange | None = None
        self.closure = False
        self.averages = False

    @property
    def source(self) -> str:
        """What it is called in an answer."""
        return f"optimizer {self.number} ({self.kind})"


class Updates:
    """Observes all optimizers of this process."""

    def __init__(
        self,
        presence: Presence,
        modules: Modules,
        instruments: Instruments,
        *,
        unequal: Sequence[str],
        whole: bool,
        on_found: Callable[[Divergence, str], None],
    ) -> None:
        """Wait for the first update.

        Args:
            presence: this rank among the others.
            modules: those that the program has built, for the names of parameters.
            instruments: they are told of each update.
            unequal: patterns of names of parameters that differ between ranks on purpose.
            whole: read all of a large tensor at every update.
            on_found: called with a difference, and the optimizer; it sets `decided`.
        """
        self._presence = presence
        self._modules = modules
        self._instruments = instruments
        self._unequal = tuple(unequal)
        self._whole = whole
        self._on_found = on_found
        self.decided = False
        """Whether a difference was found, so that there is nothing left to compare."""
        self._observed: list[_Observed] = []
        self._running: list[Optimizer] = []
        self.recorder: Recorder | None = None
        self.auditor: Auditor | None = None
        self.posted: Posted | None = None

    @property
    def count(self) -> int:
        """How many updates all optimizers have made."""
        return sum(one.updates for one in self._observed)

    def finish(self) -> None:
        """Compare what a GPU still owes, waiting for it."""
        for one in self._observed:
            if one.exchange is not None:
                self._compare(one, one.exchange.finish())

    def summary(self) -> list[dict[str, Any]]:
        """Return what was observed of each optimizer."""
        return [
            {
                "kind": one.kind,
                "updates": one.updates,
                "parameters": one.stream.parameters if one.stream else 0,
                "sharded": one.stream.sharded if one.stream else 0,
            }
            for one in self._observed
        ]

    def exchange_of(self, number: int) -> Exchange:
        """Return a fresh view on what all ranks wrote about an optimizer."""
        assert self._presence.folder is not None
        return Exchange(self._presence.folder, f"optimizer{number}", self._presence.peers)

    def narrow(self, peers: Sequence[int]) -> None:
        """Leave out ranks that turned out to write elsewhere, and compare again what is left."""
        for one in self._observed:
            if one.exchange is not None:
                one.exchange.narrow(peers)
                self._compare(one, list(range(min(KEPT, 2 * one.updates + 2))))

    def before(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        """Look at settings and gradients; torch calls it before every step of any optimizer."""
        if optimizer in self._running:
            # Its last step raised, so that no hook was told of the end.
            self._running.clear()
        self._running.append(optimizer)
        if len(self._running) > 1:
            # Stepped by another optimizer, which is the one that leaves replicas equal.
            return
        observed = self._observe(optimizer)
        if observed is None:
            return
        # With a closure the forward and backward passes are made inside of the step.
        observed.closure = any(
            one is not None for one in (*args[1:2], (kwargs or {}).get("closure"))
        )
        self._instruments.before_update(observed.number, optimizer, observed.updates)
        self._tell(observed, optimizer)
        if self._presence.world_size == 1 or observed.averages:
            return
        if observed.kind in AVERAGING:
            self._presence.note(
                f"{observed.kind}: replicas differ on purpose between averages; not compared"
            )
            return
        if observed.stream is None or observed.stream.changed():
            self._take_stock(observed, optimizer)
        if observed.stream is None:
            return
        if observed.updates == 0:
            self._post(observed, 0, observed.stream.start())
        if not observed.closure:
            self._post_gradients(observed, observed.stream)

    def after(self, optimizer: Optimizer) -> None:
        """Look at the parameters; torch calls it after every step that has not raised."""
        if not any(running is optimizer for running in self._running):
            return
        outermost = self._running[0] is optimizer
        del self._running[next(i for i, o in enumerate(self._running) if o is optimizer) :]
        if not outermost:
            return
        observed = self._observe(optimizer)
        if observed is None:
            return
        self._instruments.after_update(observed.number, optimizer, observed.updates)
        if self.recorder is not None:
            if observed.closure:
                self.recorder.before_update(observed.number, optimizer, observed.updates)
            self.recorder.after_update(observed.number, optimizer, observed.updates)
        if self.auditor is not None:
            self.auditor.after_update(observed.number, observed.updates)
        stream = observed.stream
        if stream is not None:
            if observed.closure:
                self._post_gradients(observed, stream)
            gradients, parameters = stream.after(observed.updates)
            if gradients is not None:
                self._post(observed, index_of(observed.updates, GRADIENTS), gradients)
            self._post(observed, index_of(observed.updates, PARAMETERS), parameters)
        observed.updates += 1

    def _observe(self, optimizer: Optimizer) -> _Observed | None:
        """Return what is known of an optimizer; None for one too many."""
        for one in self._observed:
            if one.reference() is optimizer:
                return one
        if len(self._observed) == MOST:
            self._presence.note(f"only the first {MOST} optimizers of the script were followed")
            return None
        self._observed.append(_Observed(len(self._observed), optimizer))
        return self._observed[-1]

    def _tell(self, observed: _Observed, optimizer: Optimizer) -> None:
        """Tell those that were asked for beyond what is always observed."""
        presence = self._presence
        if self.recorder is not None:
            self.recorder.begin(presence.rank, presence.world_size)
            if not observed.closure:
                self.recorder.before_update(observed.number, optimizer, observed.updates)
        if self.auditor is not None and presence.folder is not None:
            self.auditor.before_update(
                observed.number,
                optimizer,
                observed.updates,
                folder=presence.folder,
                rank=presence.rank,
                peers=presence.peers,
                world_size=presence.world_size,
            )

    def _take_stock(self, observed: _Observed, optimizer: Optimizer) -> None:
        """Read which parameters and settings there are, and say so to the peers."""
        held = parameters_of(optimizer)
        known = {
            key: replace(one, sharded=True) if self._is_unequal(one.name) else one
            for key, one in self._modules.known(held).items()
        }
        observed.stream = stream = Stream(optimizer, known, self._presence.rank, whole=self._whole)
        self._instruments.described(observed.number, optimizer, observed.updates, stream.held)
        stream.changed()
        if self._instruments.averages(observed.number):
            observed.averages, observed.stream = True, None
            self._presence.note(
                "model averaging: replicas differ on purpose in between; not compared"
            )
            return
        if observed.exchange is None:
            observed.exchange = self.exchange_of(observed.number)
        if not observed.exchange.declare(self._presence.rank, stream.layout()):
            self._presence.note(f"{observed.kind}: more parameters were added than can be followed")
            observed.stream, observed.exchange = None, None
            raise RuntimeError("too many parameters were added to an optimizer")

    def _is_unequal(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._unequal)

    def _post_gradients(self, observed: _Observed, stream: Stream) -> None:
        digests = stream.before(observed.updates)
        if digests is not None:
            self._post(observed, index_of(observed.updates, GRADIENTS), digests)

    def _post(self, observed: _Observed, index: int, digests: list[int] | Pending) -> None:
        assert observed.exchange is not None
        self._compare(observed, observed.exchange.post(index, digests))
        if self.posted is not None:
            self.posted(f"optimizer{observed.number}", index, observed.source)

    def _compare(self, observed: _Observed, indices: list[int]) -> None:
        exchange = observed.exchange
        assert exchange is not None
        for index in indices:
            # The last rank to come sees all others; the ones before it have nothing to wait for.
            if not self.decided and exchange.all_equal(index) is False:
                if index == 0:
                    self._note_methods(exchange.look(index))
                found = divergence(exchange.look, index)
                if found is not None:
                    self._on_found(found, observed.source)

    def _note_methods(self, start: Seen) -> None:
        apart = not_alike(start)
        if apart:
            others = ranks([rank for rank in start if rank not in apart])
            self._presence.note(f"{others}: not compared with {ranks(apart)}: {NOT_ALIKE}")
