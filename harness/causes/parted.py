"""A rank that is gone in a collective of its own while another was in a backward pass. No cause.

A rank that gloo aborts, because what it got has another size, leaves its last call behind and no
record. Ranks in a backward pass are in reductions of gradients: the two were paired.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.causes.unpaired import lost_ranks
from harness.watch.evidence import Evidence
from harness.watch.hangs.reading import Loop, loops_apart


@dataclass(frozen=True)
class Parted:
    """Two ranks that went different ways, one of which is gone."""

    gone: int
    caller: int
    """The rank in a collective that its own code has called."""
    call: Mapping[str, Any]
    other: int
    backward_at: str | None
    """Where the other rank was in a backward pass."""

    def sentence(self) -> str:
        """Say what each of the two was in."""
        return (
            f"called {shown(self.call)} while rank {self.other} was in the backward pass at "
            f"{self.backward_at}, which reduces gradients: they were paired"
        )

    def loops(self) -> list[Loop]:
        """Return the loops around the backward pass that the caller was out of."""
        path, line = _place(self.call["at"])
        other_path, other_line = _place(self.backward_at)
        if not path or path != other_path:
            return []
        return loops_apart(path, other_line, line)


def parted(evidence: Evidence) -> Parted | None:
    """Return what the first rank that is gone was in, if another went on to something else."""
    if not any(evidence.events("wrap")):
        # Backward passes that send nothing are paired with nothing.
        return None
    for rank in lost_ranks(evidence):
        mine = evidence.last_calls.get(rank)
        for other, theirs in sorted(evidence.last_calls.items()):
            if mine is None or other == rank:
                continue
            if _went_on(theirs, mine):
                return Parted(rank, rank, mine, other, theirs["at"])
            if _went_on(mine, theirs):
                return Parted(rank, other, theirs, rank, mine["at"])
    return None


def _went_on(backward: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """Say whether a rank went into a backward pass without the call that another had made by then.

    Both had made as many updates; a rank that is slow has made fewer.
    """
    if backward["operation"] != "backward" or call["operation"] == "backward":
        return False
    fewer = bool(backward["count"] < call["count"])
    return fewer and int(backward.get("updates", -1)) >= int(call.get("updates", 0))


def shown(call: Mapping[str, Any]) -> str:
    """Return the last call of a rank in a few words, with its place."""
    sizes = ", ".join("x".join(map(str, shape)) or "1" for shape in call["shapes"][:2])
    what = f"{call['operation']} of {sizes} {call['dtype']}" if sizes else str(call["operation"])
    return f"{what} at {call['at']}"


def _place(at: str | None) -> tuple[str, int]:
    path, _, line = (at or "").rpartition(":")
    return (path, int(line)) if line.isdigit() else ("", 0)
