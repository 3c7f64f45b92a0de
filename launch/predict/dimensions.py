"""The five dimensions that predictions are scored in, and the scenarios that feed each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

import scenarios


class Dimension(str, Enum):
    """What somebody has to foresee."""

    STATE = "state"
    """Train and eval, buffers, statistics, what a checkpoint holds."""
    DYNAMICS = "training dynamics"
    """Learning rates, schedules, optimizers."""
    GRADIENTS = "gradient computation"
    """What backward computes, and what a reduction or a clip makes of it."""
    NUMBERS = "number formats"
    """Ranges, rounding, loss scales, what hardware does to a sum."""
    RANKS = "many ranks"
    """Data, randomness, collectives, hangs: what only several ranks show."""


FAMILIES: Mapping[str, Dimension] = {
    "buffers": Dimension.STATE,
    "initial state": Dimension.STATE,
    "resume": Dimension.STATE,
    "optimizer state": Dimension.DYNAMICS,
    "initialisation": Dimension.DYNAMICS,
    "memory": Dimension.NUMBERS,
    "schedule": Dimension.DYNAMICS,
    "gradients": Dimension.GRADIENTS,
    "normalisation": Dimension.GRADIENTS,
    "clipping": Dimension.GRADIENTS,
    "synchronisation": Dimension.GRADIENTS,
    "numerics": Dimension.NUMBERS,
    "precision": Dimension.NUMBERS,
    "scaling": Dimension.NUMBERS,
    "data": Dimension.RANKS,
    "hangs": Dimension.RANKS,
    "metrics": Dimension.RANKS,
    "parallel layouts": Dimension.RANKS,
    "random numbers": Dimension.RANKS,
    "rendezvous": Dimension.RANKS,
    "sharded layouts": Dimension.RANKS,
}
"""The dimension of a family, but for the scenarios below."""

SCENARIOS: Mapping[str, Dimension] = {
    "bn_half_stats": Dimension.NUMBERS,
    "chain_of_sigmoids": Dimension.GRADIENTS,
    "clip_allreduce": Dimension.RANKS,
    "clip_before_unscale": Dimension.NUMBERS,
    "clip_fraction": Dimension.DYNAMICS,
    "dropout_left_on": Dimension.STATE,
    "dropout_scale": Dimension.GRADIENTS,
    "logsoftmax_drift": Dimension.NUMBERS,
    "stable_dropout": Dimension.GRADIENTS,
    "stale_optimizer": Dimension.DYNAMICS,
    "vanishing_gradient": Dimension.GRADIENTS,
}
"""Scenarios that ask for something else than their family does."""


def dimension(name: str) -> Dimension | None:
    """Return the dimension of a scenario; None if neither it nor its family stands in a table."""
    return SCENARIOS.get(name) or FAMILIES.get(scenarios.load(name).family)


def shelves(names: Iterable[str]) -> dict[Dimension, list[str]]:
    """Return the scenarios of each dimension; what stands in no table is in none."""
    found: dict[Dimension, list[str]] = {item: [] for item in Dimension}
    for name in names:
        where = dimension(name)
        if where is not None:
            found[where].append(name)
    return found
