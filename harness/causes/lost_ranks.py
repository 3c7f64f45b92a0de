"""Ranks that have raised, or were killed."""

from __future__ import annotations

from harness.causes.cause import Diagnosis, Strength, cause
from harness.causes.mismatches import mismatch_of_last_calls
from harness.causes.parted import parted, shown
from harness.causes.unpaired import FAMILY, failed_ranks, lost_ranks, own_error, stack_of
from harness.watch.evidence import Evidence
from harness.watch.naming import ranks


@cause(
    family=FAMILY,
    sees="`Connection closed by peer`, or a timeout, on ranks that are all right; torchrun ends "
    "them. The traceback that matters is on another rank.",
    why="A rank has raised while the others wait for it in a collective.",
    confirm="Read the traceback of the rank that is named here, not that of the others.",
    change="mend the error on that rank",
    fix="""
# The others' errors are consequences: they waited in a collective for a rank that was gone.
""",
)
def rank_raised(evidence: Evidence) -> Diagnosis | None:
    """Recognise a rank whose script failed by itself, unless all failed alike."""
    failed = failed_ranks(evidence)
    if not failed or evidence.world_size == 1:
        return None
    errors = {rank: own_error(evidence, rank) or {} for rank in failed}
    alike = {(e["type"], tuple(e["stack"][:1] and e["stack"][0][:2])) for e in errors.values()}
    if len(alike) == 1 and len(failed) == evidence.world_size:
        return None
    rank = failed[0]
    error, stack = errors[rank], stack_of(errors[rank])
    same = tuple(r for r, e in errors.items() if (e["type"], e["stack"]) == (error["type"], stack))
    said = str(error["message"]).partition("\n")[0][:120]
    because = [f"raised {error['type']}: {said}"]
    others = [r for r in evidence.calls if r not in failed]
    waiting = [(r, c) for r in others if (c := evidence.calls[r].waiting) is not None]
    if waiting:
        because.append(f"{ranks([r for r, _ in waiting])} waited in {waiting[0][1]}")
    return Diagnosis(
        strength=Strength.PROVEN,
        because=tuple(because),
        where=str(stack[0]) if stack else None,
        ranks=same or (rank,),
        explains=False,
    )


@cause(
    family=FAMILY,
    sees="`Connection reset by peer` on ranks that are all right; no traceback on the rank that "
    "is gone. torchrun names a signal.",
    why="A process was ended from outside or by a fault in native code: out of memory (signal 9), "
    "a segmentation fault (11), an abort (6), the scheduler (15).",
    confirm="The exit code in torchrun's summary; `dmesg | grep -i kill` for lack of memory.",
    change="find out what ended that process; lack of memory is the most frequent",
    fix="""
# fewer DataLoader workers, smaller batches, or less held per process:
loader = DataLoader(dataset, num_workers=2, persistent_workers=False)
""",
    reported=("pytorch/pytorch#13246",),
)
def rank_killed(evidence: Evidence) -> Diagnosis | None:
    """Recognise a process that is gone and has left no word, while the others were there."""
    lost = lost_ranks(evidence)
    if not lost or len(lost) == evidence.world_size or failed_ranks(evidence):
        return None
    if mismatch_of_last_calls(evidence) is not None or parted(evidence) is not None:
        return None
    felt = [rank for rank, end in evidence.ends.items() if end.get("error")]
    rank = lost[0]
    last = evidence.last_calls.get(rank)
    because = [f"the process was gone, without an exception ({evidence.gone[rank]['pid']})"]
    if last is not None:
        because.append(f"the last that its own code called was {shown(last)}")
    if felt:
        because.append(f"{ranks(felt)} noticed it in a collective")
    return Diagnosis(
        strength=Strength.PROVEN if felt or evidence.stalls else Strength.LIKELY,
        because=tuple(because),
        where=None if last is None else last["at"],
        ranks=tuple(lost),
        explains=False,
    )
