"""The watcher of one rank: torch's own optimizer hooks in, digests and findings out.

It must not be able to harm: every entry point catches what goes wrong inside, says so once on
stderr, and stops observing.
"""

from __future__ import annotations

import fnmatch
import os
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from harness.causes import diagnose
from harness.watch.answers.answer import Answer
from harness.watch.answers.gathering import gather
from harness.watch.digests.pending import Pending
from harness.watch.divergence import Divergence, at_evaluation, divergence, to_json
from harness.watch.evaluation import Evaluated, Evaluations
from harness.watch.exit_codes import FAULT_FOUND
from harness.watch.hangs.stall import Stall
from harness.watch.instruments import Instruments
from harness.watch.instruments.compiling import is_compiling
from harness.watch.instruments.context import Context
from harness.watch.journal import Journal
from harness.watch.layout import EVALUATION, GRADIENTS, PARAMETERS, index_of
from harness.watch.meeting.exchange import Exchange
from harness.watch.meeting.folder import Folder, meeting_place, process_began
from harness.watch.meeting.hosts import ranks_here
from harness.watch.meeting.ring import KEPT
from harness.watch.meeting.whereabouts import Whereabouts
from harness.watch.modules import Modules, parameters_of
from harness.watch.stream import AVERAGING, Stream

if TYPE_CHECKING:
    from harness.watch.audit.auditor import Auditor
    from harness.watch.twin.recorder import Recorder

MOST = 64
"""Optimizers that are followed; each has a file of its own."""


WATCHERS: dict[int, Watcher] = {}
"""Process -> its watcher: two of them would write to the same files."""


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


