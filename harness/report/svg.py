"""Draws a chart as SVG that keeps its text size at any width, and as data for the live plot.

The outer element has no viewBox, so that text is in pixels and places across are percentages;
the curves stand in an inner one that is stretched to the width.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.axis import Axis, step_ticks
from harness.report.chart import Chart, Line, Panel
from harness.report.markup import text
from harness.report.wording import TIMES, number

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
    parts = [steps[a:b] for a, b in itertools.pairwise(edges)]
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


def frame(chart: Chart) -> str:
    """Return grid, ticks and floor, which all panels of a chart have in common."""
    height = chart.height
    axis = chart.axis
    parts = []
    if chart.floor is not None and chart.floor > 0.0:
        top = (1 - min(1.0, max(0.0, axis.place(chart.floor)))) * height
        parts.append(
            f'<rect class="floor" width="100%" y="{top:.1f}" height="{height - top:.1f}"/>'
        )
    ticks = axis.ticks(chart.labels)
    lines = "".join(f"M0 {1000 * (1 - tick.at):.0f}h1000" for tick in ticks)
    parts.append(f'{_stretched(height)}<path class="grid" d="{lines}"/></svg>')
    for tick in ticks:
        parts.append(f'<text class="y" y="{(1 - tick.at) * height:.1f}">{tick.label}</text>')
    for step in step_ticks(chart.first, chart.last, 8 if len(chart.panels) < 2 else chart.labels):
        parts.append(f'<text class="x" x="{_across(chart, step) / 10:.1f}%">{step}</text>')
    return "".join(parts)


def draw(
    chart: Chart,
    panel: Panel,
    data: Grid,
    colours: Mapping[str, int],
    *,
    frame: str,
    shadow: str,
    name: str,
    label: str,
) -> str:
    """Return one panel as an SVG element.

    Args:
        chart: what the panel belongs to.
        panel: what to draw.
        data: its values.
        colours: a colour number for each arm.
        frame: what all panels of the chart have in common.
        shadow: name of the panel whose first line is drawn under this one's, or its own name.
        name: makes the ids on the page unique.
        label: says what the panel shows.
    """
    height = chart.height
    axis = chart.axis
    parts = [
        f'<svg class="chart" role="img" aria-labelledby="{name}t {name}d" height="{height}">'
        f'<title id="{name}t">{text(label)}</title>'
        f'<desc id="{name}d">{text(_describe(chart, panel))}</desc>{frame}{_stretched(height)}'
    ]
    if shadow not in ("", name):
        parts.append(f'<use href="#{shadow}r"/>')
    across = [_across(chart, step) for step in data.steps]
    edges = [i for i, line in enumerate(panel.lines) if line.edge]
    for pair in zip(edges[::2], edges[1::2], strict=True):
        upper, lower = (_outline(axis, across, data.values[i]) for i in pair)
        colour = colours.get(panel.lines[pair[0]].arms[0], 0)
        corners = " ".join(f"{x},{y}" for x, y in [*upper, *reversed(lower)])
        parts.append(f'<polygon class="band c{colour}" points="{corners}"/>')
    odd: list[str] = []
    for line, values in zip(panel.lines, data.values, strict=True):
        look = f"c{colours.get(line.arms[0], 0)}"
        dash = f" d{line.rank % DASHES}" if line.rank % DASHES else ""
        path, dots = _path(axis, across, values)
        kind = "edge" if line.edge else "line"
        if path:
            mark = f' id="{name}r"' if shadow == name and line is panel.lines[0] else ""
            parts.append(f'<path{mark} class="{kind} {look}{dash}" d="{path}"/>')
        if dots and not line.edge:
            parts.append(f'<path class="dots {look}" d="{dots}"/>')
        if line.span.odd:
            odd += _odd(across, values, look, height)
    return "".join([*parts, "</svg>", *odd, "</svg>"])


def series(chart: Chart, panel: Panel, data: Grid, colours: Mapping[str, int], digits: int) -> str:
    """Return what the live plot of one panel needs as strict JSON, with so many digits."""
    lines = [
        [
            f"{' = '.join(line.arms)}, {line.label}" if chart.shared else line.label,
            colours.get(line.arms[0], 0),
            line.rank % DASHES,
            int(line.edge),
        ]
        for line in panel.lines
    ]
    form = f"%.{digits}g"
    values = [
        ",".join(
            [_json(value, form) for value in values]
            if line.span.odd or None in values
            else [form % value for value in values]
        )
        for line, values in zip(panel.lines, data.values, strict=True)
    ]
    return (
        f'{{"x":{json.dumps(data.steps, separators=(",", ":"))},'
        f'"lines":{json.dumps(lines, separators=(",", ":"))},"y":[[{"],[".join(values)}]]}}'
    )


def _json(value: float | None, form: str) -> str:
    if value is None:
        return "null"
    return form % value if math.isfinite(value) else f'"{value}"'


def scale(chart: Chart, shadow: int | None) -> dict[str, Any]:
    """Return what the live plots of a chart's panels have in common, as strict JSON can carry it.

    `shadow` is the panel whose first line is drawn under the lines of the others.
    """
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
        "ticks": [[tick.at, tick.label] for tick in axis.ticks(chart.labels)],
        "shadow": shadow,
        "height": chart.height,
    }


def _stretched(height: int) -> str:
    return (
        f'<svg width="100%" height="{height}" viewBox="0 0 1000 1000" preserveAspectRatio="none">'
    )


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


def _path(axis: Axis, across: Sequence[int], values: Sequence[float | None]) -> tuple[str, str]:
    """Return the curve, broken where a value is not finite, and dots where it needs them."""
    path, dots = [], []
    sparse = len(across) <= 24
    for xs, ys in _runs(across, values):
        depths = axis.depths(ys)
        if len(xs) > 1:
            moves = [
                f"{x - before} {y - above}"
                for (before, x), (above, y) in zip(
                    itertools.pairwise(xs), itertools.pairwise(depths), strict=True
                )
            ]
            path.append(f"M{xs[0]} {depths[0]}l{' '.join(moves)}")
        if sparse or len(xs) == 1:
            dots += [f"M{x} {y}h0" for x, y in zip(xs, depths, strict=True)]
    return "".join(path), "".join(dots)


def _runs(
    across: Sequence[int], values: Sequence[float | None]
) -> list[tuple[Sequence[int], Sequence[float]]]:
    """Split a line where it is not finite; missing records are skipped."""
    if None not in values and math.isfinite(sum(values)):  # type: ignore[arg-type]
        return [(across, values)] if across else []  # type: ignore[list-item]
    runs: list[tuple[list[int], list[float]]] = [([], [])]
    for x, value in zip(across, values, strict=True):
        if value is None:
            continue
        if math.isfinite(value):
            runs[-1][0].append(x)
            runs[-1][1].append(value)
        elif runs[-1][0]:
            runs.append(([], []))
    return [run for run in runs if run[0]]


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
            sign = {"nan": TIMES, "inf": "▲", "-inf": "▼"}[kind]
            y = height - 4 if kind == "-inf" else 11
            marks.append(
                f'<text class="odd {look}" x="{x / 10:.1f}%" y="{y}" text-anchor="middle">'
                f"{sign}</text>"
            )
        before = kind
    return marks


def _describe(chart: Chart, panel: Panel) -> str:
    spans = [line.span for line in panel.lines]
    low = min((span.low for span in spans if span.low is not None), default=None)
    high = max((span.high for span in spans if span.high is not None), default=None)
    span = "none finite" if low is None else f"from {number(low)} to {number(high)}"
    odd = sum(span.odd for span in spans)
    words = (
        f"{chart.metric} over steps {chart.first} to {chart.last}, lines: "
        + "; ".join(f"{', '.join(line.arms)} {line.label}" for line in panel.lines)
        + f"; values {span}"
    )
    return words + (f"; {odd} not finite." if odd else ".")
