"""A run that hung or lost a rank: can it go on, and the answer where it cannot. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.causes import Diagnosis, Strength, catalogue, diagnose
from harness.watch.answers.answer import Answer
from harness.watch.answers.gathering import gather
from harness.watch.answers.per_rank import RankTable
from harness.watch.divergence import from_json
from harness.watch.evidence import Evidence
from harness.watch.exit_codes import STOPPED
from harness.watch.hangs.pairing import MISSING, Call, Unpaired
from harness.watch.meeting.folder import Folder
from harness.watch.naming import ranks

_AROUND = 4
"""Calls of each rank that are shown before the one without a partner."""
_FAMILIES = ("crashes", "hangs", "rendezvous")


def has_stopped(evidence: Evidence) -> bool:
    """Say whether a rank waited for more than it could get, raised, or was gone."""
    failed = any(end.get("error") for end in evidence.ends.values())
    return bool(failed or evidence.stalls or evidence.gone) or _nothing_follows(evidence)


def _nothing_follows(evidence: Evidence) -> bool:
    """Say whether the ranks came to no common end: a call that has no partner is the last."""
    found = evidence.unpaired
    if found is None:
        return False
    made = [evidence.calls[rank].made.get(found.group, ()) for rank in found.calls]
    last = {calls[-1].number if calls else 0 for calls in made}
    operations = {call.operation for call in found.calls.values() if call is not None}
    return len(last) > 1 or (len(operations) > 1 and last == {found.number})


def is_stuck(evidence: Evidence) -> bool:
    """Say whether the ranks that are waited for can never come: gone, ended, or waiting too."""
    waiting = _waiting(evidence)
    if not waiting:
        return False
    return all(
        rank in waiting
        or rank in evidence.ends
        or rank in evidence.gone
        or evidence.stalls.get(rank, {}).get("still")
        for rank in range(evidence.world_size)
    )


def first_waiting(evidence: Evidence) -> int | None:
    """Return the first rank that waits: its place is the one that answers."""
    return min(_waiting(evidence), default=None)


def _waiting(evidence: Evidence) -> list[int]:
    return [rank for rank, stall in evidence.stalls.items() if stall["waiting"]]


def exit_code(evidence: Evidence, diagnoses: Sequence[Diagnosis], otherwise: int) -> int:
    """Return the code for a run that stopped, if that is what the first diagnosis is about."""
    best = next((one for one in diagnoses if one.strength > Strength.FACT), None)
    if best is None or evidence.divergence is not None or not has_stopped(evidence):
        return otherwise
    return STOPPED if catalogue()[best.cause].family in _FAMILIES else otherwise


def symptom(evidence: Evidence) -> str | None:
    """Return the first line where the run has stopped and no cause fits."""
    found = evidence.unpaired
    raised = [rank for rank, end in evidence.ends.items() if end.get("error")]
    if len(raised) == evidence.world_size:
        # All have failed, each at a moment of its own.
        return None
    if found is not None and has_stopped(evidence):
        return f"{described(found)}; cause not known"
    waiting = {rank: stall for rank, stall in evidence.stalls.items() if stall["waiting"]}
    if not waiting:
        return None
    rank, stall = next(iter(waiting.items()))
    at = next((f"{path}:{line}" for path, line, _ in stall["stack"]), "an unknown line")
    others = [other for other in range(evidence.world_size) if other not in waiting]
    where = "; ".join(_where(evidence, other) for other in others)
    waits = f"{ranks(list(waiting))} waited at {at}, rank {rank} for {stall['idle']:.0f} s"
    return f"{waits}{'; ' + where if where else ''}; cause not known"


def described(found: Unpaired) -> str:
    """Say what does not fit."""
    call = found.expected
    if found.kind == MISSING:
        did = f"{ranks(found.others)} called {call}, {ranks(found.odd)} did not"
    else:
        mine = found.calls[found.odd[0]]
        other = found.calls[found.others[0]]
        did = f"{ranks(found.odd)} called {mine}, {ranks(found.others)} called {other}"
    return did


def _where(evidence: Evidence, rank: int) -> str:
    if rank in evidence.ends:
        return f"rank {rank} had ended"
    if rank in evidence.gone:
        return f"the process of rank {rank} was gone"
    stack = evidence.stalls.get(rank, {}).get("stack", ())
    return f"rank {rank} was at {stack[0][0]}:{stack[0][1]}" if stack else f"rank {rank}: not known"


def calls_table(evidence: Evidence) -> RankTable | None:
    """Return the calls of each rank around the first one without a partner."""
    found = evidence.unpaired
    rows: list[tuple[str, ...]] = []
    for rank, calls in sorted(evidence.calls.items()):
        if found is None:
            last = calls.last
            shown = calls.made[last.group][-_AROUND:] if last is not None else ()
        else:
            near = calls.made.get(found.group, ())
            shown = tuple(c for c in near if abs(c.number - found.number) <= _AROUND)
        for call in shown:
            here = found is not None and (call.group, call.number) == (found.group, found.number)
            rows.append(_row("->" if here else "", rank, call))
        if found is not None and found.calls.get(rank, ...) is None:
            rows.append(("->", str(rank), str(found.number), "no call", "", _where(evidence, rank)))
    titles = ("", "rank", "call", "operation", "elements", "at")
    return RankTable(titles=titles, rows=tuple(rows)) if rows else None


def _row(mark: str, rank: int, call: Call) -> tuple[str, ...]:
    size = f"{call.elements} {call.dtypes[0]}" if call.dtypes else ""
    operation = call.operation if call.done else f"{call.operation}, waits"
    return (mark, str(rank), str(call.number), operation, size, call.at or "")


def answer_to_stop(folder: Folder, members: Sequence[int], world_size: int) -> Answer:
    """Return the answer for a run that does not go on, from what its ranks have written."""
    found: list[dict[str, Any]] = [
        content for r in members if (content := folder.read(folder.finding(r))) is not None
    ]
    earliest = min(found, key=lambda one: from_json(one["found"]).order, default=None)
    evidence = gather(
        folder,
        members,
        world_size,
        divergence=None if earliest is None else from_json(earliest["found"]),
        source="" if earliest is None else earliest["source"],
    )
    notes = [note for end in evidence.ends.values() for note in end.get("notes", ())]
    return Answer(
        exit_code=STOPPED,
        first=symptom(evidence) or "the run has stopped; cause not known",
        divergence=evidence.divergence,
        source=evidence.source,
        diagnoses=tuple(diagnose(evidence)),
        notes=tuple(dict.fromkeys(notes)),
        kept=str(folder.root),
        calls=calls_table(evidence),
    )
