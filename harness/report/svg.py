"""Draws a chart as SVG that keeps its text size at any width, and as data for the live plot.

The outer element has no viewBox, so that text is in pixels and places across are percentages;
the curves stand in an inner one that is stretched to the width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from harness.report.axis import Axis, step_ticks
from harness.report.chart import Chart, Line, Panel
from harness.report.wording import number, printable

TALL, SMALL = 260, 132
"""Height in pixels of the axes of a shared panel, and of one among many."""
DASHES = 8
"""How many dash patterns there are, one per rank."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The lines of a panel over common steps, thinned out to what the pixels can show."""

    steps: list[int]
    values: list[list[float | None]]
    """For each line, one value a step; None where there is no record."""
    thinned: bool


def grid(panel: Panel, columns: int) -> Grid:
    """Return the panel's values; per pixel column at most the smallest and the largest."""
    steps = sorted({step for line in panel.lines for step in line.points})
    if len(steps) <= 2 * columns:
        values: list[list[float | None]] = [
            [line.points.get(step) for step in steps] for line in panel.lines
        ]
        return Grid(steps=steps, values=values, thinned=False)
    edges = [len(steps) * column // columns for column in range(columns + 1)]
    parts = [steps[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    return Grid(
        steps=[step for part in parts for step in (part[0], part[len(part) // 2])],
        values=[[v for part in parts for v in _thin(line, part)] for line in panel.lines],
        thinned=True,
    )


def _thin(line: Line, steps: Sequence[int]) -> tuple[float | None, float | None]:
    values = [line.points[step] for step in steps if step in line.points]
    odd = [value for value in values if not math.isfinite(value)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return (odd[0], odd[0]) if odd else (None, None)
    if odd:
        return finite[0], odd[0]
    low, high = min(finite), max(finite)
    return (low, high) if values.index(low) <= values.index(high) else (high, low)


def draw(
    chart: Chart, panel: Panel, data: Grid, colours: Mapping[str, int], *, name: str, label: str
) -> str:
    """Return one panel as an SVG element; `name` makes its ids unique, `label` is its title."""
    height = TALL if chart.shared else SMALL
    axis = chart.axis
    parts = [
        f'<svg class="chart" role="img" aria-labelledby="{name}t {name}d" height="{height}">'
        f'<title id="{name}t">{_text(label)}</title>'
        f'<desc id="{name}d">{_text(_describe(chart, panel))}</desc>'
    ]
    if chart.floor is not None and chart.floor > 0.0:
        top = (1 - min(1.0, max(0.0, axis.place(chart.floor)))) * height
        parts.append(
            f'<rect class="floor" width="100%" y="{top:.1f}" height="{height - top:.1f}"/>'
        )
    for tick in axis.ticks(5 if chart.shared else 3):
        y = f"{(1 - tick.at) * height:.1f}"
        parts.append(
            f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/>'
            f'<text x="-7" y="{y}" dy=".32em" text-anchor="end">{tick.label}</text>'
        )
    for step in step_ticks(chart.first, chart.last, 8 if chart.shared else 3):
        x = f"{_across(chart, step) / 10:.1f}%"
        parts.append(
            f'<line class="tick" x1="{x}" x2="{x}" y1="{height}" y2="{height + 4}"/>'
            f'<text x="{x}" y="{height + 17}" text-anchor="middle">{step}</text>'
        )
    parts.append(f'<line class="axis" x2="100%" y1="{height}" y2="{height}"/>')
    parts.append(
        f'<svg width="100%" height="{height}" viewBox="0 0 1000 1000" preserveAspectRatio="none">'
    )
    across = [_across(chart, step) for step in data.steps]
    edges = [i for i, line in enumerate(panel.lines) if line.edge]
    if len(edges) == 2:
        upper, lower = (_outline(axis, across, data.values[i]) for i in edges)
        colour = colours.get(panel.lines[edges[0]].arms[0], 0)
        corners = " ".join(f"{x},{y}" for x, y in [*upper, *reversed(lower)])
        parts.append(f'<polygon class="band c{colour}" points="{corners}"/>')
    odd: list[str] = []
    for line, values in zip(panel.lines, data.values, strict=True):
        look = f"c{colours.get(line.arms[0], 0)}"
        dash = f" d{line.rank % DASHES}" if line.rank % DASHES else ""
        path, dots = _path(axis, across, values)
        kind = "edge" if line.edge else "line"
        if path:
            parts.append(f'<path class="{kind} {look}{dash}" d="{path}"/>')
        if dots and not line.edge:
            parts.append(f'<path class="dots {look}" d="{dots}"/>')
        odd += _odd(across, values, look, height)
    return "".join([*parts, "</svg>", *odd, "</svg>"])


def series(chart: Chart, panel: Panel, data: Grid, colours: Mapping[str, int]) -> dict[str, Any]:
    """Return what the live plot of one panel needs, as strict JSON can carry it."""
    return {
        "x": data.steps,
        "y": [
            [
                str(value) if value is not None and not math.isfinite(value) else value
                for value in values
            ]
            for values in data.values
        ],
        "lines": [
            [
                f"{' = '.join(line.arms)}, {line.label}" if chart.shared else line.label,
                colours.get(line.arms[0], 0),
                line.rank % DASHES,
                int(line.edge),
            ]
            for line in panel.lines
        ],
    }


def scale(chart: Chart) -> dict[str, Any]:
    """Return the axes of a chart for the live plots of its panels."""
    axis = chart.axis
    return {
        "title": chart.title,
        "low": axis.low,
        "high": axis.high,
        "log": axis.log,
        "zero": axis.zero,
        "base": axis.base,
        "floor": axis.place(chart.floor) if chart.floor is not None else None,
        "x": [chart.first, chart.last],
        "ticks": [[tick.at, tick.label] for tick in axis.ticks(5 if chart.shared else 3)],
        "height": TALL if chart.shared else SMALL,
    }


def _across(chart: Chart, step: int) -> int:
    if chart.last == chart.first:
        return 500
    return round(1000 * (step - chart.first) / (chart.last - chart.first))


def _outline(
    axis: Axis, across: Sequence[int], values: Sequence[float | None]
) -> list[tuple[int, int]]:
    points = [
        (x, v) for x, v in zip(across, values, strict=True) if v is not None and math.isfinite(v)
    ]
    return list(zip([x for x, _ in points], axis.depths(v for _, v in points), strict=True))


def _path(
    axis: Axis, across: Sequence[int], values: Sequence[float | None]
) -> tuple[str, str]:
    """Return the curve, broken where a value is not finite, and dots where it needs them."""
    runs: list[tuple[list[int], list[float]]] = [([], [])]
    for x, value in zip(across, values, strict=True):
        if value is None:
            continue
        if value - value == 0.0:
            runs[-1][0].append(x)
            runs[-1][1].append(value)
        elif runs[-1][0]:
            runs.append(([], []))
    path, dots = [], []
    sparse = len(across) <= 24
    for xs, ys in runs:
        if not xs:
            continue
        places = [f"{x} {y}" for x, y in zip(xs, axis.depths(ys), strict=True)]
        if len(xs) > 1:
            path.append(f"M{places[0]}L{' '.join(places[1:])}")
        if sparse or len(xs) == 1:
            dots += [f"M{place}h0" for place in places]
    return "".join(path), "".join(dots)


def _odd(
    across: Sequence[int], values: Sequence[float | None], look: str, height: int
) -> list[str]:
    """Mark where a line stops being finite: NaN and +inf at the top edge, -inf at the bottom."""
    marks: list[str] = []
    before = ""
    for x, value in zip(across, values, strict=True):
        if value is None:
            continue
        kind = "" if math.isfinite(value) else str(value)
        if kind and kind != before:
            sign = {"nan": "×", "inf": "▲", "-inf": "▼"}[kind]
            y = height - 4 if kind == "-inf" else 11
            marks.append(
                f'<text class="odd {look}" x="{x / 10:.1f}%" y="{y}" text-anchor="middle">'
                f"{sign}</text>"
            )
        before = kind
    return marks


def _describe(chart: Chart, panel: Panel) -> str:
    values = [v for line in panel.lines for v in line.points.values()]
    finite = [v for v in values if math.isfinite(v)]
    span = f"from {number(min(finite))} to {number(max(finite))}" if finite else "none finite"
    odd = len(values) - len(finite)
    text = (
        f"{chart.metric} over steps {chart.first} to {chart.last}, lines: "
        + "; ".join(f"{', '.join(line.arms)} {line.label}" for line in panel.lines)
        + f"; values {span}"
    )
    return text + (f"; {odd} not finite." if odd else ".")


def _text(raw: str) -> str:
    return escape(printable(raw))
