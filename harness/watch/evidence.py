"""All that the ranks have written, as the rules of the causes read it. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.watch.divergence import Divergence
from harness.watch.hangs.pairing import Calls, Unpaired
from harness.watch.journal import Event


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a run when a diagnosis is asked for."""

    world_size: int
    ranks: tuple[int, ...]
    """The ranks whose journals could be read."""
    journals: Mapping[int, Sequence[Event]]
    """Rank -> its events, in the order in which they happened."""
    divergence: Divergence | None = None
    """Where replicas part, if they do."""
    source: str = ""
    """The optimizer or module in which they part, such as `optimizer 0 (SGD)`."""
    parts: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Optimizer -> names of its tensors that were never replicas: not equal to begin with."""
    made_equal: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Optimizer -> later ones of the same parameters, which were equal on all ranks by then."""
    ends: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rank -> how its script ended: exit code, optimizers, notes; absent if it has not."""
    stalls: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rank -> what it was doing when the run hung or a peer was gone."""
    gone: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rank -> when its process was found to be gone without having ended."""
    calls: Mapping[int, Calls] = field(default_factory=dict)
    """Rank -> its last collectives, when it ended or the run hung."""
    last_calls: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rank -> the collective that its own code called last, also if it was killed in it."""
    unpaired: Unpaired | None = None
    """The first collective that does not fit on all ranks."""

    def events(self, kind: str, rank: int | None = None) -> Iterator[Event]:
        """Yield the events of a kind, of one rank or of all, each with its `rank` added."""
        for of, events in sorted(self.journals.items()):
            if rank is None or of == rank:
                yield from (event | {"rank": of} for event in events if event["kind"] == kind)

    def updates(self, rank: int, optimizer: int | None = None) -> Iterator[Event]:
        """Yield what happened between two updates, update by update."""
        for event in self.events("update", rank):
            if optimizer is None or event["optimizer"] == optimizer:
                yield event

    def update(self, rank: int, optimizer: int, update: int) -> Event | None:
        """Return the window that ended with an update of an optimizer, if it was written down.

        A window that was the same as the one before it is not written again.
        """
        found = None
        for event in self.updates(rank, optimizer):
            if event["update"] > update:
                break
            found = event
        return found

    def latest(self, kind: str, rank: int, optimizer: int, update: int) -> Event | None:
        """Return the last event of a kind about an optimizer up to one of its updates."""
        found = None
        for event in self.events(kind, rank):
            if event["optimizer"] == optimizer and event["update"] <= update:
                found = event
        return found

    @property
    def optimizer(self) -> int | None:
        """The number of the optimizer in which replicas part."""
        words = self.source.split()
        return int(words[1]) if words[:1] == ["optimizer"] else None

    def at_divergence(self) -> dict[int, Event]:
        """Return rank -> its window of the update in which replicas part."""
        if self.divergence is None or self.optimizer is None:
            return {}
        found = {
            rank: self.update(rank, self.optimizer, self.divergence.step) for rank in self.ranks
        }
        return {rank: event for rank, event in found.items() if event is not None}
