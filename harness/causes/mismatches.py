"""Collectives that do not fit: in another order, of another kind or shape, or too few."""

from __future__ import annotations

from harness.causes.across import each_rank
from harness.causes.by_hand import reduced_in_another_order
from harness.causes.cause import Diagnosis, Strength, cause
from harness.causes.hangs import rank0_only_collective
from harness.causes.parted import parted, shown
from harness.causes.unpaired import (
    FAMILY,
    cannot_come,
    failed_ranks,
    has_left,
    is_the_other_branch,
    lost_ranks,
    undisturbed,
    waits,
)
from harness.watch.evidence import Evidence
from harness.watch.hangs.pairing import (
    MISSING,
    ORDER,
    PARTED,
)
from harness.watch.naming import ranks


@cause(
    family=FAMILY,
    sees="Wrong values, a hang, or an abort in gloo, depending on the sizes.",
    why="Ranks make the same collectives in an order of their own, such as that of a set or of a "
    "directory. The first call of one is then paired with the second of another.",
    confirm="Print the names in the order in which they are reduced, on every rank.",
    change="make the order the same on all ranks",
    fix="""
for name in sorted(values):      # not the order of a set, or of os.listdir
    dist.all_reduce(values[name])
""",
    reported=("pytorch/pytorch#32426",),
)
def collective_order_differs(evidence: Evidence) -> Diagnosis | None:
    """Recognise the same calls in another order."""
    found = undisturbed(evidence)
    if found is None:
        return reduced_in_another_order(evidence)
    if found.kind != ORDER:
        return None
    mine, theirs = found.calls[found.odd[0]], found.calls[found.others[0]]
    if mine is None or theirs is None:
        return None
    strength = Strength.PROVEN
    if found.fits():
        # Ranks may take turns with two lines, as long as sizes are the same.
        if not mine.via or not theirs.via or mine.via[0].function == theirs.via[0].function:
            return None
        if is_the_other_branch(mine, theirs):
            return None
        strength = Strength.LIKELY
    return Diagnosis(
        strength=strength,
        because=(
            f"called {mine} where {ranks(found.others)} called {theirs}",
            f"{found.count} calls are the same on all ranks, in another order",
        ),
        where=mine.at,
        ranks=found.odd,
    )


@cause(
    family=FAMILY,
    sees="gloo aborts the process (`op.preamble.length <= op.nbytes`), a hang, or numbers that "
    "are garbage: float32 bits added up as integers.",
    why="Collectives pair by their order within the group. Nothing checks that all ranks bring "
    "the same operation, size and dtype.",
    confirm="Print shape and dtype on every rank before the call.",
    change="bring the same operation, shape and dtype on all ranks",
    fix="""
dist.all_reduce(value.to(torch.float32))     # one dtype and one shape everywhere
""",
    reported=("pytorch/pytorch#73547",),
)
def collective_mismatch(evidence: Evidence) -> Diagnosis | None:
    """Recognise calls that were paired and do not fit."""
    aborted = mismatch_of_last_calls(evidence)
    if aborted is not None:
        return aborted
    apart = parted(evidence)
    if apart is not None and not apart.loops():
        return Diagnosis(
            strength=Strength.LIKELY,
            because=(apart.sentence(), f"the process of rank {apart.gone} was gone then"),
            where=apart.call["at"],
            ranks=(apart.caller,),
        )
    found = evidence.unpaired
    if found is None or failed_ranks(evidence) or found.kind != PARTED or found.fits():
        return None
    if has_left(evidence) is not None or rank0_only_collective(evidence) is not None:
        return None
    mine, theirs = found.calls[found.odd[0]], found.calls[found.others[0]]
    if mine is None or theirs is None:
        return None
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(f"called {mine}, paired with {theirs} of {ranks(found.others)}",),
        where=mine.at,
        ranks=found.odd,
    )


def mismatch_of_last_calls(evidence: Evidence) -> Diagnosis | None:
    """Compare what a rank that is gone was about to call with what the others called then."""
    for rank in lost_ranks(evidence):
        mine = evidence.last_calls.get(rank)
        if mine is None or mine["operation"] in ("backward", "send", "recv", "isend", "irecv"):
            continue
        for other, theirs in sorted(evidence.last_calls.items()):
            if other == rank or theirs["count"] != mine["count"]:
                continue
            if theirs["operation"] == "backward":
                continue
            sized = mine["operation"] in ("all_reduce", "broadcast", "reduce", "all_gather")
            keys = ("operation", "elements", "dtype") if sized else ("operation",)
            if any(mine[key] != theirs[key] for key in keys):
                return Diagnosis(
                    strength=Strength.PROVEN,
                    because=(
                        f"called {shown(mine)}, paired with {shown(theirs)} of rank {other}",
                        f"the process of rank {rank} was gone in this call",
                    ),
                    where=mine["at"],
                    ranks=(rank,),
                )
    return None


@cause(
    family=FAMILY,
    sees="Training with experts hangs, often at its end; the call that waits is right where it is.",
    why="Tokens are exchanged chunk by chunk, as many as a rank has. Routing gives each rank "
    "another number: the next step's exchange meets the last one of a slower rank, and the "
    "rank with most of them waits in the end.",
    confirm="Log the number of exchanges of each rank in a step.",
    change="agree on the number of exchanges first",
    fix="""
chunks = torch.tensor(own_chunks)
dist.all_reduce(chunks, op=dist.ReduceOp.MAX)
for _ in range(int(chunks)):          # with nothing to send as well
    exchange()
""",
    reported=("deepspeedai/DeepSpeed#5794",),
)
def moe_all_to_all_hang(evidence: Evidence) -> Diagnosis | None:
    """Recognise ranks that wait in an exchange which others have made less often, and are through.

    Which exchanges belong together is not seen: until the last one all calls fit each other.
    """
    found = undisturbed(evidence)
    if found is None or found.kind != MISSING:
        return None
    if not all(cannot_come(evidence, rank) for rank in found.odd):
        return None
    stuck = found.expected
    if not stuck.operation.startswith("all_to_all"):
        return None
    made = {
        rank: sum(
            (call.via, call.operation) == (stuck.via, stuck.operation)
            for calls in evidence.calls[rank].made.values()
            for call in calls
        )
        for rank in (*found.odd, *found.others)
        if rank in evidence.calls
    }
    fewer = [made[rank] for rank in found.odd if rank in made]
    more = [made[rank] for rank in found.others if rank in made]
    if not fewer or not min(fewer) or max(fewer) >= min(more, default=0):
        return None
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(f"this exchange was made {each_rank(made)} times, and {waits(found)}",),
        where=stuck.at,
        ranks=found.odd,
        explains=False,
    )
