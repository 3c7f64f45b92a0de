"""The loss of one rank beside those of the others."""

from __future__ import annotations

import math
from statistics import median

from harness.causes.across import Side, each_rank, side_by_side
from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence
from harness.watch.naming import ranks

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


@cause(
    family="data",
    sees="The loss is NaN on all ranks from one update to the next, and so are all weights.",
    why="One rank's loss was NaN or infinite an update before: a bad row, a logarithm of zero, an "
    "overflow. Averaging hands its gradient to all ranks, and the replicas stay equal.",
    confirm="Print isfinite() of each rank's own loss before backward: one rank is first.",
    change="look at that rank's batch of that update; skip it on all ranks together",
    fix="""
bad = (~loss.detach().isfinite()).int()
dist.all_reduce(bad, op=dist.ReduceOp.MAX)
if bad:
    optimizer.zero_grad()
    continue                       # all ranks, or none
""",
)
def loss_not_finite_on_one_rank(evidence: Evidence) -> Diagnosis | None:
    """Recognise a loss that is not finite on some rank, and on all of them an update later."""
    sides = side_by_side(evidence, "update", "optimizer", "update")
    for side, after in zip(sides, [*sides[1:], None], strict=False):
        bad = _not_finite(side)
        if not bad:
            continue
        if len(bad) == len(side):
            return None
        spread = after is not None and len(_not_finite(after)) == len(after)
        (update,) = {event["update"] for event in side.values()}
        because = [f"{ranks(bad)} had a loss that is not finite before update {update}"]
        if spread:
            because.append("before the next one all ranks had, through the averaged gradient")
        first = side[bad[0]]
        return Diagnosis(
            strength=Strength.PROVEN if spread else Strength.FACT,
            because=tuple(because),
            where=next(iter(first.get("backward_at", ())), None),
            ranks=tuple(bad),
            step=update,
            explains=False,
        )
    return None


def _not_finite(side: Side) -> list[int]:
    return [
        rank
        for rank, event in sorted(side.items())
        if not all(map(math.isfinite, event.get("losses", ())))
    ]
