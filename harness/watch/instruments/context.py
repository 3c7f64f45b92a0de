"""What every instrument gets: where to write, what it may ask, and protection from itself."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.nn.parallel import DistributedDataParallel

from harness.watch.instruments.compiling import is_compiling
from harness.watch.journal import Journal
from harness.watch.modules import Modules
from harness.watch.schedule import is_sparse

MOST = 16
"""Values of one name that are kept in a window."""
ALL_OF = 64
"""Updates of an optimizer whose windows are all written down."""


class Instrument(Protocol):
    """Observes one side of the program: made when torch has been imported, before the script."""

    def close(self) -> None:
        """Remove every hook."""


class Window:
    """What happened between two updates of this rank."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._counts: dict[str, int] = {}
        self._values: dict[str, list[Any]] = {}
        self._last: dict[str, Any] = {}
        self._before: dict[int, tuple[dict[str, int], dict[str, Any]]] = {}

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter, such as `backwards`."""
        self._counts[name] = self._counts.get(name, 0) + by

    def add(self, name: str, value: Any) -> None:
        """Append to a list, such as `losses`; only the first ones are kept."""
        values = self._values.get(name)
        if values is None:
            self._values[name] = [value]
        elif len(values) < MOST:
            values.append(value)

    def put(self, name: str, value: Any) -> None:
        """Set a value, such as that of the last one of many."""
        self._last[name] = value

    def has(self, name: str) -> bool:
        """Say whether a list has been begun."""
        return name in self._values

    def so_far(self) -> dict[str, int]:
        """Return what was counted since the last update."""
        return dict(self._counts)

    def is_sparse(self, update: int) -> bool:
        """Say whether this is one of the updates at which a look may cost something."""
        return is_sparse(update)

    def take(self, optimizer: int, update: int) -> dict[str, Any] | None:
        """Return what there is and start anew; None where it is what it was the update before."""
        counts, values, last = self._counts, self._values, self._last
        self._counts, self._values, self._last = {}, {}, {}
        as_before = self._before.get(optimizer) == (counts, last)
        self._before[optimizer] = counts, last
        if as_before and update >= ALL_OF and not self.is_sparse(update):
            return None
        return {**counts, **last, **values}


class Context:
    """What instruments share."""

    def __init__(self, journal: Journal, modules: Modules, note: Callable[[str], None]) -> None:
        """Share a journal, the modules that are known, and a way to say what failed."""
        self.journal = journal
        self.modules = modules
        self.window = Window()
        self.wrappers: dict[int, weakref.ref[DistributedDataParallel]] = {}
        """The wrappers that the program has made, by their numbers."""
        self.updates = 0
        """Updates that all optimizers have made so far."""
        self.closed = False
        self._note = note
        self._pid = os.getpid()
        self._failed: set[str] = set()

    def safely(self, name: str, act: Callable[..., None]) -> Callable[..., None]:
        """Return `act` such that it cannot harm: it raises nothing, and a compiler skips it.

        Args:
            name: the instrument; one that has failed is not called again.
            act: its return value is dropped.
        """

        def hook(*args: Any, **kwargs: Any) -> None:
            if is_compiling() or not self.allows(name):
                return
            try:
                act(*args, **kwargs)
            except Exception as error:
                self.failed(name, error)

        return hook

    def allows(self, name: str) -> bool:
        """Say whether an instrument may look."""
        # A forked process, such as a worker of a DataLoader, is not this rank.
        return not self.closed and name not in self._failed and os.getpid() == self._pid

    def failed(self, name: str, error: Exception) -> None:
        """Call an instrument no more, and say so in the answer."""
        self._failed.add(name)
        self._note(f"no longer observed: {name} ({type(error).__name__}: {error})")
