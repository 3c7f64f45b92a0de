"""What a sweep's page draws: figures over each numeric key, heat maps over pairs of keys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report import heat, trellis
from harness.report.markup import text
from harness.report.trellis import Across, Curve, Panel, Spot
from harness.report.wording import TIMES, number

Row = Mapping[str, Any]
METRICS = {
    "loss_drift_last": "Loss of all ranks, distance from the reference",
    "loss_gap_last": "Loss gap across ranks",
}
"""Column -> what it is, at the last step."""
REPEAT = "seed"
"""The key whose values are repeats of one experiment, not points of an axis."""
MOST_PAIRS = 3
_ROLES = {"faulty": 1, "fixed": 2, "control": 3}
_SPARE = (4, 5, 6, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure in HTML, and how many of its panels are left out."""

    title: str
    html: str
    """With the title as its heading."""
    left_out: int = 0


def axes(swept: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the numeric keys to draw over; the seed only where there is no other key."""
    numeric = [
        key
        for key in swept
        if all(isinstance(row[key], int | float) and not isinstance(row[key], bool) for row in rows)
    ]
    others = [key for key in numeric if key != REPEAT]
    return others or (numeric if list(swept) == [REPEAT] else [])


def losses(swept: Sequence[str], arms: Sequence[Row], most: int) -> list[Figure]:
    """Return a figure per metric and key, with panels by reference and by the other keys."""
    figures: list[Figure] = []
    for metric, title in METRICS.items():
        rows = [row for row in arms if row.get(metric) is not None]
        for key in axes(swept, rows) if rows else []:
            across = _across(key, rows)
            panels = [
                panel
                for reference, mine in _by(rows, lambda row: row.get("loss_reference")).items()
                for panel in _loss_panels(metric, across, swept, reference, mine)
            ]
            figures.append(
                _figure(
                    f"{title}, over {short(key)}",
                    "absolute difference of the loss at the last step, log scale"
                    + _repeated(swept, key),
                    panels,
                    across,
                    most,
                    name=f"{metric}-{len(figures)}",
                )
            )
    return figures


def claims(swept: Sequence[str], findings: Sequence[Row], most: int) -> list[Figure]:
    """Return a figure per key: effect and floor of every claim that has a measured effect."""
    rows = [row for row in findings if row.get("effect") is not None]
    figures: list[Figure] = []
    for key in axes(swept, rows) if rows else []:
        across = _across(key, rows)
        panels, still = [], []
        for claim, mine in _by(rows, lambda row: row["claim"]).items():
            if not any(row["effect"] for row in mine):
                still.append(claim)
                continue
            for words, group in _others(mine, swept, key).items():
                panels.append(
                    Panel(
                        title=f"{claim}{f', {words}' if words else ''}",
                        curves=(_curve("", 1, group, "effect", across),),
                        floor=_floor(group, "floor", across),
                    )
                )
        note = f"Not drawn, exactly 0 at every point: {', '.join(still)}." if still else ""
        figures.append(
            _figure(
                f"Effect and floor of each claim, over {short(key)}",
                "in the unit of each claim, log scale" + _repeated(swept, key),
                panels,
                across,
                most,
                name=f"claims-{len(figures)}",
                axis_by=lambda panel: panel.title.partition(",")[0],
                note=note,
            )
        )
    return figures


def heats(
    swept: Sequence[str], points: Sequence[Row], arms: Sequence[Row], most: int
) -> list[Figure]:
    """Return a figure per metric and pair of keys, with a map for each arm."""
    keys = [key for key in swept if key != REPEAT]
    if len(keys) < 2:
        keys = list(swept)
    figures = []
    for pair in list(itertools.combinations(keys, 2))[:MOST_PAIRS]:
        for metric, title in METRICS.items():
            rows = [row for row in arms if row.get(metric) is not None]
            colours = heat.scale([row[metric] for row in rows])
            if colours is None:
                continue
            down, over = sorted(pair, key=lambda key: len({row[key] for row in points}))
            labels = _values(down, points), _values(over, points)
            maps = [
                heat.draw(
                    arm,
                    (short(down), short(over)),
                    *labels,
                    _cells(metric, (down, over), points, mine),
                    colours,
                )
                for arm, mine in _by(rows, lambda row: row["arm"]).items()
            ]
            rest = [key for key in swept if key not in pair]
            fold = f"; the largest over {', '.join(rest)}" if rest else ""
            name = f"{title}, {short(down)} {TIMES} {short(over)}"
            figures.append(
                Figure(
                    title=name,
                    html=f"<figure><figcaption><h3>{text(name)}</h3>"
                    f'<p class="sub">at the last step{text(fold)}</p></figcaption>'
                    f'{heat.key(colours)}<div class="heats">{"".join(maps[:most])}</div></figure>',
                    left_out=max(0, len(maps) - most),
                )
            )
    return figures


def short(key: str) -> str:
    """Return a key without the group it is in."""
    return key.rpartition(".")[2]


def words(key: str, value: Any) -> str:
    """Return one value of a key as it stands on an axis."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return str(value)


def _loss_panels(
    metric: str, across: Across, swept: Sequence[str], reference: str | None, rows: Sequence[Row]
) -> list[Panel]:
    looks = _colours(rows)
    panels = []
    for said, group in _others(rows, swept, across.key).items():
        curves = [
            _curve(arm, looks[arm], mine, metric, across)
            for arm, mine in _by(group, lambda row: row["arm"]).items()
        ]
        beside = f"beside {reference}" if reference else "no reference of their own"
        panels.append(
            Panel(
                title=f"{beside}{f', {said}' if said else ''}",
                curves=tuple(curves),
                floor=_floor(group, "loss_floor", across),
            )
        )
    return panels


def _colours(rows: Sequence[Row]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        if row["arm"] in found:
            continue
        own = _ROLES.get(row["role"], 0)
        spare = [n for n in _SPARE if n not in found.values()]
        found[row["arm"]] = own if own and own not in found.values() else (spare or _SPARE)[0]
    return found


def _curve(label: str, colour: int, rows: Sequence[Row], column: str, across: Across) -> Curve:
    values: dict[float, list[float]] = {x: [] for x in across.values}
    for row in rows:
        values[row[across.key]].append(row[column])
    spots = tuple(Spot(x=x, values=tuple(found)) for x, found in values.items())
    return Curve(label=label, colour=colour, spots=spots)


def _floor(rows: Sequence[Row], column: str, across: Across) -> tuple[tuple[float, float], ...]:
    found: dict[float, float] = {}
    for row in rows:
        value = row.get(column)
        if value is not None and math.isfinite(value) and value > 0.0:
            x = row[across.key]
            found[x] = max(value, found.get(x, value))
    return tuple(sorted(found.items()))


def _across(key: str, rows: Sequence[Row]) -> Across:
    return Across(key=key, values=tuple(sorted({row[key] for row in rows})))


def _others(rows: Sequence[Row], swept: Sequence[str], key: str) -> dict[str, list[Row]]:
    rest = [name for name in swept if name not in (key, REPEAT)]

    def said(row: Row) -> str:
        return ", ".join(f"{short(name)} {words(name, row[name])}" for name in rest)

    return _by(rows, said)


def _by(rows: Sequence[Row], of: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(of(row), []).append(row)
    return found


def _repeated(swept: Sequence[str], key: str) -> str:
    return f"; median and range over {REPEAT}" if REPEAT in swept and key != REPEAT else ""


def _figure(
    title: str,
    sub: str,
    panels: Sequence[Panel],
    across: Across,
    most: int,
    *,
    name: str,
    axis_by: Callable[[Panel], str] = lambda panel: "",
    note: str = "",
) -> Figure:
    groups = _group(panels, axis_by)
    scales = {said: trellis.axis_of(found) for said, found in groups.items()}
    drawn = [
        trellis.draw(panel, across, scales[axis_by(panel)], name=f"{name}-{at}", what=title)
        for at, panel in enumerate(panels[:most])
    ]
    legend = (
        '<ul class="legend"><li><span class="swatch floor"></span>rounding floor of the same '
        "points</li></ul>"
        if any(panel.floor for panel in panels)
        else '<p class="note">No rounding floor was measured for these.</p>'
        if panels
        else ""
    )
    return Figure(
        title=title,
        html=f"<figure><figcaption><h3>{text(title)}</h3><p class='sub'>{text(sub)}</p>"
        f"</figcaption>{legend}<div class='trellis'>{''.join(drawn)}</div>"
        + (f'<p class="note">{text(note)}</p>' if note else "")
        + "</figure>",
        left_out=max(0, len(panels) - most),
    )


def _group(panels: Sequence[Panel], of: Callable[[Panel], str]) -> dict[str, list[Panel]]:
    found: dict[str, list[Panel]] = {}
    for panel in panels:
        found.setdefault(of(panel), []).append(panel)
    return found


def _values(key: str, points: Sequence[Row]) -> list[str]:
    values = list(dict.fromkeys(row[key] for row in points))
    if all(isinstance(value, int | float) for value in values):
        values.sort()
    return [words(key, value) for value in values]


def _cells(
    metric: str, keys: tuple[str, str], points: Sequence[Row], rows: Sequence[Row]
) -> dict[tuple[str, str], heat.Cell]:
    found: dict[tuple[str, str], heat.Cell] = {}
    for point in points:
        if point["state"] in ("failed", "refused", "interrupted", "not run"):
            found[_at(keys, point)] = heat.Cell(value=None, problem=point["state"])
    for row in rows:
        at, value = _at(keys, row), row[metric]
        before = found[at].value if at in found else None
        if before is not None and (math.isnan(before) or before >= value):
            continue
        found[at] = heat.Cell(value=value)
    return found


def _at(keys: tuple[str, str], row: Row) -> tuple[str, str]:
    return words(keys[0], row[keys[0]]), words(keys[1], row[keys[1]])
