"""Heat maps over two swept keys: values in the cells, a logarithmic scale safe for all eyes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.report.markup import text
from harness.report.wording import DASH, number

RAMP = (
    *("#00224e", "#123570", "#3b496c", "#575d6d", "#707173"),
    *("#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"),
)
"""Cividis: its lightness rises evenly, and it looks the same to colour-blind readers."""
_LIGHT_FROM = 5
"""From this colour on, dark text reads better."""
ROW, LEFT, CELL = 30, 64, 48
"""Pixels: height of a row, width of the row labels, smallest width of a cell."""

HATCH = (
    '<svg class="cropped" aria-hidden="true"><defs><pattern id="hatch" width="6" height="6" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" style="fill:var(--warn-paper);stroke:none"/>'
    '<path d="M0 0V6" style="stroke:var(--warn);opacity:.45;stroke-width:2"/>'
    "</pattern></defs></svg>"
)
"""What cells without a value are filled with; stands once on a page."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What stands at one pair of values."""

    value: float | None
    problem: str = ""
    """Why there is no value: "failed", "refused", "not run"; empty = nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A logarithmic colour scale."""

    low: float
    high: float

    def colour(self, value: float) -> int:
        """Return the number of a colour; values of 0 get the lowest, infinities the highest."""
        if value <= self.low:
            return 0
        if value >= self.high:
            return len(RAMP) - 1
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return min(len(RAMP) - 1, int(share * len(RAMP)))


def scale(values: Sequence[float]) -> Scale | None:
    """Return the scale that holds all positive finite values; None if there is none."""
    found = [value for value in values if math.isfinite(value) and value > 0.0]
    return Scale(low=min(found), high=max(found)) if found else None


def draw(
    title: str,
    keys: tuple[str, str],
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[str, str], Cell],
    colours: Scale,
) -> str:
    """Return one map; `keys` are what goes down and across, `cells` are by (row, column)."""
    height = ROW * len(rows)
    wide = 100 / len(columns)
    parts = []
    for j, row in enumerate(rows):
        y = ROW * j
        parts.append(f'<text class="row" x="-8" y="{y + ROW / 2 + 4:.0f}">{text(row)}</text>')
        for i, column in enumerate(columns):
            cell = cells.get((row, column), Cell(value=None))
            parts.append(_cell(cell, i, wide, y, colours))
    for i, column in enumerate(columns):
        middle = (i + 0.5) * wide
        parts.append(f'<text x="{middle:.2f}%" y="{height + 16}">{text(column)}</text>')
    told = "; ".join(
        f"{keys[0]}={row} {keys[1]}={column}: {_told(cells.get((row, column)))}"
        for row in rows
        for column in columns
    )
    width = LEFT + CELL * len(columns)
    return (
        f'<div class="panel"><h4>{text(title)}</h4><div class="heat" tabindex="0">'
        f'<div style="padding:2px 4px 38px {LEFT}px;min-width:{width}px">'
        f'<svg role="img" width="100%" height="{height}"><title>{text(title)}</title>'
        f"<desc>{text(told)}</desc>{''.join(parts)}"
        f'<text x="50%" y="{height + 33}">{text(keys[1])}</text>'
        f'<text transform="translate({10 - LEFT} {height / 2:.0f}) rotate(-90)">'
        f"{text(keys[0])}</text></svg></div></div></div>"
    )


def _cell(cell: Cell, column: int, wide: float, y: int, colours: Scale) -> str:
    at = f'x="{column * wide:.2f}%" y="{y}" width="{wide:.2f}%" height="{ROW}"'
    place = f'x="{(column + 0.5) * wide:.2f}%" y="{y + ROW / 2 + 4:.0f}"'
    if cell.value is None or math.isnan(cell.value):
        look = "bad" if cell.problem or cell.value is not None else "none"
        return f'<rect class="{look}" {at}/><text class="cell plain" {place}>{_told(cell)}</text>'
    colour = colours.colour(cell.value)
    ink = "light" if colour >= _LIGHT_FROM else "dark"
    return (
        f'<rect {at} fill="{RAMP[colour]}"/><text class="cell {ink}" {place}>'
        f"{number(cell.value, 2)}</text>"
    )


def _told(cell: Cell | None) -> str:
    if cell is None or cell.value is None:
        return text(cell.problem if cell and cell.problem else DASH)
    return "NaN" if math.isnan(cell.value) else number(cell.value, 2)


def key(colours: Scale) -> str:
    """Return the legend of the scale."""
    steps = "".join(f'<i style="background:{colour}"></i>' for colour in RAMP)
    return (
        f'<p class="ramp">{number(colours.low, 2)} <span aria-hidden="true">{steps}</span> '
        f"{number(colours.high, 2)}, logarithmic; hatched: no value, because the point failed or "
        "the value is not a number</p>"
    )
