"""Random numbers drawn where a sample is read, such as for its augmentation; by workers, too.

Looked at in the first batch of a process of each pass over a loader: the state of every generator
before its samples are read and after, before they are put together. Reading a state draws nothing.
A worker that was forked has what was put around torch's functions here, and writes to the file of
its rank; one that was spawned knows nothing of all this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import Context
from harness.watch.instruments.patches import Patches
from harness.watch.instruments.random_state import random_state
from harness.watch.instruments.rows import whole_numbers

PASSES = 8
"""Passes of a process that are looked at."""
WORKERS = 4
"""Workers of a loader that are looked at."""
_INDICES = 16


class Draws:
    """Observes the first batch of each pass over data that has indices."""

    def __init__(self, context: Context) -> None:
        """Put functions around those that begin a pass, and that read a batch."""
        self._context = context
        self._patches = Patches()
        self._passes = 0
        self._about: dict[str, Any] | None = None
        """Of the pass that was begun last, until its first batch is read in this process."""
        self._reading: dict[str, Any] | None = None
        begun = context.safely("draws of loaders", self._begun)
        self._patches.around(_BaseDataLoaderIter, "__init__", after=begun)
        around = {"before": self._forked(self._before), "after": self._forked(self._after)}
        self._patches.around(_MapDatasetFetcher, "fetch", **around)

    def close(self) -> None:
        """Put torch's own functions back."""
        self._patches.close()

    def _begun(self, _: None, iterator: Any, loader: DataLoader[Any]) -> None:
        # Workers are forked after this.
        self._passes += 1
        self._about = None
        if self._passes <= PASSES and torch.is_grad_enabled():
            self._about = {
                "number": self._passes,
                "workers": loader.num_workers,
                "class": type(loader.dataset).__name__,
                "at": call_site(),
            }

    def _forked(self, act: Callable[..., None]) -> Callable[..., None]:
        def hook(*observed: Any) -> None:
            if self._about is None and self._reading is None:
                return
            # What fails in a worker is nobody's to tell: a look less.
            with contextlib.suppress(Exception):
                act(*observed)

        return hook

    def _before(self, fetcher: Any, indices: Any) -> None:
        about, self._about, self._reading = self._about, None, None
        worker = get_worker_info()
        if about is None or self._context.closed or (worker is not None and worker.id >= WORKERS):
            return
        many = indices if isinstance(indices, list | tuple) else [indices]
        about["worker"] = None if worker is None else worker.id
        about["indices"] = whole_numbers(many[:_INDICES])
        about["before"] = random_state()
        self._reading = about
        put_together = fetcher.collate_fn

        def collate(samples: Any) -> Any:
            # Numbers for a whole batch, such as its size, may be agreed on.
            fetcher.collate_fn = put_together
            about.setdefault("after", random_state())
            return put_together(samples)

        fetcher.collate_fn = collate

    def _after(self, *_: Any) -> None:
        about, self._reading = self._reading, None
        if about is not None and "after" in about:
            self._context.journal.write("draws", **about)
