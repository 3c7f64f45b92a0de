"""Copies of weights that follow the trained ones, and not on all ranks alike."""

from __future__ import annotations

from harness.causes.across import side_by_side
from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.watch.divergence import Difference
from harness.watch.evidence import Evidence


@cause(
    family="optimizer state",
    sees="Ranks train towards other targets, or with other weights than their optimizer has; "
    "replicas of what the optimizer holds agree.",
    why="A teacher, a target network or a copy in half precision is written by the script itself, "
    "and on some ranks only. No optimizer holds it, and DDP sends it around once, if at all.",
    confirm="Print a checksum of its weights on every rank after each update.",
    change="write the copy on every rank, or send it around after it was written",
    fix="""
with torch.no_grad():                  # on every rank, not behind `if rank == 0`
    for ours, theirs in zip(target.parameters(), online.parameters()):
        ours.lerp_(theirs, 0.01)
""",
)
def copied_weights_differ(evidence: Evidence) -> Diagnosis | None:
    """Recognise weights in no optimizer that were equal on all ranks, and are not any more."""
    names: dict[int, list[str]] = {}
    equal: dict[int, int] = {}
    for side in side_by_side(evidence, "copy", "number", "update"):
        first = side[evidence.ranks[0]]
        number, digests = int(first["number"]), {rank: e["digests"] for rank, e in side.items()}
        if "names" in first:
            # Others by now: that those before were equal says nothing of them.
            names[number] = first["names"]
            equal.pop(number, None)
        if len({len(own) for own in digests.values()}) > 1:
            continue
        rows = enumerate(zip(*digests.values(), strict=True))
        apart = [place for place, row in rows if len(set(row)) > 1]
        if not apart:
            equal[number] = first["update"]
            continue
        # Parts of a model, and models of each rank's own, were never equal.
        if number not in equal or not all(event["calls"] for event in side.values()):
            continue
        unequal = [names[number][place] for place in apart]
        return Diagnosis(
            # Ranks may take turns with it, or each have a reason of its own.
            strength=Strength.LIKELY,
            because=(
                f"{listed(unequal)} of {first['class']}, which every rank calls and no optimizer "
                f"holds, were equal on all ranks before update {equal[number]}, and not before "
                f"update {first['update']}",
            ),
            step=first["update"],
            ranks=_odd({rank: own[apart[0]] for rank, own in digests.items()}),
            tensor=unequal[0],
            explains=False,
        )
    return None


def _odd(values: dict[int, int]) -> tuple[int, ...]:
    groups: dict[int, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    members = sorted((tuple(group) for group in groups.values()), key=lambda g: (-len(g), g))
    return Difference(name="", kind="parameter", groups=tuple(members)).odd
