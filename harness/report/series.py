"""From records to charts: which metrics, which arms in which panel, which lines.

Ranks whose values are the same bit for bit share one line, and arms whose lines are the same
share one panel, so that what is drawn is what differs.
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Mapping, Sequence

from harness.report.axis import fit
from harness.report.chart import Chart, Line, Panel, Points
from harness.report.wording import number, rank_list
from harness.scenario import Plot, Role, Scenario
from harness.tables import Tables

MOST_CHARTS = 8
"""Charts that are chosen when a scenario names none."""
MOST_LINES = 8
"""An arm with more ranks that differ is drawn as a band, rank 0 and its edges."""
SHARED_PANEL = 8
"""Up to so many lines in all, the arms are drawn over each other; else side by side."""
COLOURS = 7
"""Hues that stay apart for colour-blind readers; 0 is grey and belongs to the reference."""
_ROLE = {Role.REFERENCE: 0, Role.FAULTY: 1, Role.FIXED: 2, Role.CONTROL: 3}

Series = dict[tuple[str, int], Points]
"""(arm, rank) -> the values of one metric, of repeat 0."""


def colours(scenario: Scenario) -> dict[str, int]:
    """Return a colour number for each arm: its own while there are enough, else its role's."""
    found: dict[str, int] = {}
    spare = [n for n in range(COLOURS) if n not in {_ROLE[arm.role] for arm in scenario.arms}]
    for arm in scenario.arms:
        number_ = _ROLE[arm.role]
        if len(scenario.arms) <= COLOURS and number_ in found.values():
            number_ = spare.pop(0)
        found[arm.name] = number_
    return found


def charts(scenario: Scenario, tables: Tables) -> list[Chart]:
    """Return the charts a scenario asks for, or else those of the metrics that vary."""
    plots = list(scenario.plots)
    by_metric = _collect(tables, {(plot.metric, plot.phase) for plot in plots})
    if not plots:
        plots = _choose(by_metric)
    order = [arm.name for arm in scenario.arms]
    order += [arm.name for arm in tables.plan.arms if arm.name not in order]
    looks = colours(scenario)
    return [
        _chart(plot, by_metric.get((plot.metric, plot.phase), {}), order, looks, tables)
        for plot in plots
    ]


def _collect(
    tables: Tables, wanted: set[tuple[str, str | None]]
) -> dict[tuple[str, str | None], Series]:
    """Read the numeric metrics in one pass, since looking each up would cost a pass each."""
    names: dict[str, list[str | None]] = {}
    for metric, phase in wanted:
        names.setdefault(metric, []).append(phase)
    everything: list[str | None] = [None]
    found: dict[tuple[str, str | None], Series] = {}
    owner: tuple[str, int] | None = None
    mine: dict[tuple[str, str | None], Points] = {}
    for arm, rank, row in tables.rows():
        if row.repeat:
            continue
        if owner != (arm, rank):
            owner, mine = (arm, rank), {}
        step = row.step
        for name, value in row.metrics.items():
            if value.__class__ is not float and value.__class__ is not int:
                continue
            for phase in names.get(name, ()) if wanted else everything:
                if phase is not None and phase != row.phase:
                    continue
                points = mine.get((name, phase))
                if points is None:
                    points = mine[name, phase] = {}
                    found.setdefault((name, phase), {})[owner] = points
                points[step] = value
    return found


def _choose(by_metric: Mapping[tuple[str, str | None], Series]) -> list[Plot]:
    plots = []
    for (metric, phase), series in by_metric.items():
        values: set[float] = set().union(*(points.values() for points in series.values()))
        if len(values) < 2 or max(len(points) for points in series.values()) < 2:
            continue
        finite = [value for value in values if math.isfinite(value)]
        positive = [value for value in finite if value > 0.0]
        log = (
            bool(positive)
            and min(finite) >= 0.0
            and math.log10(max(positive)) - math.log10(min(positive)) > 3.0
        )
        plots.append(Plot(metric=metric, title=metric, phase=phase, log=log))
    return plots[:MOST_CHARTS]


