"""Copies of weights that follow the trained ones, and not on all ranks alike."""

from __future__ import annotations

from dataclasses import dataclass

from harness.causes.across import side_by_side
from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.watch.divergence import Difference
from harness.watch.evidence import Evidence


@dataclass(frozen=True)
class Parted:
    """Weights in no optimizer that were equal on all ranks, and are not any more."""

    names: list[str]
    module: str
    since: int
    """The last update before which they were equal."""
    update: int
    ranks: tuple[int, ...]

    def diagnosis(self, *more: str) -> Diagnosis:
        """Say so, and what else is known."""
        return Diagnosis(
            # Ranks may take turns with it, or each have a reason of its own.
            strength=Strength.LIKELY,
            because=(
                f"{listed(self.names)} of {self.module}, which every rank calls and no optimizer "
                f"holds, were equal on all ranks before update {self.since}, and not before "
                f"update {self.update}",
                *more,
            ),
            step=self.update,
            ranks=self.ranks,
            tensor=self.names[0],
            explains=False,
        )


def _parted(evidence: Evidence) -> Parted | None:
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
        return Parted(
            names=[names[number][place] for place in apart],
            module=first["class"],
            since=equal[number],
            update=first["update"],
            ranks=_odd({rank: own[apart[0]] for rank, own in digests.items()}),
        )
    return None


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
    found = _parted(evidence)
    return None if found is None or any(evidence.parts.values()) else found.diagnosis()


@cause(
    family="parallel layouts",
    sees="Replicas of a sharded optimizer part in some layers, or training is off and they agree.",
    why="Each rank updates its slice of the weights. A bucket whose slices are not handed around, "
    "or not before the next forward, leaves every rank with its own new slice among old ones.",
    confirm="Compare a checksum of all weights between ranks right before each forward.",
    change="gather every bucket, and wait for it before the next forward",
    fix="""
works = [dist.all_gather_into_tensor(b, own, async_op=True) for b, own in buckets]
for work in works:
    work.wait()
""",
    reported=("NVIDIA/Megatron-LM#663", "NVIDIA/Megatron-LM#950"),
)
def sharded_update_not_gathered(evidence: Evidence) -> Diagnosis | None:
    """Recognise replicas that part in no optimizer, where the optimizers hold slices."""
    found = _parted(evidence)
    slices = [name for names in evidence.parts.values() for name in names]
    if found is None or not slices:
        return None
    return found.diagnosis(f"the optimizer holds {listed(slices)}, another part on every rank")


def _odd(values: dict[int, int]) -> tuple[int, ...]:
    groups: dict[int, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    members = sorted((tuple(group) for group in groups.values()), key=lambda g: (-len(g), g))
    return Difference(name="", kind="parameter", groups=tuple(members)).odd
