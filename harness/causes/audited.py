"""What the replay audits of a run say about ranks, micro-batches and factors. No cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.watch.evidence import Evidence
from harness.watch.journal import Event

RANKS, MICRO_BATCHES, EQUAL = "ranks", "micro-batches", "equal"
"""What weighs alike: each rank, each micro-batch, or each row."""
MATERIAL = 1.1
"""Weights that differ by less, as in the last batch of an epoch, are not worth an alarm."""
_EXACT = 1e-3
"""How near a factor has to be to the number that it is said to be."""


@dataclass(frozen=True)
class Audited:
    """The audits of an optimizer that agree on something."""

    events: tuple[Event, ...]
    """Those that say it, the first one first."""
    looks: int
    """Those that could have said it."""

    @property
    def first(self) -> Event:
        """The first one."""
        return self.events[0]

    @property
    def step(self) -> int:
        """Its update."""
        update: int = self.first["update"]
        return update

    @property
    def where(self) -> str | None:
        """The line that calls backward."""
        at: str | None = self.first["at"]
        return at

    @property
    def how_often(self) -> str:
        """Say in how many audits it was so."""
        return f"{len(self.events)} of {self.looks} audits"


def complete(evidence: Evidence) -> list[Event]:
    """Return the audits in which the gradients could be compared, in order of their updates."""
    found = [event for event in evidence.events("audit") if event["could_not"] is None]
    return sorted(found, key=lambda event: (event["optimizer"], event["update"]))


def agreeing(
    events: Sequence[Event], says: Callable[[Event], bool], share: float
) -> Audited | None:
    """Return the audits that say something, if so large a share of them does.

    Of several optimizers the first one counts whose audits do.
    """
    for number in sorted({event["optimizer"] for event in events}):
        mine = [event for event in events if event["optimizer"] == number]
        found = [event for event in mine if says(event)]
        if found and len(found) >= share * len(mine):
            return Audited(tuple(found), len(mine))
    return None


def is_averaged(event: Event) -> bool:
    """Say whether the gradient is the replayed one times a number, up to rounding."""
    return bool(event["synchronised"]["clean"])


def uneven(evidence: Evidence, alike: str) -> Audited | None:
    """Return the audits in which rows weigh unequally because ranks or micro-batches weigh alike.

    Args:
        evidence: the run.
        alike: RANKS or MICRO_BATCHES.
    """
    known = [event for event in complete(evidence) if event["losses"] and is_averaged(event)]
    return agreeing(known, lambda event: _is_uneven(event, alike), share=0.5)


def _is_uneven(event: Event, alike: str) -> bool:
    loss = main_loss(event)
    if loss["weighting"] != alike or not (event["one_process"] or {}).get("fault"):
        return False
    weights: list[float] = [abs(w) for row in loss["weights"].values() for w in row if w]
    return max(weights) > MATERIAL * min(weights)


def main_loss(event: Event) -> dict[str, Any]:
    """Return the loss whose weighting counts: the first uneven one that follows from counts."""
    losses: list[dict[str, Any]] = event["losses"]
    counted = [loss for loss in losses if loss["weighting"] in (RANKS, MICRO_BATCHES)]
    return counted[0] if counted else losses[0]


def counts(event: Event) -> dict[int, float]:
    """Return how many rows count on each rank, over its micro-batches."""
    return {int(rank): sum(row) for rank, row in main_loss(event)["counts"].items()}


def counts_follow_rows(event: Event) -> bool:
    """Say whether ranks count unequally only because they have batches of unequal size."""
    rows = {int(rank): sum(row) for rank, row in event["rows"].items()}
    counted = counts(event)
    return len({round(counted[rank] / rows[rank], 9) for rank in counted if rows[rank]}) == 1


def distance(event: Event) -> str:
    """Say how far the gradient is from that of one process, in the tensor that is farthest."""
    name, factor, residual, floor = event["one_process"]["tensors"][0]
    common = event["one_process"]["factor"]
    apart = max(residual, abs(factor / common - 1))
    return (
        f"the gradient of {name} is {apart:.2g} of its norm away from that, "
        f"{apart / floor:.2g} rounding floors"
    )


def times(evidence: Evidence, wanted: float) -> Audited | None:
    """Return the audits, if all of them, that found `wanted` times the gradient of one process.

    Only where there is one loss, and that a mean: a summed loss, or one loss beside others, may
    have any factor.
    """
    known = [
        event
        for event in complete(evidence)
        if is_averaged(event)
        and len(event["losses"]) == 1
        and event["losses"][0]["weighting"] == EQUAL
        and event["losses"][0]["how"] != "sum"
    ]
    return agreeing(known, lambda event: near(event["factor"], wanted), share=1.0)


def near(factor: float | None, wanted: float) -> bool:
    """Say whether a factor is a number, but for rounding."""
    return factor is not None and abs(factor / wanted - 1) < _EXACT


def accumulated(evidence: Evidence) -> int:
    """Return the number of micro-batches, if it is the same at all audited updates."""
    numbers = {
        len(row)
        for event in complete(evidence)
        for loss in event["losses"]
        for row in loss["counts"].values()
    }
    return numbers.pop() if len(numbers) == 1 else 1
