"""What a chart is made of: panels that share their axes, and the lines in them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from harness.report.axis import Axis

Points = dict[int, float]
"""Step -> value."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Where a line begins and ends, and its extremes."""

    first: float
    last: float
    low: float | None
    """The smallest finite value; None if there is none."""
    high: float | None
    count: int
    odd: int
    """How many values are not finite."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart."""

    arms: tuple[str, ...]
    """The arms it stands for: more than one if they agree bit for bit."""
    label: str
    """The ranks it stands for, in words."""
    rank: int
    """The lowest of them; it decides the dash."""
    points: Points
    edge: bool = False
    """True for the upper and lower edge of a band over many ranks."""

    @functools.cached_property
    def span(self) -> Span:
        """Return the line's ends and extremes."""
        values = list(self.points.values())
        # One sum is finite only if all are, and costs far less than asking each.
        finite = values if math.isfinite(sum(values)) else [v for v in values if math.isfinite(v)]
        return Span(
            first=self.points[min(self.points)],
            last=self.points[max(self.points)],
            low=min(finite, default=None),
            high=max(finite, default=None),
            count=len(values),
            odd=len(values) - len(finite),
        )


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One set of axes."""

    lines: tuple[Line, ...]
    reference: bool = False
    """True if it shows an arm that is a reference and has one line."""

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The arms that share a line, group by group."""
        return list(dict.fromkeys(line.arms for line in self.lines))


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One metric over the steps; all panels share both axes."""

    title: str
    metric: str
    phase: str | None
    unit: str
    axis: Axis
    first: int
    last: int
    floor: float | None
    panels: tuple[Panel, ...]
    notes: tuple[str, ...]

    @property
    def shared(self) -> bool:
        """True if the arms are drawn over each other in one panel."""
        return len(self.panels) == 1 and len(self.panels[0].groups) > 1

    @property
    def height(self) -> int:
        """Height of each panel's axes in pixels: fewer panels are wider and may be taller."""
        return 260 if len(self.panels) < 2 else 190 if len(self.panels) < 4 else 132

    @property
    def labels(self) -> int:
        """About how many ticks an axis has room for."""
        return 3 if len(self.panels) > 3 else 5

    @property
    def reference(self) -> int | None:
        """The panel whose first line the others are compared with; None if they share one."""
        if len(self.panels) < 2:
            return None
        found = [at for at, panel in enumerate(self.panels) if panel.reference]
        return found[0] if found else None
