"""The watcher of one rank: torch's own optimizer hooks in, digests and findings out.

It must not be able to harm: every entry point catches what goes wrong inside, says so once on
stderr, and stops observing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from harness.causes import diagnose
from harness.causes.by_hand import NEVER_AVERAGED
from harness.watch.answers.answer import Answer
from harness.watch.answers.gathering import gather
from harness.watch.divergence import Divergence, at_evaluation, to_json
from harness.watch.evaluation import Evaluated, Evaluations
from harness.watch.exit_codes import FAULT_FOUND
from harness.watch.hangs.stall import Stall
from harness.watch.instruments import Instruments
from harness.watch.instruments.compiling import is_compiling
from harness.watch.instruments.context import ALL_OF, Context
from harness.watch.journal import Journal
from harness.watch.layout import EVALUATION
from harness.watch.meeting.exchange import Exchange
from harness.watch.meeting.folder import Folder
from harness.watch.meeting.presence import Presence
from harness.watch.meeting.whereabouts import Whereabouts
from harness.watch.modules import Modules
from harness.watch.stderr import say
from harness.watch.updates import MOST, Updates

WATCHERS: dict[int, Watcher] = {}
"""Process -> its watcher: two of them would write to the same files."""


class Watcher:
    """Observes all optimizers of this process."""

    def __init__(
        self,
        *,
        folder: str | None = None,
        hang_timeout: float | None = None,
        unequal: Sequence[str] = (),
        whole: bool = False,
    ) -> None:
        """Register torch's global hooks; nothing else of the program is touched.

        Args:
            folder: one that all hosts share; the default is a temporary one of this host.
            hang_timeout: seconds after which a run that is stuck is ended; None leaves it to torch.
            unequal: patterns of names of parameters that differ between ranks on purpose.
            whole: read all of a large tensor at every update, not samples or parts.
        """
        self.presence = Presence(folder)
        self.found: Divergence | None = None
        self.failed: str | None = None
        self.journal = Journal()
        self._pid = os.getpid()
        self.whereabouts: Whereabouts | None = None
        self._evaluated: dict[str, Exchange] = {}
        self._kept_back: str | None = None
        self._wrapped: list[weakref.ref[DistributedDataParallel]] = []
        self.modules = Modules(self._guard(self._watch_wrapped))
        self.context = Context(self.journal, self.modules, self.presence.note)
        self.instruments = Instruments(self.context)
        self.updates = Updates(
            self.presence,
            self.modules,
            self.instruments,
            unequal=unequal,
            whole=whole,
            on_found=self._report,
        )
        self._evaluations = Evaluations(self.context, self._guard(self._at_evaluation))
        self._handles = [
            register_optimizer_step_pre_hook(self._guard(self._before_step)),
            register_optimizer_step_post_hook(self._guard(self._after_step)),
        ]
        self.stall = Stall(self.presence, self.context, self.meet, self.account, hang_timeout)

    @property
    def folder(self) -> Folder | None:
        """Where all ranks write; None before the first of them is known."""
        return self.presence.folder

    @property
    def rank(self) -> int:
        """This one."""
        return self.presence.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.presence.world_size

    @property
    def peers(self) -> list[int]:
        """The ranks that write to the same folder."""
        return self.presence.peers

    @property
    def notes(self) -> list[str]:
        """What could not be observed."""
        return self.presence.notes

    def close(self) -> None:
        """Remove the hooks, once what was read on a GPU has arrived."""
        self._guard(self.updates.finish)()
        if self.whereabouts is not None:
            self._guard(self.whereabouts.close)()
        self.stall.close()
        self.context.closed = True
        for one in (self.updates.recorder, self.updates.auditor):
            if one is not None:
                one.close()
        self.instruments.close()
        self.modules.close()
        for handle in self._handles:
            handle.remove()
        self._evaluations.close()

    def meet(self) -> None:
        """Find out which rank this is, and where the others write."""
        presence = self.presence
        if not presence.meet():
            return
        assert presence.folder is not None
        self.journal.open(presence.folder.journal(presence.rank))
        if presence.may_be_apart:
            self.whereabouts = Whereabouts(presence, self._narrow, self._announce)
            self.updates.posted = self.whereabouts.posted

    def account(self) -> dict[str, Any]:
        """Return what this rank says of itself at its end."""
        return {
            "optimizers": self.updates.summary(),
            "notes": self.notes,
            "failed": self.failed,
        }

    def _narrow(self, peers: Sequence[int]) -> None:
        """Take these for the ranks that share the folder, and compare again what they wrote."""
        self.presence.peers = list(peers)
        for exchange in self._evaluated.values():
            exchange.narrow(peers)
        self.updates.narrow(peers)

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
        self.meet()
        self.updates.before(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.updates.after(optimizer)
        if self._kept_back is not None and self.context.updates >= ALL_OF:
            kept, self._kept_back = self._kept_back, None
            if not self.instruments.sees_averages:
                say(kept)

    def _watch_wrapped(self, module: DistributedDataParallel, inner: torch.nn.Module) -> None:
        # The process group may be gone by the time of the answer.
        self.meet()
        known = any(wrapped() is module for wrapped in self._wrapped)
        if not known and len(self._wrapped) < MOST:
            self.instruments.wrapped(module, inner, len(self._wrapped))
            if self.updates.auditor is not None:
                self.updates.auditor.wrapped(inner)
            self._evaluations.wrapped(module, inner, len(self._wrapped))
            self._wrapped.append(weakref.ref(module))

    def _at_evaluation(self, one: Evaluated) -> None:
        self.meet()
        assert self.folder is not None
        updates = self.updates.count
        if self.world_size == 1 or not one.is_due(updates):
            return
        before, digests = one.entries, one.digests()
        exchange = self._evaluated.get(one.stream)
        if exchange is None:
            exchange = Exchange(self.folder, one.stream, self.peers, EVALUATION)
            self._evaluated[one.stream] = exchange
            self.presence.evaluates = True
        if one.entries != before and not exchange.declare(self.rank, one.layout()):
            return
        exchange.post(updates, digests)
        if self.found is None and exchange.all_equal(updates) is False:
            found = at_evaluation(exchange.look(updates), updates)
            if found is not None:
                self._report(found, one.source)

    def _report(self, found: Divergence, source: str) -> None:
        assert self.folder is not None
        self.found, self.updates.decided = found, True
        self.journal.flush()
        content = {"source": source, "found": to_json(found)}
        self.folder.write(self.folder.finding(self.rank), content)
        self._announce(found, source)

    def _announce(self, found: Divergence, source: str) -> None:
        """Say what was found between this place and others, unless it may be on purpose."""
        if self.folder is None or not self.folder.claim("announced"):
            return
        evidence = gather(self.folder, self.peers, self.world_size, divergence=found, source=source)
        diagnoses = tuple(diagnose(evidence))
        answer = Answer(exit_code=FAULT_FOUND, first="", divergence=found, diagnoses=diagnoses)
        # As far as it can be known in the middle of a run.
        if any(one.cause == NEVER_AVERAGED for one in diagnoses):
            # Weights may be averaged every few updates instead, which will show.
            self._kept_back = answer.headline
        else:
            say(answer.headline)
