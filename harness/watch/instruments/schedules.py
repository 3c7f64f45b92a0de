"""Learning-rate schedulers: how often each is stepped between two updates, and when it ends."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch.optim import Optimizer, lr_scheduler

from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import Context
from harness.watch.instruments.patches import Patches

MOST = 64
"""Schedulers that are followed."""
_TOTALS = ("total_steps", "T_max", "total_iters")
"""Where torch's schedulers keep the step at which they end."""


class _Schedule:
    """One scheduler."""

    def __init__(self, scheduler: Any, at: str | None) -> None:
        self.reference = weakref.ref(scheduler)
        self.kind = type(scheduler).__name__
        self.at = at
        self.steps = 0
        """Since the last update."""
        self.last = 0
        self.total = next((n for t in _TOTALS if (n := getattr(scheduler, t, None))), None)
        self.optimizer: int | None = None
        self.per_update: Counter[int] = Counter()
        self.ends: int | None = None
        """The first update with a learning rate of 0, after one without."""
        self.above = False

    def event(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer,
            "class": self.kind,
            "at": self.at,
            "per_update": sorted(self.per_update.items()),
            "steps": self.last,
            "total": self.total,
            "zero_from": self.ends,
        }


class Schedules:
    """Observes every scheduler of torch's; others are not seen."""

    def __init__(self, context: Context) -> None:
        """Put functions around `step` wherever a class of torch's defines it."""
        self._context = context
        self._patches = Patches()
        self._known: dict[int, _Schedule] = {}
        self._updates: Counter[int] = Counter()
        stepped = context.safely("schedulers", self._stepped)
        for kind in vars(lr_scheduler).values():
            if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler):
                self._patches.around(kind, "step", before=stepped)

    def close(self) -> None:
        """Write what each of them did, and put torch's own functions back."""
        self._patches.close()
        for one in self._known.values():
            if one.optimizer is not None:
                updates = self._updates[one.optimizer]
                self._context.journal.write("schedule", updates=updates, **one.event())

    def before_update(self, number: int, optimizer: Optimizer, update: int) -> None:
        """Close the window between two updates of an optimizer."""
        self._updates[number] = update + 1
        if not update:
            made_with, rate = optimizer.defaults.get("lr"), optimizer.param_groups[0].get("lr")
            plain = isinstance(made_with, int | float) and isinstance(rate, int | float)
            if plain and made_with != rate:
                self._context.journal.write("rate", optimizer=number, made_with=made_with, lr=rate)
        if not self._known:
            return
        for one in self._known.values():
            scheduler = one.reference()
            if scheduler is None or getattr(scheduler, "optimizer", None) is not optimizer:
                continue
            one.optimizer = number
            if update:
                one.per_update[one.steps] += 1
            one.last += one.steps
            one.steps = 0
            rate = optimizer.param_groups[0].get("lr")
            # A tensor may be on a device, and asking for its value would wait for it.
            if isinstance(rate, int | float):
                if rate:
                    one.above, one.ends = True, None
                elif one.above and one.ends is None:
                    one.ends = update

    def _stepped(self, scheduler: Any, *_: Any, **__: Any) -> None:
        # Each takes its first step while it is being made.
        if not getattr(scheduler, "_step_count", 1):
            return
        one = self._known.get(id(scheduler))
        if one is None or one.reference() is not scheduler:
            if len(self._known) >= MOST:
                return
            one = self._known[id(scheduler)] = _Schedule(scheduler, call_site())
        one.steps += 1
