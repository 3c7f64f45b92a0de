"""A radar chart of the five scores: for the terminal, and as one SVG file that opens anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from launch.predict.score import BELOW, LINE

TOP = 10.0
BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of the dot in column and row of a braille character."""
Point = tuple[float, float]


class Canvas:
    """Dots on a grid of braille characters, two columns and four rows each."""

    def __init__(self, columns: int, rows: int) -> None:
        """Make an empty one."""
        self.columns, self.rows = columns, rows
        self._cells = [[0] * columns for _ in range(rows)]
        self._texts: dict[tuple[int, int], str] = {}

    def dot(self, x: float, y: float) -> None:
        """Set one dot; what lies outside is left out."""
        column, row = math.floor(x), math.floor(y)
        if 0 <= column < 2 * self.columns and 0 <= row < 4 * self.rows:
            self._cells[row // 4][column // 2] |= DOTS[column % 2][row % 4]

    def line(self, a: Point, b: Point, *, every: int = 1) -> None:
        """Draw a line; of `every` dots one."""
        steps = max(1, math.ceil(max(abs(b[0] - a[0]), abs(b[1] - a[1]))))
        for step in range(0, steps + 1, every):
            share = step / steps
            self.dot(a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share)

    def write(self, column: int, row: int, text: str) -> None:
        """Write a text over the dots."""
        for place, letter in enumerate(text):
            if 0 <= column + place < self.columns and 0 <= row < self.rows:
                self._texts[column + place, row] = letter

    def lines(self) -> list[str]:
        """Return the canvas as text."""
        return [
            "".join(
                self._texts.get((column, row)) or (chr(BRAILLE + bits) if bits else " ")
                for column, bits in enumerate(cells)
            ).rstrip()
            for row, cells in enumerate(self._cells)
        ]


def terminal(scores: Mapping[str, float], *, columns: int = 64, rows: int = 22) -> list[str]:
    """Return the chart as lines of text: the scores as a solid line, the warning line dotted."""
    canvas = Canvas(columns, rows)
    centre = (columns * 1.0, rows * 2.0 + 1)
    radius = min(columns - 30.0, rows * 2.0 - 6)
    names = list(scores)

    def at(index: int, value: float) -> Point:
        return _at(index, len(names), value, centre, radius)

    for index, name in enumerate(names):
        following = (index + 1) % len(names)
        canvas.line(centre, at(index, TOP), every=3)
        canvas.line(at(index, TOP), at(following, TOP), every=6)
        canvas.line(at(index, LINE), at(following, LINE), every=3)
        canvas.line(at(index, scores[name]), at(following, scores[names[following]]))
    for index, name in enumerate(names):
        x, y = at(index, TOP + 1)
        said = f"{name} {scores[name]:.1f}"
        column = round(x / 2)
        column -= len(said) // 2 if abs(x - centre[0]) < 4 else len(said) if x < centre[0] else 0
        column = max(0, min(column, columns - len(said)))
        canvas.write(column, min(rows - 1, max(0, int(y // 4))), said)
    return canvas.lines()


def _at(index: int, count: int, value: float, centre: Point, radius: float) -> Point:
    angle = 2 * math.pi * index / count - math.pi / 2
    length = radius * value / TOP
    return centre[0] + length * math.cos(angle), centre[1] + length * math.sin(angle)


def svg(
    scores: Mapping[str, float],
    standings: Mapping[str, str],
    *,
    before: Mapping[str, float] | None = None,
    title: str = "Predictions",
) -> str:
    """Return the chart as an SVG document.

    Args:
        scores: dimension -> 0 to 10.
        standings: dimension -> where it stands to the warning line.
        before: the scores before this session, drawn thin.
        title: said above the chart.
    """
    width, height, radius = 880, 600, 190.0
    centre = (width / 2, 312.0)
    names = list(scores)

    def shape(values: Sequence[float]) -> str:
        points = [_at(i, len(names), v, centre, radius) for i, v in enumerate(values)]
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)

    rings = "".join(
        f'<polygon class="ring" points="{shape([value] * len(names))}"/>' for value in (2, 4, 8, 10)
    )
    axes, labels = [], []
    for index, name in enumerate(names):
        x, y = _at(index, len(names), TOP, centre, radius)
        axes.append(
            f'<line class="ring" x1="{centre[0]}" y1="{centre[1]}" x2="{x:.1f}" y2="{y:.1f}"/>'
        )
        x, y = _at(index, len(names), TOP + 1.1, centre, radius)
        near = abs(x - centre[0]) < 20
        anchor = "middle" if near else "end" if x < centre[0] else "start"
        y = y - 14 if y < centre[1] else y + 8
        low = " low" if standings.get(name) == BELOW else ""
        labels.append(
            f'<text class="name{low}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f"{escape(name)} {scores[name]:.1f}</text>"
            f'<text class="said" x="{x:.1f}" y="{y + 17:.1f}" text-anchor="{anchor}">'
            f"{escape(standings.get(name, ''))}</text>"
        )
    old = ""
    if before:
        old = f'<polygon class="before" points="{shape([before[name] for name in names])}"/>'
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        for x, y in (_at(i, len(names), scores[n], centre, radius) for i, n in enumerate(names))
    )
    told = ", ".join(f"{name} {scores[name]:.1f}" for name in names)
    line_x, line_y = _at(0, len(names), LINE, centre, radius)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="t d">'
        f'<title id="t">{escape(title)}</title><desc id="d">{escape(told)}; the warning line is at '
        f"{LINE:g} of {TOP:g}.</desc><style>{_STYLE}</style>"
        f'<rect class="paper" width="{width}" height="{height}"/>'
        f'<text class="title" x="32" y="44">{escape(title)}</text>{rings}{"".join(axes)}'
        f'<polygon class="warn" points="{shape([LINE] * len(names))}"/>{old}'
        f'<polygon class="score" points="{shape([scores[name] for name in names])}"/>{dots}'
        f'<text class="warned" x="{line_x + 8:.1f}" y="{line_y - 5:.1f}">{LINE:g}</text>'
        f"{''.join(labels)}"
        f'<text class="said" x="32" y="{height - 22}">5: no more than the base rates of the '
        f"corpus. Dashed: the warning line at {LINE:g}."
        f"{' Thin: before this session.' if before else ''}"
        "</text></svg>\n"
    )


_STYLE = """
svg { color-scheme: light dark; font: 15px ui-sans-serif, system-ui, -apple-system, "Segoe UI",
  Roboto, "Noto Sans", Arial, sans-serif; }
.paper { fill: #fdfdfc; } .title { font-size: 20px; font-weight: 650; fill: #1c2126; }
.ring { fill: none; stroke: #dcddd8; } .name { font-weight: 600; fill: #1c2126; }
.name.low, .warned { fill: #a8410a; } .said, .warned { font-size: 13px; } .said { fill: #59626b; }
.warn { fill: none; stroke: #a8410a; stroke-width: 1.5; stroke-dasharray: 6 4; }
.score { fill: #0b62a4; fill-opacity: .16; stroke: #0b62a4; stroke-width: 2.5; }
circle { fill: #0b62a4; } .before { fill: none; stroke: #59626b; stroke-width: 1; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #15181b; } .title, .name { fill: #e4e5e2; } .ring { stroke: #343a40; }
  .name.low, .warned { fill: #f29a62; } .warn { stroke: #f29a62; } .said { fill: #a0a8b0; }
  .score { fill: #6cb4ee; stroke: #6cb4ee; } circle { fill: #6cb4ee; } .before { stroke: #a0a8b0; }
}
""".strip()
