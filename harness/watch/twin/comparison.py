"""The first place where two runs are further apart than rounding takes them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.floor import Floor, Size
from harness.watch.twin.estimates import distance, factor
from harness.watch.twin.recording import Place, Recording

_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How far one tensor of two runs is apart at one place."""

    name: str
    update: int
    optimizer: int
    phase: str
    distance: float
    """Relative to the larger norm."""
    floor: float | None
    """What rounding does to it, in the same unit; None if nobody has measured it."""
    factor: float
    """Number by which the first run's tensor comes closest to the second's."""
    residual: float
    """Relative distance that is left after the factor."""
    size: Size | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs beside each other."""

    updates: tuple[int, int]
    places: tuple[Apart, ...]
    """The tensor that is furthest above its floor, at each place in order of execution."""
    first: tuple[Apart, ...]
    """All tensors beyond the floor at the first such place, in order of registration."""
    compared: int
    only: tuple[tuple[str, ...], tuple[str, ...]]
    """Names that only one of the runs has."""
    equal: bool
    """Whether all numbers are the same to the bit."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "updates": list(self.updates),
            "compared": self.compared,
            "equal": self.equal,
            "only": [list(names) for names in self.only],
            "first": [_row(apart) for apart in self.first],
            "places": [_row(apart) for apart in self.places],
        }


def _row(apart: Apart) -> dict[str, Any]:
    return vars(apart) | {"size": apart.size and apart.size.value}


def compare(a: Recording, b: Recording, nudged: Sequence[Recording] = ()) -> Comparison:
    """Compare two runs; `nudged` are repeats of `a` in which only the rounding differs."""
    places = [place for place in a.values if place in b.values]
    shown: list[Apart] = []
    first: tuple[Apart, ...] = ()
    names_a, names_b = _names(a), _names(b)
    equal = True
    highest: dict[tuple[int, str], float] = {}
    for place in places:
        both = [name for name in a.values[place] if name in b.values[place]]
        repeats = [
            _relative(a.values[place][name], run.values[place][name])
            for run in nudged
            for name in both
            if name in run.values.get(place, {})
        ]
        key = place[1:]
        if repeats:
            # Of all tensors, since a few repeats of one small tensor miss the tail; and of all
            # updates so far, since runs that rounding has parted may cross by luck.
            highest[key] = max(highest.get(key, 0.0), *repeats)
        equal = equal and all(a.values[place][n] == b.values[place][n] for n in both)
        found = [
            _apart(n, place, a.values[place][n], b.values[place][n], highest.get(key)) for n in both
        ]
        if not found:
            continue
        shown.append(max(found, key=_height))
        beyond = tuple(one for one in found if one.size is Size.FAULT)
        if beyond and not first:
            first = beyond
    return Comparison(
        updates=(a.updates(), b.updates()),
        places=tuple(shown),
        first=first,
        compared=len(names_a & names_b),
        only=(tuple(sorted(names_a - names_b)), tuple(sorted(names_b - names_a))),
        equal=equal and not (names_a ^ names_b),
    )


def _apart(
    name: str,
    place: Place,
    a: tuple[float, ...],
    b: tuple[float, ...],
    floor: float | None,
) -> Apart:
    relative = _relative(a, b)
    times = factor(a[1:], b[1:])
    scaled = tuple(times * x for x in a[1:]) if math.isfinite(times) else a[1:]
    norm = math.sqrt(max(a[0], b[0], _TINY))
    size = None
    if floor is not None:
        size = Floor(values=(max(floor, _TINY),)).size(relative)
    return Apart(
        name=name,
        update=place[0],
        optimizer=place[1],
        phase=place[2],
        distance=relative,
        floor=floor,
        factor=times,
        residual=distance(scaled, b[1:]) / norm,
        size=size,
    )


def _relative(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Return the distance of two tensors relative to the larger norm; nan counts as far."""
    if a == b:
        return 0.0
    value = distance(a[1:], b[1:]) / math.sqrt(max(a[0], b[0], _TINY))
    return value if math.isfinite(value) else math.inf


def _height(apart: Apart) -> float:
    return apart.distance / max(apart.floor or _TINY, _TINY)


def _names(recording: Recording) -> set[str]:
    values: Mapping[Place, Mapping[str, Any]] = recording.values
    return {name for tensors in values.values() for name in tensors}