class Watcher:
    """Observes all optimizers of this process."""

    def __init__(
        self,
        *,
        folder: str | None = None,
        hang_timeout: float | None = None,
        unequal: Sequence[str] = (),
    ) -> None:
        """Register torch's global hooks; nothing else of the program is touched.

        Args:
            folder: one that all hosts share; the default is a temporary one of this host.
            hang_timeout: seconds after which a run that is stuck is ended; None leaves it to torch.
            unequal: patterns of names of parameters that differ between ranks on purpose.
        """
        self._chosen = folder
        self._unequal = tuple(unequal)
        self.folder: Folder | None = None
        self.rank = 0
        self.world_size = 1
        self.peers: list[int] = [0]
        self.found: Divergence | None = None
        self.notes: list[str] = []
        self.failed: str | None = None
        self.journal = Journal()
        self._pid = os.getpid()
        self._observed: list[_Observed] = []
        self.whereabouts: Whereabouts | None = None
        self._running: list[Optimizer] = []
        self._exchanges: dict[str, Exchange] = {}
        self._wrapped: list[weakref.ref[DistributedDataParallel]] = []
        self.modules = Modules(self._guard(self._watch_wrapped))
        self.recorder: Recorder | None = None
        self.auditor: Auditor | None = None
        self.context = Context(self.journal, self.modules, self.note)
        self.instruments = Instruments(self.context)
        self._evaluations = Evaluations(self.context, self._guard(self._at_evaluation))
        self._handles = [
            register_optimizer_step_pre_hook(self._guard(self._before_step)),
            register_optimizer_step_post_hook(self._guard(self._after_step)),
        ]
        self.stall = Stall(self, hang_timeout)

    def close(self) -> None:
        """Remove the hooks, once what was read on a GPU has arrived."""
        self._guard(self._finish)()
        if self.whereabouts is not None:
            self._guard(self.whereabouts.close)()
        self.stall.close()
        self.context.closed = True
        if self.recorder is not None:
            self.recorder.close()
        if self.auditor is not None:
            self.auditor.close()
        self.instruments.close()
        self.modules.close()
        for handle in self._handles:
            handle.remove()
        self._evaluations.close()

    def meet(self) -> None:
        """Find out which rank this is, and where the others write."""
        if self.folder is not None:
            return
        initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if initialised:
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.rank, self.world_size = rank, world_size
        alone = not initialised and "RANK" not in os.environ
        # Whoever has nobody to meet takes no place where an earlier run of the same shell has been.
        token = self._token() if initialised else _myself() if alone else None
        self.folder = meeting_place(self._chosen, token)
        here = ranks_here(os.environ, rank, world_size)
        everyone = list(range(world_size))
        self.peers = everyone if self._chosen or here is None else list(here)
        about = {
            "pid": os.getpid(),
            "began": process_began(os.getpid()),
            "host": socket.gethostname(),
            "world_size": world_size,
        }
        self.folder.write(self.folder.start(rank), about)
        self.journal.open(self.folder.journal(rank))
        # The ranks of one torchrun have one parent, and its temp directory.
        if here != tuple(everyone) or (world_size > 1 and "TORCHELASTIC_RUN_ID" not in os.environ):
            self.whereabouts = Whereabouts(self, here, self._chosen)

    @property
    def compares_evaluations(self) -> bool:
        """Whether a module was evaluated on this rank, and compared then."""
        return bool(self._exchanges)

    def narrow(self, peers: Sequence[int]) -> None:
        """Take these for the ranks that share the folder, and compare again what they wrote."""
        self.peers = list(peers)
        for exchange in self._exchanges.values():
            exchange.narrow(peers)
        for one in self._observed:
            if one.exchange is not None:
                one.exchange.narrow(peers)
                self._compare(one, list(range(min(KEPT, 2 * one.updates + 2))))

    def announce(self, found: Divergence, source: str) -> None:
        """Say what was found between this place and others."""
        if self.folder is not None and self.folder.claim("announced"):
            say(self._so_far(found, source))

    def note(self, text: str) -> None:
        """Keep a sentence on what could not be observed."""
        if text not in self.notes:
            self.notes.append(text)

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
        assert self.folder is not None
        return Exchange(self.folder, f"optimizer{number}", self.peers)

    def _token(self) -> str | None:
        """Agree on a word with the other ranks, without waiting for them.

        torchrun is the parent of one run only, so its ranks have no need of it for the folder
        that is theirs. Whoever starts ranks with mp.spawn may do so again.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ and self._chosen is None:
            return None
        default_store = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
        if default_store is None:
            return None
        # The first rank to ask sets it, the others get what is set.
        agreed = default_store().compare_set("crossrank/watch", "", secrets.token_hex(8))
        return str(agreed.decode())

    def wait_for_peers(self, seconds: float) -> None:
        """Wait until the other ranks of this host have gone, at most so long.

        torchrun ends all ranks as soon as one exits with anything but 0, and a rank may still
        have to finish what it does at exit.
        """
        if self.folder is None:
            return
        deadline = time.monotonic() + seconds
        for peer in self.peers:
            about = self.folder.read(self.folder.start(peer))
            if peer == self.rank or not about or about["host"] != socket.gethostname():
                continue
            alive = about["began"]
            while alive and process_began(about["pid"]) == alive and time.monotonic() < deadline:
                time.sleep(0.02)

    def _guard(self, act: Callable[..., None]) -> Callable[..., None]:
        def hook(*observed: Any) -> None:
            # A compiler would trace what is below into the user's graph.
            if is_compiling() or self.failed or os.getpid() != self._pid:
                return
            try:
                act(*observed)
            except Exception as error:
                self.failed = f"{type(error).__name__}: {error}"
                say(f"rank {self.rank} stopped watching, the training goes on: {self.failed}")

        return hook

    def _before_step(self, optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
        if optimizer in self._running:
            # Its last step raised, so that no hook was told of the end.
            self._running.clear()
        self._running.append(optimizer)
        if len(self._running) > 1:
            # Stepped by another optimizer, which is the one that leaves replicas equal.
            return
        self.meet()
        observed = self._observe(optimizer)
        # With a closure the forward and backward passes are made inside of the step.
        observed.closure = any(
            one is not None for one in (*args[1:2], (kwargs or {}).get("closure"))
        )
        self.instruments.before_update(observed.number, optimizer, observed.updates)
        if self.recorder is not None:
            self.recorder.begin(self.rank, self.world_size)
            if not observed.closure:
                self.recorder.before_update(observed.number, optimizer, observed.updates)
        if self.auditor is not None and self.folder is not None:
            self.auditor.before_update(
                observed.number,
                optimizer,
                observed.updates,
                folder=self.folder,
                rank=self.rank,
                peers=self.peers,
                world_size=self.world_size,
            )
        if self.world_size == 1:
            return
        if observed.averages:
            return
        if observed.kind in AVERAGING:
            self.note(f"{observed.kind}: replicas differ on purpose between averages; not compared")
            return
        if observed.stream is None or observed.stream.changed():
            held = parameters_of(optimizer)
            known = {
                key: replace(one, sharded=True) if self._is_unequal(one.name) else one
                for key, one in self.modules.known(held).items()
            }
            observed.stream = Stream(optimizer, known, self.rank)
            self.instruments.described(
                observed.number, optimizer, observed.updates, observed.stream.held
            )
            observed.stream.changed()
            if self.instruments.averages(observed.number):
                observed.averages, observed.stream = True, None
                self.note("model averaging: replicas differ on purpose in between; not compared")
                return
            if observed.exchange is None:
                observed.exchange = self.exchange_of(observed.number)
            if not observed.exchange.declare(self.rank, observed.stream.layout()):
                self.note(f"{observed.kind}: more parameters were added than can be followed")
                observed.stream, observed.exchange = None, None
                raise RuntimeError("too many parameters were added to an optimizer")
        if observed.updates == 0:
            self._post(observed, 0, observed.stream.start())
        if not observed.closure:
            self._post_gradients(observed)

    def _is_unequal(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._unequal)

    def _post_gradients(self, observed: _Observed) -> None:
        assert observed.stream is not None
        index = index_of(observed.updates, GRADIENTS)
        digests = observed.stream.before(observed.updates)
        if digests is not None:
            self._post(observed, index, digests)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not any(running is optimizer for running in self._running):
            return
        outermost = self._running[0] is optimizer
        del self._running[next(i for i, o in enumerate(self._running) if o is optimizer) :]
        if not outermost:
            return
        observed = self._observe(optimizer)
        self.instruments.after_update(observed.number, optimizer, observed.updates)
        if self.recorder is not None:
            if observed.closure:
                self.recorder.before_update(observed.number, optimizer, observed.updates)
            self.recorder.after_update(observed.number, optimizer, observed.updates)
        if self.auditor is not None:
            self.auditor.after_update(observed.number, observed.updates)
        if observed.stream is not None:
            if observed.closure:
                self._post_gradients(observed)
            gradients, parameters = observed.stream.after(observed.updates)
            if gradients is not None:
                self._post(observed, index_of(observed.updates, GRADIENTS), gradients)
            self._post(observed, index_of(observed.updates, PARAMETERS), parameters)
        observed.updates += 1

    def _observe(self, optimizer: Optimizer) -> _Observed:
        for one in self._observed:
            if one.reference() is optimizer:
                return one
        self._observed.append(_Observed(len(self._observed), optimizer))
        if len(self._observed) > MOST:
            raise RuntimeError(f"the script makes new optimizers again and again, {MOST} so far")
        return self._observed[-1]

    def _watch_wrapped(self, module: DistributedDataParallel, inner: torch.nn.Module) -> None:
        # The process group may be gone by the time of the answer.
        self.meet()
        known = any(wrapped() is module for wrapped in self._wrapped)
        if not known and len(self._wrapped) < MOST:
            self.instruments.wrapped(module, inner, len(self._wrapped))
            if self.auditor is not None:
                self.auditor.wrapped(inner)
            self._evaluations.wrapped(module, inner, len(self._wrapped))
            self._wrapped.append(weakref.ref(module))

    def _at_evaluation(self, one: Evaluated) -> None:
        self.meet()
        assert self.folder is not None
        updates = sum(observed.updates for observed in self._observed)
        if self.world_size == 1 or not one.is_due(updates):
            return
        before, digests = one.entries, one.digests()
        exchange = self._exchanges.get(one.stream)
        if exchange is None:
            exchange = Exchange(self.folder, one.stream, self.peers, EVALUATION)
            self._exchanges[one.stream] = exchange
        if one.entries != before and not exchange.declare(self.rank, one.layout()):
            return
        exchange.post(updates, digests)
        if self.found is None and exchange.all_equal(updates) is False:
            self._report(at_evaluation(exchange.look(updates), updates), one.source)

    def _post(self, observed: _Observed, index: int, digests: list[int] | Pending) -> None:
        assert observed.exchange is not None
        self._compare(observed, observed.exchange.post(index, digests))
        if self.whereabouts is not None:
            stream, source = f"optimizer{observed.number}", self._source(observed)
            self.whereabouts.posted(stream, index, source)

    def _finish(self, *_: Any) -> None:
        for observed in self._observed:
            if observed.exchange is not None:
                self._compare(observed, observed.exchange.finish())

    def _compare(self, observed: _Observed, indices: list[int]) -> None:
        exchange = observed.exchange
        assert exchange is not None
        for index in indices:
            # The last rank to come sees all others; the ones before it have nothing to wait for.
            if self.found is None and exchange.all_equal(index) is False:
                found = divergence(exchange.look, index)
                self._report(found, self._source(observed))

    def _source(self, observed: _Observed) -> str:
        return f"optimizer {observed.number} ({observed.kind})"

    def _report(self, found: Divergence | None, source: str) -> None:
        if found is None:
            return
        assert self.folder is not None
        self.found = found
        self.journal.flush()
        content = {"source": source, "found": to_json(found)}
        self.folder.write(self.folder.finding(self.rank), content)
        self.announce(found, source)

    def _so_far(self, found: Divergence, source: str) -> str:
        """Return the first line of the answer, as far as it can be known in the middle of a run."""
        assert self.folder is not None
        evidence = gather(self.folder, self.peers, self.world_size, divergence=found, source=source)
        return Answer(
            exit_code=FAULT_FOUND, first="", divergence=found, diagnoses=tuple(diagnose(evidence))
        ).headline


def _myself() -> str:
    """Return a word that no other process has, nor has had."""
    return f"process {os.getpid()} {process_began(os.getpid())}"


def say(text: str) -> None:
    """Print one line on stderr, where it does not mix with what the script prints."""
    # One write: the ranks share a stream, and lines of two ranks must not run into each other.
    sys.stderr.write(f"crossrank: {text}\n")
    sys.stderr.flush()
