"""Gradients that part: of which parameters, below which wrapper, in which windows. No cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.watch.divergence import Difference
from harness.watch.evidence import Evidence
from harness.watch.journal import Event
from harness.watch.layout import GRADIENTS


@dataclass(frozen=True)
class Owned:
    """A parameter of an optimizer, and the wrapper that it is below."""

    name: str
    module: int | None
    """Number of the wrapper, or None."""
    was: str
    """What it was to the wrapper when it was made: synchronised, frozen, ignored or absent."""


@dataclass(frozen=True)
class Unequal:
    """What is known about an update whose gradients were not equal on all ranks."""

    evidence: Evidence
    optimizer: int
    step: int
    differences: Sequence[Difference]
    compared: int

    @property
    def names(self) -> list[str]:
        """The parameters concerned, in the order in which backward reaches them."""
        return [one.name for one in self.differences]

    @cached_property
    def held(self) -> Mapping[str, Owned]:
        """All parameters of the optimizer, by name."""
        rank = self.evidence.ranks[0]
        event = self.evidence.latest("optimizer", rank, self.optimizer, self.step)
        rows = event["parameters"] if event else ()
        return {name: Owned(name, module, was) for name, module, was, *_ in rows}

    @property
    def parts(self) -> int:
        """How many parameters of the optimizer are DTensors of which each rank holds a part."""
        rank = self.evidence.ranks[0]
        event = self.evidence.latest("optimizer", rank, self.optimizer, self.step)
        return int(event.get("parts", 0)) if event else 0

    @property
    def owned(self) -> list[Owned]:
        """Those of the parameters concerned that are below a wrapper."""
        known = [self.held[name] for name in self.names if name in self.held]
        return [one for one in known if one.module is not None]

    @property
    def modules(self) -> list[int]:
        """Numbers of the wrappers concerned."""
        return list(dict.fromkeys(one.module for one in self.owned if one.module is not None))

    @property
    def hooked(self) -> int | None:
        """The wrapper of the first parameter concerned that has a hook of it."""
        return next((one.module for one in self.owned if one.was == "synchronised"), None)

    @cached_property
    def windows(self) -> dict[int, Event]:
        """Rank -> what it did between the update before and this one."""
        return self.evidence.at_divergence()

    def count(self, what: str, module: int) -> dict[int, int]:
        """Return rank -> how often something happened to a wrapper before the update."""
        return {r: w.get(f"{what} of module {module}", 0) for r, w in self.windows.items()}

    def last(self, what: str, module: int) -> dict[int, Any]:
        """Return rank -> how something was the last time before the update, None if never."""
        return {r: w.get(f"{what} of module {module}") for r, w in self.windows.items()}

    def wrapper(self, module: int) -> Event | None:
        """Return how a wrapper was told to work."""
        events = self.evidence.events("wrapper", self.evidence.ranks[0])
        return next((event for event in events if event["module"] == module), None)

    def wrapped_at(self, name: str) -> str | None:
        """Return the line that made the wrapper of a parameter."""
        module = self.held[name].module
        for event in self.evidence.events("wrap", self.evidence.ranks[0]):
            if event["module"] == module and event["at"]:
                return str(event["at"])
        return None

    def unless_all(self, ranks: list[int]) -> tuple[int, ...]:
        """Return ranks that do something, or none where all of them do."""
        return () if len(ranks) == len(self.windows) else tuple(ranks)

    def before(self, rank: int) -> int:
        """Return the number of updates that a rank had made when it made the one before."""
        if self.step == 0:
            return -1
        event = self.evidence.update(rank, self.optimizer, self.step - 1)
        return -1 if event is None else int(event["step"])


def first_of(window: Event, name: str) -> str | None:
    """Return the first line of a list of them in a window."""
    return next(iter(window.get(name, ())), None)


def last_of(window: Event, name: str) -> str | None:
    """Return the last line that is known of a list of them in a window."""
    found = [place for place in window.get(name, ()) if place]
    return found[-1] if found else None


def unequal_gradients(evidence: Evidence) -> Unequal | None:
    """Return what is known of the divergence, if it is one of gradients."""
    found = evidence.divergence
    if found is None or found.phase != GRADIENTS or evidence.optimizer is None:
        return None
    if found.differences[0].kind != "gradient" or not evidence.ranks:
        return None
    gradients = [one for one in found.differences if one.kind == "gradient"]
    return Unequal(evidence, evidence.optimizer, found.step, gradients, found.compared)
