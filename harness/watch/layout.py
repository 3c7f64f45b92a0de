"""What the digests of a rank stand for: entries in the rank's own order of execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

START, GRADIENTS, PARAMETERS = "start", "gradients", "parameters"
"""Before the first update; before each update, gradients synchronised; after each update."""
EVALUATION = "evaluation"
"""At the first forward pass of an evaluation; `step` is the number of updates made until then."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that has a digest."""

    name: str
    kind: str
    """parameter, gradient, state or setting."""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    cohort: str = ""
    """Ranks with the same cohort hold replicas of it; a shard names its place in the mesh."""
    wrapped: bool = False
    """Below DistributedDataParallel, so due to be equal whatever it was before."""
    group: str = ""
    """The ranks of its wrapper's group, where these are not all ranks: `0 1`."""
    sampled: bool = False
    """From the second update on the digest is that of a sample."""
    parts: int = 0
    """At most updates the digest is that of one of so many parts, another one each time."""
    constant: bool = False
    """All its elements are the same to begin with, so that parts and replicas look alike."""
    method: str = ""
    """How the digest is made, if there are several ways: only like ones can be compared."""
    values: bool = False
    """The digest is the bits of a float64, which can be shown."""


@dataclass(frozen=True)
class Layout:
    """The entries of each phase of a step, of one rank, from some step on."""

    phases: dict[str, tuple[Entry, ...]]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {phase: [asdict(e) for e in entries] for phase, entries in self.phases.items()}

    @classmethod
    def from_json(cls, content: dict[str, list[dict[str, Any]]]) -> Layout:
        """Read what `to_json` wrote."""
        return cls({phase: read_entries(entries) for phase, entries in content.items()})


def read_entries(rows: Sequence[dict[str, Any]]) -> tuple[Entry, ...]:
    """Read entries that `asdict` wrote."""
    return tuple(
        Entry(**(row | {"shape": None if row["shape"] is None else tuple(row["shape"])}))
        for row in rows
    )


def index_of(step: int, phase: str) -> int:
    """Return the place of a phase of a step in a rank's order of execution."""
    return 0 if phase == START else 1 + 2 * step + (phase == PARAMETERS)


def place_of(index: int) -> tuple[int, str]:
    """Return step and phase: the inverse of `index_of`."""
    if index == 0:
        return 0, START
    return (index - 1) // 2, PARAMETERS if (index - 1) % 2 else GRADIENTS
