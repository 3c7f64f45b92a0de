"""Events of the same place in the run on all ranks, side by side. No cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from harness.watch.evidence import Evidence
from harness.watch.journal import Event

Side = Mapping[int, Event]
"""Rank -> its event."""


def side_by_side(evidence: Evidence, kind: str, *keys: str) -> list[Side]:
    """Return the events of a kind that every rank has, aligned by some of their fields.

    Of several events of a rank with the same fields the first counts.
    """
    found: dict[tuple[Any, ...], dict[int, Event]] = defaultdict(dict)
    for event in evidence.events(kind):
        if all(key in event for key in keys):
            place = tuple(event[key] for key in keys)
            found[place].setdefault(event["rank"], event)
    ranks = set(evidence.ranks)
    return [side for side in found.values() if set(side) == ranks and len(ranks) > 1]


def passes(evidence: Evidence, rank: int, *, trained: bool) -> list[Event]:
    """Return the passes over loaders of a rank: those that updates were made from, or the rest."""
    found = (event for event in evidence.events("pass", rank) if "count" in event)
    return [event for event in found if bool(event["updates"]) is trained]


def same(values: Iterable[Any]) -> bool:
    """Say whether all are equal."""
    first, *rest = list(values)
    return all(value == first for value in rest)


def usual(values: Sequence[Any], share: float = 0.8) -> Any:
    """Return the value that most of them have, or None."""
    if not values:
        return None
    value, times = Counter(values).most_common(1)[0]
    return value if times >= share * len(values) else None


def each_rank(values: Mapping[int, Any], show: Callable[[Any], str] = str) -> str:
    """Name what each rank has, such as `12 on rank 0, 7 on rank 1`."""
    shown = [f"{show(value)} on rank {rank}" for rank, value in sorted(values.items())]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")


def averages(event: Event, evidence: Evidence) -> bool:
    """Say whether all ranks of the run average the gradients of a module, as torch does it."""
    group = event.get("averages")
    return group is not None and set(group) == set(range(evidence.world_size))
