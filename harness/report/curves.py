"""The section with the charts: panels, legends, the numbers under them, the live plots' data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.report import svg
from harness.report.chart import Chart, Line, Panel
from harness.report.sections import ident, section, table, text
from harness.report.wording import number


@dataclass(frozen=True, kw_only=True)
class Detail:
    """How much of the charts a page holds."""

    points: int
    """Values drawn, over all charts."""
    data: bool
    """True to add the values for hover and zoom."""
    numbers: bool
    """True to add a table of the curves' ends and extremes."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The section, and what its live plots read."""

    html: str
    data: dict[str, Any] = field(default_factory=dict)


def draw_all(
    charts: Sequence[Chart], colours: Mapping[str, int], detail: Detail, *, left_out: int
) -> Drawn:
    """Draw every chart within the detail allowed."""
    lines = sum(len(panel.lines) for chart in charts for panel in chart.panels)
    columns = max(8, detail.points // (2 * max(1, lines)))
    figures: list[str] = []
    scales: list[dict[str, Any]] = []
    panels: list[list[dict[str, Any]]] = []
    for index, chart in enumerate(charts):
        grids = [
            svg.grid(panel, min(columns, 560 if chart.shared else 240)) for panel in chart.panels
        ]
        figures.append(_figure(index, chart, grids, colours, detail))
        scales.append(svg.scale(chart))
        panels.append(
            [
                svg.series(chart, panel, data, colours)
                for panel, data in zip(chart.panels, grids, strict=True)
            ]
        )
    if not figures and not left_out:
        figures.append("<p>No metric was recorded that varies over the steps.</p>")
    if left_out:
        figures.append(
            f"<p class='note'>{left_out} more charts did not fit on this page; "
            "the records have their values.</p>"
        )
    lead = (
        "<p class='lead'>One line per rank; ranks that agree bit for bit share a line, and arms "
        "that agree share a panel. Repeat 0, as written."
        "<span class='live-only'> Hover to read values, drag to zoom, double-click to reset."
        "</span></p>"
    )
    html = section("curves", "Curves", lead + "".join(figures))
    has_data = detail.data and any(chart.panels for chart in charts)
    return Drawn(html=html, data={"charts": scales, "panels": panels} if has_data else {})


def _figure(
    index: int,
    chart: Chart,
    grids: Sequence[svg.Grid],
    colours: Mapping[str, int],
    detail: Detail,
) -> str:
    where = f" · {text(chart.phase)}" if chart.phase else ""
    unit = f" · {text(chart.unit)}" if chart.unit else ""
    log = " · log scale" if chart.axis.log else ""
    parts = [
        f'<figure><figcaption><h3>{text(chart.title)}</h3><p class="sub"><code>'
        f"{text(chart.metric)}</code>{where}{unit}{log}</p></figcaption>"
    ]
    if not chart.panels:
        parts.append("<p>No arm of this run recorded this metric.</p>")
    parts.append(_legend(chart, colours))
    parts.append(f'<div class="panels{" shared" if chart.shared else ""}">')
    for at, (panel, data) in enumerate(zip(chart.panels, grids, strict=True)):
        name = f"p{index}-{at}"
        groups = panel.groups
        label = f"{chart.title}: " + ", ".join(" = ".join(arms) for arms in groups)
        head = "" if chart.shared else _panel_head(panel, groups[0], colours)
        drawing = svg.draw(chart, panel, data, colours, name=name, label=label)
        height = svg.TALL if chart.shared else svg.SMALL
        parts.append(
            f'<div class="panel">{head}<div class="plot" data-chart="{index}" '
            f'data-panel="{at}" style="--h:{height}px">{drawing}</div></div>'
        )
    parts.append("</div>")
    notes = list(chart.notes)
    if any(data.thinned for data in grids):
        notes.append("Thinned out: the smallest and the largest value per pixel column.")
    if notes:
        parts.append(f'<p class="note">{text(" ".join(notes))}</p>')
    if detail.numbers and chart.panels:
        parts.append(_numbers(chart))
    return "".join([*parts, "</figure>"])


def _panel_head(panel: Panel, arms: Sequence[str], colours: Mapping[str, int]) -> str:
    names = ", ".join(f'<a href="#{ident("arm", arm)}">{text(arm)}</a>' for arm in arms)
    ranks = f" · {text(panel.lines[0].label)}" if len(panel.lines) == 1 else ""
    return (
        f'<h4><span class="swatch c{colours.get(arms[0], 0)}"></span>{names}'
        f'<span class="sub">{ranks}</span></h4>'
    )


def _legend(chart: Chart, colours: Mapping[str, int]) -> str:
    keys: list[str] = []
    if chart.shared:
        for arms in chart.panels[0].groups:
            names = " = ".join(text(arm) for arm in arms)
            keys.append(
                f'<li><span class="swatch c{colours.get(arms[0], 0)}"></span>{names}</li>'
            )
    lines = [line for panel in chart.panels for line in panel.lines]
    several = any(
        sum(other.arms == line.arms for other in panel.lines) > 1
        for panel in chart.panels
        for line in panel.lines
    )
    if several:
        dashes: dict[tuple[int, bool], set[str]] = {}
        for line in lines:
            dashes.setdefault((line.rank % svg.DASHES, line.edge), set()).add(line.label)
        keys += [
            f"<li>{_sample(dash, edge)}{text(_rank_key(labels, edge))}</li>"
            for (dash, edge), labels in sorted(dashes.items())
        ]
    if chart.floor is not None and chart.floor > 0.0:
        keys.append(
            '<li><span class="swatch floor"></span>rounding floor, up to '
            f"{number(chart.floor)}</li>"
        )
    if any(not math.isfinite(v) for line in lines for v in line.points.values()):
        keys.append("<li><b>×</b> becomes NaN, <b>▲ ▼</b> becomes ±infinite</li>")
    return f'<ul class="legend">{"".join(keys)}</ul>' if keys else ""


def _rank_key(labels: set[str], edge: bool) -> str:
    if edge:
        return "all ranks, smallest to largest"
    return min(labels, key=len) if len(labels) == 1 else " or ".join(sorted(labels, key=len))


def _sample(dash: int, edge: bool) -> str:
    kind = "edge" if edge else "line"
    return (
        '<svg class="sample" width="34" height="10" aria-hidden="true">'
        f'<path class="{kind} ink d{dash}" d="M1 5H33"/></svg>'
    )


def _numbers(chart: Chart) -> str:
    rows = [
        [f"<th scope='row'>{text(', '.join(line.arms))}</th>", text(line.label), *_ends(line)]
        for panel in chart.panels
        for line in panel.lines
        if not line.edge
    ]
    head = ["arm", "ranks", "first", "last", "smallest", "largest", "not finite"]
    return (
        "<details><summary>Numbers of these curves</summary>"
        f"{table(head, rows, numeric=2)}</details>"
    )


def _ends(line: Line) -> list[str]:
    values = [value for _, value in sorted(line.points.items())]
    finite = [value for value in values if math.isfinite(value)]
    odd = len(values) - len(finite)
    return [
        number(values[0], 6),
        number(values[-1], 6),
        number(min(finite, default=None), 6),
        number(max(finite, default=None), 6),
        f"{odd} of {len(values)}" if odd else "0",
    ]
