"""The loss of one rank beside those of the others."""

from __future__ import annotations

import math
from statistics import median

from harness.causes.across import each_rank, side_by_side
from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence

_FEWEST = 8
"""Updates from which on a gap is more than a batch or two."""
_FAR = 10.0


@cause(
    family="data",
    sees="The loss of one rank is ten times that of the others, all the time, or a tenth of it.",
    why="Ranks have losses of their own, and replicas that are equal say nothing of their data: "
    "one rank reads other files, other units, labels that are shifted, or mostly padding.",
    confirm="Compute the loss of one fixed batch on every rank: equal replicas give equal numbers, "
    "and the gap is in the data.",
    change="compare what that rank reads with what the others read; log the mean over all ranks",
    fix="""
# The same batch on every rank: the loss differs only where replicas do.
with torch.no_grad():
    probe = loss_of(model(fixed_batch))
""",
)
def loss_far_from_others(evidence: Evidence) -> Diagnosis | None:
    """Note a rank whose loss is an order of magnitude away from every other's."""
    ratios: dict[int, list[float]] = {rank: [] for rank in evidence.ranks}
    shown: dict[int, float] = {}
    for side in side_by_side(evidence, "update", "optimizer", "update"):
        losses = {rank: event.get("losses", [None])[0] for rank, event in side.items()}
        values = {rank: abs(loss) for rank, loss in losses.items() if loss and math.isfinite(loss)}
        if len(values) < len(side):
            continue
        shown = values
        for rank, value in values.items():
            others = median(other for peer, other in values.items() if peer != rank)
            ratios[rank].append(value / others)
    for rank, seen in ratios.items():
        # Of two ranks each is far from the other; the larger loss is the one that is looked at.
        far = sum(ratio > _FAR for ratio in seen)
        near = sum(ratio < 1 / _FAR for ratio in seen) if len(ratios) > 2 else 0
        if len(seen) >= _FEWEST and max(far, near) >= 0.9 * len(seen):
            return Diagnosis(
                strength=Strength.FACT,
                because=(
                    f"over {len(seen)} updates the loss was {median(seen):.2g} times that of the "
                    f"other ranks; last: {each_rank(shown, '{:.3g}'.format)}",
                ),
                ranks=(rank,),
                explains=False,
            )
    return None
