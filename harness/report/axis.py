"""A value axis: where a value stands between bottom and top, and which values get a tick."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from harness.report.wording import number

LARGEST = 1e270
"""Where every axis ends: beyond it, and below its inverse, the arithmetic of axes overflows."""
SHELF = 0.1
"""Share of a logarithmic axis kept free below its smallest value, for exact zeros."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One labelled place on an axis."""

    at: float
    """0 = bottom or left, 1 = top or right."""
    label: str


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The values from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    zero: bool = False
    """True if a logarithmic axis has a shelf for exact zeros under `low`."""

    def place(self, value: float) -> float:
        """Return where a finite value stands, 0 = bottom, 1 = top."""
        return min(1.0, max(0.0, self._place(value)))

    def _place(self, value: float) -> float:
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        shelf = SHELF if self.zero else 0.0
        if value <= 0.0:
            return 0.0
        low = math.log10(self.low)
        return shelf + (1 - shelf) * (math.log10(value) - low) / (math.log10(self.high) - low)

    def depths(self, places: Iterable[float]) -> list[int]:
        """Return where finite values stand in thousandths, 0 = top, 1000 = bottom."""
        values = list(places)
        if not self.log:
            scale, top = 1000.0 / (self.high - self.low), self.high
            try:
                found = [round((top - value) * scale) for value in values]
            except OverflowError:
                return [round(1000.0 * (1.0 - self.place(value))) for value in values]
            inside = not found or (min(found) >= 0 and max(found) <= 1000)
            return found if inside else [min(1000, max(0, depth)) for depth in found]
        shelf = SHELF if self.zero else 0.0
        top, log10 = math.log10(self.high), math.log10
        scale, low = 1000.0 * (1 - shelf) / (top - log10(self.low)), self.low
        least = 1000 - round(1000 * shelf)
        return [
            max(0, round((top - log10(v)) * scale)) if v >= low else least if v > 0.0 else 1000
            for v in values
        ]

    @property
    def base(self) -> float:
        """What tick labels are relative to: not 0 where the range is a sliver of the values."""
        if self.log or self.high - self.low > 1e-4 * max(abs(self.low), abs(self.high)):
            return 0.0
        return self.low

    def ticks(self, most: int = 5) -> list[Tick]:
        """Return at most about `most` ticks at round values."""
        if self.log:
            return self._log_ticks(most)
        base = self.base
        low, high = self.low - base, self.high - base
        step = _round_step((high - low) / most)
        values = [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return [Tick(at=self.place(base + value), label=_label(value, step)) for value in values]

    def _log_ticks(self, most: int) -> list[Tick]:
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        every = max(1, math.ceil((last - first + 1) / most))
        values = [10.0**k for k in range(first, last + 1) if (last - k) % every == 0]
        if len(values) < 2:
            steps = [m * 10.0**k for k in range(first - 1, last + 2) for m in (1, 2, 5)]
            values = [value for value in steps if self.low <= value <= self.high]
        ticks = [Tick(at=self.place(value), label=_power(value)) for value in values]
        return [Tick(at=0.0, label="0"), *ticks] if self.zero else ticks


def fit(values: Iterable[float], *, log: bool, floor: float | None) -> Axis:
    """Return an axis that shows all finite values and the floor.

    A logarithmic axis is given up if there are negative values, or no positive one.
    """
    finite = [
        min(LARGEST, max(-LARGEST, value))
        for value in (*values, floor)
        if value is not None and math.isfinite(value) and (value > 0.0 or value is not floor)
    ]
    if not finite:
        return Axis(low=0.0, high=1.0)
    low, high = min(finite), max(finite)
    if log and low >= 0.0 and high > 0.0:
        positive = max(1 / LARGEST, min(value for value in finite if value > 0.0))
        high = max(high, positive)
        top = math.log10(high)
        span = max(top - math.log10(positive), 0.5)
        bottom = 10 ** (math.log10(positive) - 0.06 * span)
        return Axis(low=bottom, high=10 ** (top + 0.06 * span), log=True, zero=low == 0.0)
    if floor is not None:
        low = min(low, 0.0)
    pad = 0.06 * (high - low) or 0.1 * abs(high)
    if pad < 1 / LARGEST:
        pad = 1.0
    # A curve that never goes below zero gets an axis that does not either.
    return Axis(low=max(low - pad, 0.0) if low >= 0.0 else low - pad, high=high + pad)


def step_ticks(first: int, last: int, most: int = 5) -> list[int]:
    """Return whole steps to label."""
    if first == last:
        return [first]
    step = max(1, int(_round_step((last - first) / most)))
    return list(range(math.ceil(first / step) * step, last + 1, step))


def _round_step(raw: float) -> float:
    if raw <= 0.0 or not math.isfinite(raw):
        return 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)


def _label(value: float, step: float) -> str:
    if abs(value) < step / 2:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
    return number(value)


def _power(value: float) -> str:
    if 1e-2 <= value < 1e4:
        return number(value)
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