def _chart(
    plot: Plot,
    series: Series,
    order: Sequence[str],
    looks: Mapping[str, int],
    tables: Tables,
) -> Chart:
    notes: list[str] = []
    by_arm: dict[str, dict[int, Points]] = {}
    for (arm, rank), points in series.items():
        by_arm.setdefault(arm, {})[rank] = points
    shown = [arm for arm in (plot.arms or order) if arm in by_arm]
    absent = [arm for arm in plot.arms if arm not in by_arm]
    if absent:
        notes.append(f"Never recorded by {', '.join(absent)}.")
    floor = _floor(plot, tables, notes)
    lines = {arm: _lines(arm, by_arm[arm], notes) for arm in shown}
    panels = _panels(shown, lines, looks)
    drawn = [line for panel in panels for line in panel.lines]
    axis = fit(_extremes(drawn, plot.log), log=plot.log, floor=floor)
    if plot.log and not axis.log and drawn:
        notes.append("Drawn on a linear axis: there are values that have no logarithm.")
    if axis.base:
        notes.append(f"The axis counts from {axis.base!r}.")
    steps = {step for line in drawn for step in line.points}
    return Chart(
        title=plot.title,
        metric=plot.metric,
        phase=plot.phase,
        unit=plot.unit,
        axis=axis,
        first=min(steps, default=0),
        last=max(steps, default=0),
        floor=floor,
        panels=panels,
        notes=tuple(notes),
    )


def _extremes(lines: Sequence[Line], log: bool) -> list[float]:
    found = [v for line in lines for v in (line.span.low, line.span.high) if v is not None]
    if log and any(value <= 0.0 for value in found):
        found += [v for line in lines for v in line.points.values() if v > 0.0]
    return found


def _floor(plot: Plot, tables: Tables, notes: list[str]) -> float | None:
    if plot.floor is None:
        return None
    try:
        floor = float(plot.floor(tables))
    except Exception as error:  # a chart without its band is better than no page
        notes.append(f"The rounding floor is not drawn: {error}.")
        return None
    if not math.isfinite(floor):
        notes.append(f"The rounding floor is not drawn: it came out as {number(floor)}.")
        return None
    return floor


def _lines(arm: str, by_rank: Mapping[int, Points], notes: list[str]) -> tuple[Line, ...]:
    groups: dict[tuple[tuple[int, ...], bytes], list[int]] = {}
    for rank in sorted(by_rank):
        groups.setdefault(_bits(by_rank[rank]), []).append(rank)
    lines = [
        Line(arms=(arm,), label=rank_list(ranks), rank=ranks[0], points=by_rank[ranks[0]])
        for ranks in groups.values()
    ]
    if len(lines) <= MOST_LINES:
        return tuple(lines)
    notes.append(f"{arm}: a band over all {len(by_rank)} ranks, and rank {lines[0].rank} in it.")
    steps = sorted({step for points in by_rank.values() for step in points})
    edges = []
    for label, pick in (("largest of all ranks", max), ("smallest of all ranks", min)):
        points: Points = {}
        for step in steps:
            values = [points_[step] for points_ in by_rank.values() if step in points_]
            finite = [value for value in values if math.isfinite(value)]
            points[step] = pick(finite) if finite else values[0]
        edges.append(Line(arms=(arm,), label=label, rank=0, points=points, edge=True))
    alone = dataclasses.replace(lines[0], label=f"rank {lines[0].rank}")
    return (*edges, alone)


def _bits(points: Points) -> tuple[tuple[int, ...], bytes]:
    # Bytes tell -0.0 from 0.0 and find a NaN equal to itself, where == does neither.
    return tuple(points), array("d", points.values()).tobytes()


def _panels(
    shown: Sequence[str], lines: Mapping[str, tuple[Line, ...]], looks: Mapping[str, int]
) -> tuple[Panel, ...]:
    alike: dict[object, list[str]] = {}
    crowded = len(looks) > COLOURS
    for arm in shown:
        key = tuple(_bits(line.points) for line in lines[arm])
        alike.setdefault((looks.get(arm) if crowded else None, key), []).append(arm)
    groups = [_merge(arms, lines) for arms in alike.values()]
    flat = tuple(line for group in groups for line in group)
    hues = [looks.get(group[0].arms[0], 0) for group in groups]
    if len(groups) > 1 and len(flat) <= SHARED_PANEL and len(set(hues)) == len(hues):
        return (Panel(lines=flat),)
    return tuple(
        Panel(lines=tuple(group), reference=len(group) == 1 and hue == 0)
        for group, hue in zip(groups, hues, strict=True)
    )


def _merge(arms: Sequence[str], lines: Mapping[str, tuple[Line, ...]]) -> list[Line]:
    labels = {line.label for arm in arms for line in lines[arm]}
    alone = len(lines[arms[0]]) == 1 and len(labels) > 1
    return [
        dataclasses.replace(line, arms=tuple(arms), label="all ranks" if alone else line.label)
        for line in lines[arms[0]]
    ]
