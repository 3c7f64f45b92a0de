"""How predictions are scored: properly, so that nobody gains by saying what they do not believe.

5 is what somebody gets who only knows the base rates of the corpus, 10 is certain and right, and
below 5 is certain and wrong.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence

OUTCOMES = ("holds", "refuted", "partly")
LINE = 6.0
"""The warning line: a fifth better than the base rates."""
COVERAGE = 0.8
"""How sure an interval is to be; the bootstrap's as well."""
PRIOR = 2
"""The score is drawn towards 5 as if so many items had been answered by the base rates."""
ENOUGH = 5
"""With fewer items a dimension is neither above the line nor below it."""
SMALLEST = 1e-17
"""An effect of 0 counts as this: below what rounding in float64 leaves."""
DRAWS = 2000
ABOVE, BELOW, OPEN, FEW = "above the line", "below the line", "undecided", "not enough items"


def brier(probabilities: Mapping[str, float], outcome: str) -> float:
    """Return the multi-category Brier score: 0 is certain and right, 2 certain and wrong."""
    return sum((probabilities.get(name, 0.0) - (name == outcome)) ** 2 for name in OUTCOMES)


def reference(rates: Mapping[str, float]) -> float:
    """Return the Brier score that the base rates themselves get on average."""
    return 1.0 - sum(rate**2 for rate in rates.values())


def verdict_skill(
    probabilities: Mapping[str, float], outcome: str, rates: Mapping[str, float]
) -> float:
    """Return how much better than the base rates: 1 is perfect, 0 as good, below 0 worse."""
    return 1.0 - brier(probabilities, outcome) / reference(rates)


def interval_score(low: float, high: float, effect: float) -> float:
    """Return the interval score in powers of ten: width, and a penalty for each that is missed."""
    a, b = sorted((_log(low), _log(high)))
    x = _log(effect)
    missed = max(0.0, a - x) + max(0.0, x - b)
    return b - a + 2 / (1 - COVERAGE) * missed


def number_skill(interval: Sequence[float], effect: float, known: Sequence[float]) -> float:
    """Return how much better an interval is than one that only knows the effects of the corpus.

    Args:
        interval: smallest and largest effect that is expected, 80 % sure.
        effect: what was measured.
        known: effects of the corpus, of which the reference is the middle 80 %.
    """
    ours = interval_score(interval[0], interval[1], effect)
    usual = usual_interval(known)
    theirs = statistics.fmean(interval_score(*usual, x) for x in known) if known else 0.0
    return 1.0 - ours / (theirs or interval_score(*usual, math.sqrt(usual[0] * usual[1])))


def usual_interval(known: Sequence[float]) -> tuple[float, float]:
    """Return the middle 80 % of the effects of the corpus; without any, all that can be."""
    if len(known) < 10:
        return SMALLEST, 1e3
    logs = sorted(map(_log, known))
    tenths = statistics.quantiles(logs, n=10, method="inclusive")
    return float(10 ** tenths[0]), float(10 ** tenths[-1])


def dimension_score(skills: Sequence[float]) -> float:
    """Return the score from 0 to 10, drawn towards 5 where few items were answered."""
    if not skills:
        return 5.0
    raw = raw_score(skills)
    return (raw * len(skills) + 5.0 * PRIOR) / (len(skills) + PRIOR)


def raw_score(skills: Sequence[float]) -> float:
    """Return the score from 0 to 10 as the items alone give it."""
    return min(10.0, max(0.0, 5.0 + 5.0 * statistics.fmean(skills)))


def standing(skills: Sequence[float], seed: int = 0) -> str:
    """Return where a dimension stands to the warning line, by a bootstrap over its items."""
    if len(skills) < ENOUGH:
        return FEW
    rng = random.Random(seed)  # noqa: S311 no secret depends on it
    means = sorted(dimension_score(rng.choices(skills, k=len(skills))) for _ in range(DRAWS))
    edge = round((1 - COVERAGE) / 2 * DRAWS)
    if means[edge] > LINE:
        return ABOVE
    return BELOW if means[-edge - 1] < LINE else OPEN


def _log(value: float) -> float:
    return math.log10(max(abs(value), SMALLEST)) if math.isfinite(value) else 300.0
