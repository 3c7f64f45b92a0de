"""What the loss of an update is made of, as the rules on losses read it. No cause."""

from __future__ import annotations

from dataclasses import dataclass

from harness.causes.across import averages
from harness.watch.evidence import Evidence
from harness.watch.journal import Event


@dataclass(frozen=True)
class Main:
    """The main term of a loss: the first mean whose units are counted, or the first sum."""

    weight: float
    count: float
    factor: float
    mean: bool
    weighted: bool
    by: tuple[tuple[str, float], ...]


def main_term(window: Event, place: int = 0) -> Main | None:
    """Return the main term of the loss of a backward pass, without a loss scale."""
    counted = counted_terms(window, place)
    # Smoothing of labels adds a sum to the mean, and divides it by the same number.
    return next((term for term in counted if term.mean), next(iter(counted), None))


def counted_terms(window: Event, place: int = 0) -> list[Main]:
    """Return the terms of the loss of a backward pass whose units are counted."""
    losses = window.get("loss_terms", ())
    if place >= len(losses):
        return []
    scales = window.get("loss_scales", ())
    scale = scales[place] if place < len(scales) else 1.0
    return [
        Main(weight / scale, count, factor / scale, mean, weighted, tuple(map(tuple, by)))
        for _, weight, count, factor, mean, weighted, by in losses[place]
        if count
    ]


def averaged_by_torch(evidence: Evidence) -> bool:
    """Say whether torch averages the gradients over all ranks, and nobody put in a hook."""
    wraps = list(evidence.events("inputs"))
    return (
        evidence.world_size > 1
        and bool(wraps)
        and all(averages(e, evidence) and not e.get("hooks") for e in wraps)
    )
