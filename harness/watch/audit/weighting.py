"""How the rows of all ranks and micro-batches are weighted against each other. No torch here.

A rank r and a micro-batch m hold n rows of a loss that count, each with the weight w. One process
would give all rows the same weight, 1 / (sum of all n) for a mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Cell: TypeAlias = tuple[int, int]
"""Rank and number of the micro-batch."""

EQUAL = "equal"
"""All rows weigh alike."""
RANKS = "ranks"
"""Each rank weighs alike, however many rows it has."""
MICRO_BATCHES = "micro-batches"
"""Each micro-batch weighs alike, however many rows it has."""
OTHER = "other"
"""In no way that follows from the number of rows."""
UNKNOWN = "unknown"
"""It could not be read."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One loss of the script over all ranks and micro-batches of an update."""

    kind: str
    how: str
    counts: Mapping[Cell, float]
    weights: Mapping[Cell, float]
    tolerance: float

    @property
    def total(self) -> float:
        """Rows of all ranks and micro-batches."""
        return sum(self.counts.values())

    @property
    def mean_weight(self) -> float:
        """Weight of a row, over all rows."""
        return sum(self.weights[c] * n for c, n in self.counts.items()) / (self.total or math.nan)

    @property
    def weighting(self) -> str:
        """Say how ranks and micro-batches are weighted."""
        cells = [cell for cell, count in self.counts.items() if count]
        if self._constant({cell: self.weights[cell] for cell in cells}):
            return EQUAL
        per_rank: dict[int, float] = defaultdict(float)
        across: dict[int, float] = defaultdict(float)
        micro: dict[int, int] = defaultdict(int)
        for rank, number in cells:
            per_rank[rank] += self.counts[rank, number]
            across[number] += self.counts[rank, number]
            micro[rank] += 1
        if self._constant({c: self.weights[c] * per_rank[c[0]] for c in cells}):
            return RANKS
        each = {c: self.weights[c] * self.counts[c] for c in cells}
        if self._constant(each) or self._constant({c: v * micro[c[0]] for c, v in each.items()}):
            same = all(
                self._constant({c: self.counts[c] for c in cells if c[0] == r}) for r in micro
            )
            return RANKS if same else MICRO_BATCHES
        if self._constant({c: self.weights[c] * across[c[1]] for c in cells}):
            return MICRO_BATCHES
        return OTHER

    def relative(self) -> dict[Cell, float]:
        """Return the weight of a row in each cell as a multiple of the weight of all rows."""
        mean = self.mean_weight
        return {cell: self.weights[cell] / mean for cell, n in self.counts.items() if n and mean}

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON: rank -> a number for each micro-batch."""
        ranks = sorted({rank for rank, _ in self.counts})
        relative = self.relative()
        return {
            "kind": self.kind,
            "how": self.how,
            "weighting": self.weighting,
            "counts": {
                str(r): [n for c, n in sorted(self.counts.items()) if c[0] == r] for r in ranks
            },
            "weights": {
                str(r): [w for c, w in sorted(relative.items()) if c[0] == r] for r in ranks
            },
        }

    def _constant(self, values: Mapping[Cell, float]) -> bool:
        low, high = min(values.values(), default=0.0), max(values.values(), default=0.0)
        return high - low <= self.tolerance * max(abs(low), abs(high))


def losses(backwards: Mapping[Cell, Mapping[str, Any]]) -> tuple[list[Loss], str | None]:
    """Line up the losses of all backward passes; return them, or why that cannot be done.

    Passes that are called from different lines are no micro-batches of one loss: a discriminator
    has one for what is real and one for what is not.

    Args:
        backwards: rank and number of the pass -> its line, and its losses with kind, how, count,
            weight, alike and tolerance.
    """
    sites: dict[str | None, dict[Cell, list[dict[str, Any]]]] = {}
    for cell, one in sorted(backwards.items()):
        sites.setdefault(one["at"], {})[cell] = one["losses"]
    found: list[Loss] = []
    for passes in sites.values():
        if not all(passes.values()):
            return [], "the loss is not one whose rows could be counted"
        if any(not one["alike"] for made in passes.values() for one in made):
            return [], "the script gives each row of a loss a weight of its own"
        structures = {tuple((o["kind"], o["how"]) for o in made) for made in passes.values()}
        if len(structures) > 1:
            return [], "the ranks or micro-batches have different losses"
        (structure,) = structures
        found += [_loss(passes, place, *about) for place, about in enumerate(structure)]
    return found, None if found else "the loss is not one whose rows could be counted"


def _loss(passes: Mapping[Cell, list[dict[str, Any]]], place: int, kind: str, how: str) -> Loss:
    return Loss(
        kind=kind,
        how=how,
        counts={cell: made[place]["count"] for cell, made in passes.items()},
        weights={cell: made[place]["weight"] for cell, made in passes.items()},
        tolerance=max(made[place]["tolerance"] for made in passes.values()),
    )


def corrections(found: Sequence[Loss]) -> dict[Cell, float] | None:
    """Return by what each backward pass has to be multiplied for all rows to weigh alike.

    None where the losses of one backward pass need different factors.
    """
    factors: dict[Cell, float] = {}
    together: dict[frozenset[Cell], list[Loss]] = defaultdict(list)
    for loss in found:
        together[frozenset(loss.counts)].append(loss)
    for cells, among in together.items():
        uneven = [loss for loss in among if loss.weighting != EQUAL]
        if not uneven:
            factors |= dict.fromkeys(cells, 1.0)
            continue
        main = max(uneven, key=lambda loss: abs(loss.mean_weight) * loss.total)
        mine = {cell: 1 / w if w else 0.0 for cell, w in main.relative().items()}
        for loss in among:
            others = [w * mine.get(cell, 0.0) for cell, w in loss.relative().items()]
            low, high = min(others, default=0.0), max(others, default=0.0)
            if high - low > main.tolerance * max(abs(low), abs(high)):
                return None
        factors |= dict.fromkeys(cells, 0.0) | mine
    return factors
