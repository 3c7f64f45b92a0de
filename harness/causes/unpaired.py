"""What ranks that are stuck or gone have left behind, as the rules on hangs read it. No cause."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.causes.rendezvous import is_rendezvous
from harness.errors import peer_was_lost
from harness.waiting import IN_VAIN
from harness.watch.evidence import Evidence
from harness.watch.hangs.pairing import (
    MISSING,
    PARTED,
    Call,
    Frame,
    Unpaired,
)
from harness.watch.hangs.reading import Loop, loops_left, loops_of, same_branching
from harness.watch.naming import ranks

FAMILY = "hangs"


def stack_of(content: Mapping[str, Any]) -> tuple[Frame, ...]:
    """Return the frames that were written down."""
    return tuple(Frame(path, int(line), name) for path, line, name in content.get("stack", ()))


def own_error(evidence: Evidence, rank: int) -> Mapping[str, Any] | None:
    """Return what the script raised on a rank, unless it only tells that others did not come."""
    error = evidence.ends.get(rank, {}).get("error")
    if error is None or is_rendezvous(error):
        return None
    said = str(error["message"])
    in_vain = peer_was_lost(said) or any(sign in said.lower() for sign in IN_VAIN)
    return None if in_vain and error["type"] != "AssertionError" else dict(error)


def failed_ranks(evidence: Evidence) -> list[int]:
    """Return the ranks that failed by themselves, the first one first."""
    own = [rank for rank in evidence.ends if own_error(evidence, rank) is not None]
    return sorted(own, key=lambda rank: float(evidence.ends[rank].get("time", 0)))


def lost_ranks(evidence: Evidence) -> list[int]:
    """Return the ranks that were gone first, without a word."""
    silent = {r: float(gone["time"]) for r, gone in evidence.gone.items() if r not in evidence.ends}
    first = min(silent.values(), default=0.0)
    return [rank for rank, when in silent.items() if when - first < 0.005]


def undisturbed(evidence: Evidence) -> Unpaired | None:
    """Return the call without a partner, if no rank raised or was killed."""
    found = evidence.unpaired
    return None if found is None or failed_ranks(evidence) or lost_ranks(evidence) else found


def waits(found: Unpaired) -> str:
    """Say who is left with which call."""
    return f"{ranks(found.others)} called {found.expected} and waited for {ranks(found.odd)}"


def loops_that_were_left(evidence: Evidence, found: Unpaired) -> list[Loop]:
    """Return the loops in which the others wait and that the odd rank is out of, outer first."""
    expected = found.expected
    rank = found.odd[0]
    mine = found.calls[rank]
    outside: tuple[Frame, ...] = ()
    if mine is not None:
        outside = mine.via
    elif rank not in evidence.ends:
        outside = stack_of(evidence.stalls.get(rank, {}))
        if not outside:
            return []
    elif (error := evidence.ends[rank].get("error")) is not None:
        outside = stack_of(error)
    left: list[Loop] = []
    parted = False
    pairs = list(zip(reversed(expected.via), reversed(outside), strict=False))
    for inside_frame, outside_frame in pairs:
        if parted:
            break
        if inside_frame == outside_frame:
            continue
        if inside_frame[::2] != outside_frame[::2]:
            return []
        left += loops_left(inside_frame.path, inside_frame.line, outside_frame.line)
        if not left and loops_of(inside_frame.path, inside_frame.line):
            # Both are in the same loop, at different lines.
            return []
        parted = True
    depth = len(pairs) if not parted else 1 + next(i for i, (a, b) in enumerate(pairs) if a != b)
    if not parted and outside:
        return []
    for frame in list(reversed(expected.via))[depth if outside else 0 :]:
        left += loops_of(frame.path, frame.line)
    return left


def batches_of_ranks(evidence: Evidence) -> dict[int, int]:
    """Return rank -> batches of its last pass over the loader it trains from, as far as known."""
    found = {}
    for rank in evidence.ranks:
        passes = [e for e in evidence.events("pass", rank) if e.get("grad")]
        if passes:
            found[rank] = int(passes[-1]["batches"])
    return found


def has_left(evidence: Evidence) -> tuple[Unpaired, list[Loop]] | None:
    """Return the call that has no partner, and the loops that the ranks without it have left."""
    found = undisturbed(evidence)
    if found is None or found.kind not in (MISSING, PARTED) or skipping_ranks(evidence):
        return None
    if found.kind == PARTED and found.fits():
        return None
    if found.kind == MISSING and not all(cannot_come(evidence, rank) for rank in found.odd):
        return None
    left = loops_that_were_left(evidence, found)
    return (found, left) if left else None


def cannot_come(evidence: Evidence, rank: int) -> bool:
    """Say whether a rank that has not called will not do so any more."""
    stall = evidence.stalls.get(rank, {})
    return rank in evidence.ends or bool(stall.get("waiting") or stall.get("still"))


def is_the_other_branch(call: Call, other: Call) -> bool:
    """Say whether one condition leads to the two calls, so that each rank makes one of them."""
    parts = zip(reversed(call.via), reversed(other.via), strict=False)
    mine, theirs = next(((a, b) for a, b in parts if a != b), (None, None))
    if mine is None or theirs is None or mine.path != theirs.path:
        return False
    return same_branching(mine.path, mine.line, theirs.line)


def calls_at(evidence: Evidence, of: tuple[int, ...], call: Call) -> bool:
    """Say whether any of the ranks has made such a call from the same line, ever."""
    return any(
        call.via == made.via and call.operation == made.operation
        for rank in of
        if rank in evidence.calls
        for calls in evidence.calls[rank].made.values()
        for made in calls
    )


def skipping_ranks(evidence: Evidence) -> dict[int, tuple[int, dict[str, Any]]]:
    """Return rank -> (update, window) in which it made a forward pass without its backward.

    Only where other ranks made one for each in all their windows.
    """
    skipped: dict[int, tuple[int, dict[str, Any]]] = {}
    for rank in evidence.ranks:
        windows = [(int(w["update"]), dict(w)) for w in evidence.updates(rank)]
        stall = evidence.stalls.get(rank)
        if stall is not None:
            windows.append((int(stall["updates"]), dict(stall["since_update"])))
        for update, window in windows:
            made = window.get("forwards", 0) - window.get("forwards_without_sync", 0)
            if made > window.get("backwards", 0) > 0:
                skipped.setdefault(rank, (update, window))
    return skipped if len(skipped) < len(evidence.ranks) else {}
