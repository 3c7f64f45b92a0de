"""The section with the charts: panels, legends, the numbers under them, the live plots' data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.report import svg
from harness.report.chart import Chart, Line, Panel
from harness.report.markup import ident, section, table, text
from harness.report.wording import DASH, TIMES, number


@dataclass(frozen=True, kw_only=True)
class Detail:
    """How much of the charts a page holds."""

    points: int
    """Values drawn, over all charts."""
    digits: int
    """Digits of the values for hover and zoom; 0 = no live plots."""
    numbers: bool
    """True to add a table of the curves' ends and extremes."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The section, and what its live plots read."""

    html: str
    data: str = ""
    """JSON; empty if there are to be no live plots."""


def draw_all(
    charts: Sequence[Chart], colours: Mapping[str, int], detail: Detail, *, left_out: int
) -> Drawn:
    """Draw every chart within the detail allowed."""
    lines = sum(len(panel.lines) for chart in charts for panel in chart.panels)
    columns = max(8, detail.points // (2 * max(1, lines)))
    figures: list[str] = []
    scales: list[str] = []
    panels: list[str] = []
    for index, chart in enumerate(charts):
        grids = [
            svg.grid(panel, min(columns, 240 if len(chart.panels) > 3 else 560))
            for panel in chart.panels
        ]
        figures.append(_figure(index, chart, grids, colours, detail))
        if detail.digits:
            scales.append(_json(svg.scale(chart, chart.reference)))
            live = [
                svg.series(chart, panel, grid, colours, detail.digits)
                for panel, grid in zip(chart.panels, grids, strict=True)
            ]
            panels.append(f"[{','.join(live)}]")
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
    data = f'{{"charts":[{",".join(scales)}],"panels":[{",".join(panels)}]}}'
    return Drawn(html=html, data=data if detail.digits and lines else "")


def _json(data: object) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def _figure(
    index: int,
    chart: Chart,
    grids: Sequence[svg.Grid],
    colours: Mapping[str, int],
    detail: Detail,
) -> str:
    facts = [f"<code>{text(chart.metric)}</code>"] if chart.metric != chart.title else []
    facts += [text(fact) for fact in (chart.phase, chart.unit) if fact]
    facts += ["log scale"] if chart.axis.log else []
    parts = [
        f'<figure><figcaption><h3>{text(chart.title)}</h3><p class="sub">{" · ".join(facts)}</p>'
        "</figcaption>"
    ]
    if not chart.panels:
        parts.append("<p>No arm of this run recorded this metric.</p>")
    parts.append(_legend(chart, colours))
    frame = svg.frame(chart)
    parts.append(f'<div class="panels{" few" if len(chart.panels) < 4 else ""}">')
    for at, (panel, data) in enumerate(zip(chart.panels, grids, strict=True)):
        name = f"p{index}-{at}"
        groups = panel.groups
        label = f"{chart.title}: " + ", ".join(" = ".join(arms) for arms in groups)
        head = "" if chart.shared else _panel_head(panel, groups[0], colours)
        shadow = "" if chart.reference is None else f"p{index}-{chart.reference}"
        drawing = svg.draw(
            chart, panel, data, colours, frame=frame, shadow=shadow, name=name, label=label
        )
        height = chart.height
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
            keys.append(f'<li><span class="swatch c{colours.get(arms[0], 0)}"></span>{names}</li>')
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
    if chart.reference is not None:
        names = " = ".join(text(arm) for arm in chart.panels[chart.reference].lines[0].arms)
        keys.append(f"<li>{_sample(0, edge=False, shadow=True)}{names}, for comparison</li>")
    if chart.floor is not None and chart.floor > 0.0:
        keys.append(
            '<li><span class="swatch floor"></span>rounding floor, up to '
            f"{number(chart.floor)}</li>"
        )
    if any(line.span.odd for line in lines):
        keys.append(f"<li><b>{TIMES}</b> becomes NaN, <b>▲ ▼</b> becomes ±infinite</li>")
    return f'<ul class="legend">{"".join(keys)}</ul>' if keys else ""


def _rank_key(labels: set[str], edge: bool) -> str:
    if edge:
        return "all ranks, smallest to largest"
    return min(labels, key=len) if len(labels) == 1 else " or ".join(sorted(labels, key=len))


def _sample(dash: int, edge: bool, shadow: bool = False) -> str:
    kind = "line c0" if shadow else "edge ink" if edge else "line ink"
    return (
        '<svg class="sample" width="34" height="10" aria-hidden="true">'
        f'<path class="{kind} d{dash}" d="M1 5H33"/></svg>'
    )


def _numbers(chart: Chart) -> str:
    rows = [
        [f"<th scope='row'>{text(', '.join(line.arms))}</th>", text(line.label), *_ends(line)]
        for panel in chart.panels
        for line in panel.lines
    ]
    head = ["arm", "ranks", "first", "last", "smallest", "largest", "not finite"]
    return (
        "<details><summary>Numbers of these curves</summary>"
        f"{table(head, rows, numeric=2)}</details>"
    )


def _ends(line: Line) -> list[str]:
    span = line.span
    extremes = [DASH if value is None else f"{value:.6g}" for value in (span.low, span.high)]
    odd = f"{span.odd} of {span.count}" if span.odd else "0"
    return [f"{span.first:.6g}", f"{span.last:.6g}", *extremes, odd]
