"""Samples that loaders hand out: which indices, in which order, and what lies at an index.

One event for each pass over a loader, written when the pass is over. Workers draw nothing here:
the indices are drawn in this process, and batches come back in the order in which they were drawn.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DistributedSampler, Subset
from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import Context
from harness.watch.instruments.patches import Patches
from harness.watch.instruments.rows import (
    Choice,
    attempt,
    batch_of,
    row_digests,
    whole_numbers,
)

MOST_INDICES = 512
MOST_PAIRS = 48
"""Indices of a pass whose content is looked at."""
MOST_PASSES = 256
"""Passes of a process that are followed; half of what the journal keeps of a kind."""
_NO_REFERENCE = object()
"""A list, for example, is known by its place in memory alone."""
_SAMPLER = ("num_replicas", "rank", "epoch", "seed", "shuffle", "drop_last", "total_size")


class _Pass:
    """One pass over a loader."""

    def __init__(self, about: dict[str, Any], dataset: Any) -> None:
        self.about = about
        self.dataset = dataset
        self.drawn: deque[list[int] | None] = deque()
        self.order = 0
        self.batches = self.count = self.shortest = self.longest = 0
        self.updates: Counter[int] = Counter()
        self.indices = Choice(MOST_INDICES)
        self.pairs = Choice(MOST_PAIRS)
        self.fresh = self.waiting = False
        self.numbers = True

    def got(self, batch: Any) -> None:
        indices = self.drawn.popleft() if self.drawn else None
        self.batches += 1
        self.fresh = True
        self.numbers = self.numbers and indices is not None
        if indices is None or not self.numbers:
            return
        size = len(indices)
        self.shortest = min(self.shortest or size, size)
        self.longest = max(self.longest, size)
        self.count += size
        # Of numbers, so the same in every process.
        self.order = hash((self.order, *indices))
        for place in self.indices.places(indices):
            self.indices.put(indices[place])
        looked_at = self.pairs.places(indices)
        if not looked_at or (rows := batch_of(batch, size)) is None or not rows.is_cpu:
            return
        for place, digest in zip(looked_at, row_digests(rows, looked_at), strict=True):
            self.pairs.put(indices[place], digest)

    def event(self) -> dict[str, Any]:
        about = self.about | {"batches": self.batches, "updates": dict(self.updates)}
        if not self.numbers:
            return about
        return about | {
            "count": self.count,
            "order": self.order,
            "batch_sizes": [self.shortest, self.longest],
            "indices": sorted(self.indices.kept),
            "every": self.indices.every,
            "content": sorted(self.pairs.kept.items()),
            "within": self._within(),
        }

    def _within(self) -> list[int] | None:
        """Return the chosen indices as those of the data set that a Subset is a part of."""
        part, indices = self.dataset(), list(self.indices.kept)
        if not isinstance(part, Subset) or self.indices.every > 1:
            return None
        while isinstance(part, Subset):
            own = part.indices
            indices = [int(own[index]) for index in indices]
            part = part.dataset
        return sorted(indices)


class Samples:
    """Observes every loader of the program."""

    def __init__(self, context: Context) -> None:
        """Put functions around those of torch's iterators."""
        self._context = context
        self._patches = Patches()
        self._passes: dict[int, _Pass] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._numbers: dict[str, list[tuple[int, Callable[[], Any]]]] = {}
        self._begun = 0
        safely, name = context.safely, "loaders"
        around, kind = self._patches.around, _BaseDataLoaderIter
        around(kind, "__init__", after=safely(name, self._made))
        around(kind, "_reset", after=safely(name, self._reset))
        around(kind, "_next_index", after=safely(name, self._drawn))
        around(
            kind, "__next__", before=safely(name, self._asked), after=safely(name, self._yielded)
        )

    def close(self) -> None:
        """Write what is left and put torch's own functions back."""
        self._patches.close()
        for key in list(self._passes):
            self._over(key)

    def after_update(self, number: int) -> None:
        """Count an update for the passes that its samples may have come from."""
        # One that was asked for more and had none is over.
        open_ = [one for one in self._passes.values() if one.fresh and not one.waiting]
        # A pass that was begun without gradients, and left in the middle, was an evaluation; unless
        # nobody here needs gradients.
        trains = [one for one in open_ if one.about["grad"]]
        for one in trains or open_:
            one.updates[number] += 1
            one.fresh = False

    def _made(self, _: None, iterator: Any, loader: DataLoader[Any]) -> None:
        key = id(iterator)
        self._references[key] = weakref.ref(iterator, lambda _: self._gone(key))
        self._begin(key, iterator, loader)

    def _reset(self, _: None, iterator: Any, loader: Any = None, *__: Any, **___: Any) -> None:
        known = self._passes.get(id(iterator))
        if known is not None and known.batches and loader is not None:
            self._over(id(iterator))
            self._begin(id(iterator), iterator, loader)

    def _drawn(self, indices: Any, iterator: Any) -> None:
        known = self._passes.get(id(iterator))
        if known is not None:
            many = indices if isinstance(indices, list | tuple) else [indices]
            known.drawn.append(whole_numbers(many))

    def _asked(self, iterator: Any) -> None:
        known = self._passes.get(id(iterator))
        if known is not None:
            known.waiting = True

    def _yielded(self, batch: Any, iterator: Any) -> None:
        known = self._passes.get(id(iterator))
        if known is not None:
            known.waiting = False
            known.got(batch)

    def _gone(self, key: int) -> None:
        self._references.pop(key, None)
        self._context.safely("loaders", self._over)(key)

    def _over(self, key: int) -> None:
        known = self._passes.pop(key, None)
        if known is not None and known.batches:
            self._context.journal.write("pass", **known.event())

    def _begin(self, key: int, iterator: Any, loader: DataLoader[Any]) -> None:
        self._begun += 1
        if self._begun > MOST_PASSES:
            return
        dataset, sampler = loader.dataset, loader.sampler
        about = {
            "number": self._begun,
            "began": self._context.updates,
            "loader": self._number("loader", loader),
            "dataset": self._number("dataset", dataset),
            "class": type(dataset).__name__,
            "length": attempt(lambda: len(dataset)),  # type: ignore[arg-type]
            "style": "iterable" if iterator._dataset_kind else "map",
            "sampler": type(sampler).__name__,
            "workers": loader.num_workers,
            "base_seed": iterator._base_seed,
            "at": call_site(),
            "grad": torch.is_grad_enabled(),
        }
        if isinstance(sampler, DistributedSampler):
            about |= {name: getattr(sampler, name, None) for name in _SAMPLER}
            about["samplers_length"] = attempt(lambda: len(sampler.dataset))  # type: ignore[arg-type]
        if isinstance(dataset, Subset):
            whole: Any = dataset
            while isinstance(whole, Subset):
                whole = whole.dataset
            about["part_of"] = self._number("dataset", whole)
            about["whole_length"] = attempt(lambda: len(whole))
        one = _Pass(about, attempt(lambda: weakref.ref(dataset)) or (lambda: None))
        one.numbers = getattr(loader, "in_order", True)
        self._passes[key] = one

    def _number(self, kind: str, thing: Any) -> int | None:
        """Return the same number for the same object, in the order in which they come by."""
        known = self._numbers.setdefault(kind, [])
        for number, (key, reference) in enumerate(known):
            if key == id(thing) and _is(reference(), thing):
                return number
        if len(known) >= MOST_PASSES:
            return None
        known.append((id(thing), attempt(lambda: weakref.ref(thing)) or (lambda: _NO_REFERENCE)))
        return len(known) - 1


def _is(referred: Any, thing: Any) -> bool:
    return referred is thing or referred is _NO_REFERENCE
