"""Small multiples over a swept key: one set of axes each, with the rounding floor as an area."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.axis import Axis, fit
from harness.report.markup import text
from harness.report.wording import DASH, TIMES, number

TALL = 120
"""Height in pixels of the axes of one panel."""
LOG_FROM = 8.0
"""A key whose largest value is so many times its smallest stands on a logarithmic axis."""
_LABELS = 6


@dataclass(frozen=True, kw_only=True)
class Spot:
    """What was measured at one value of the key, over the repeats with other seeds."""

    x: float
    values: tuple[float, ...]

    @property
    def finite(self) -> list[float]:
        """The finite values, sorted."""
        return sorted(value for value in self.values if math.isfinite(value))

    @property
    def middle(self) -> float | None:
        """The median; None unless all are finite, since a curve must not step over a NaN."""
        found = self.finite
        if not found or len(found) < len(self.values):
            return None
        half = len(found) // 2
        if len(found) % 2:
            return found[half]
        return found[half - 1] + (found[half] - found[half - 1]) / 2


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a panel."""

    label: str
    colour: int
    spots: tuple[Spot, ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One set of axes."""

    title: str
    curves: tuple[Curve, ...]
    floor: tuple[tuple[float, float], ...] = ()
    """(x, rounding floor)."""

    @property
    def values(self) -> list[float]:
        """Return everything drawn, the floor included."""
        drawn = [v for curve in self.curves for spot in curve.spots for v in spot.finite]
        return drawn + [value for _, value in self.floor if math.isfinite(value)]


@dataclass(frozen=True, kw_only=True)
class Across:
    """The axis of the swept key."""

    key: str
    values: tuple[float, ...]

    @property
    def log(self) -> bool:
        """True if the values span enough to crowd each other at the lower end."""
        return self.values[0] > 0.0 and self.values[-1] >= LOG_FROM * self.values[0]

    def place(self, value: float) -> float:
        """Return where a value stands in thousandths of the width."""
        low, high = self.values[0], self.values[-1]
        if low == high:
            return 500.0
        if self.log:
            return 1000 * math.log(value / low) / math.log(high / low)
        return 1000 * (value - low) / (high - low)

    def labelled(self) -> list[float]:
        """Return the values that get a label: all, or as many as do not overlap."""
        kept: list[float] = []
        for value in self.values:
            if not kept or self.place(value) - self.place(kept[-1]) >= 1000 / _LABELS:
                kept.append(value)
        return kept


def axis_of(panels: Sequence[Panel]) -> Axis:
    """Return one logarithmic axis for several panels, of at least two decades.

    Less would blow up a factor that means nothing between an effect and its floor.
    """
    values = [value for panel in panels for value in panel.values]
    positive = [value for value in values if value > 0.0]
    if positive and max(positive) < 100 * min(positive):
        middle = math.sqrt(max(positive)) * math.sqrt(min(positive))
        values += [middle / 10, middle * 10]
    return fit(values, log=True, floor=None)


def draw(panel: Panel, across: Across, axis: Axis, *, name: str, what: str) -> str:
    """Return one panel: heading, legend and drawing; `name` makes its ids unique."""
    parts = [
        f'<svg class="chart" role="img" aria-labelledby="{name}t {name}d" height="{TALL}">'
        f'<title id="{name}t">{text(f"{what}: {panel.title}")}</title>'
        f'<desc id="{name}d">{text(_describe(panel, across))}</desc>'
    ]
    ticks = axis.ticks(3)
    lines = "".join(f"M0 {1000 * (1 - tick.at):.0f}h1000" for tick in ticks)
    parts.append(f'{_stretched()}{_floor(panel, across, axis)}<path class="grid" d="{lines}"/>')
    parts += [_curve(curve, across, axis) for curve in panel.curves]
    parts.append("</svg>")
    for tick in ticks:
        parts.append(f'<text class="y" y="{(1 - tick.at) * TALL:.1f}">{tick.label}</text>')
    for value in across.labelled():
        at = across.place(value) / 10
        parts.append(f'<text class="x" x="{at:.1f}%">{number(value)}</text>')
    for curve in panel.curves:
        parts += _odd(curve, across)
    legend = "".join(
        f'<li><span class="swatch c{curve.colour}"></span>{text(curve.label)}</li>'
        for curve in panel.curves
        if curve.label
    )
    return (
        f'<div class="panel"><h4>{text(panel.title)}</h4>'
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + f'<div class="plot" style="--h:{TALL}px">{"".join(parts)}</svg></div></div>'
    )


def _stretched() -> str:
    return f'<svg width="100%" height="{TALL}" viewBox="0 0 1000 1000" preserveAspectRatio="none">'


def _floor(panel: Panel, across: Across, axis: Axis) -> str:
    places = [(across.place(x), depth) for x, depth in _depths(panel.floor, axis)]
    if not places:
        return ""
    if len(places) == 1:
        (x, depth) = places[0]
        places = [(x - 40, depth), (x + 40, depth)]
    upper = " ".join(f"{x:.0f},{depth}" for x, depth in places)
    return (
        f'<polygon class="rounding" points="{places[0][0]:.0f},1000 {upper} '
        f'{places[-1][0]:.0f},1000"/><polyline class="rounding-edge" points="{upper}"/>'
    )


def _depths(points: Sequence[tuple[float, float]], axis: Axis) -> list[tuple[float, int]]:
    sound = [(x, value) for x, value in points if math.isfinite(value)]
    return list(zip([x for x, _ in sound], axis.depths(v for _, v in sound), strict=True))


def _curve(curve: Curve, across: Across, axis: Axis) -> str:
    look = f"c{curve.colour}"
    parts: list[str] = []
    for run in _runs(curve.spots):
        if any(len(spot.values) > 1 for spot in run):
            upper = _places([(spot.x, spot.finite[-1]) for spot in run], across, axis)
            lower = _places([(spot.x, spot.finite[0]) for spot in run], across, axis)
            if len(run) > 1:
                corners = " ".join([*upper, *reversed(lower)])
                parts.append(f'<polygon class="band {look}" points="{corners}"/>')
            else:
                parts.append(f'<path class="edge {look}" d="M{upper[0]}L{lower[0]}"/>')
        middle = _places([(s.x, s.middle) for s in run if s.middle is not None], across, axis)
        if len(middle) > 1:
            parts.append(f'<path class="line {look}" d="M{"L".join(middle)}"/>')
        dots = "".join(f"M{place}h0" for place in middle)
        parts.append(f'<path class="dots {look}" d="{dots}"/>')
    return "".join(parts)


def _places(points: Sequence[tuple[float, float]], across: Across, axis: Axis) -> list[str]:
    return [f"{across.place(x):.0f},{depth}" for x, depth in _depths(points, axis)]


def _runs(spots: Sequence[Spot]) -> list[list[Spot]]:
    """Split a curve where a value is not finite; where there is none it goes on."""
    runs: list[list[Spot]] = [[]]
    for spot in spots:
        if not spot.values:
            continue
        if spot.middle is None:
            runs.append([])
        else:
            runs[-1].append(spot)
    return [run for run in runs if run]


def _odd(curve: Curve, across: Across) -> list[str]:
    """Mark where not all values are finite, at the top edge."""
    return [
        f'<text class="odd c{curve.colour}" x="{across.place(spot.x) / 10:.1f}%" y="11" '
        f'text-anchor="middle">{TIMES}</text>'
        for spot in curve.spots
        if spot.values and spot.middle is None
    ]


def _describe(panel: Panel, across: Across) -> str:
    words = []
    for curve in panel.curves:
        values = [
            f"{number(spot.x)}: {number(spot.middle)}"
            if spot.middle is not None
            else f"{number(spot.x)}: not finite"
            for spot in curve.spots
            if spot.values
        ]
        words.append(f"{curve.label or panel.title}, by {across.key}: {', '.join(values) or DASH}")
    if panel.floor:
        words.append("rounding floor " + ", ".join(number(value) for _, value in panel.floor))
    return "; ".join(words) + "."
