"""Ranks that wait for each other in vain, and ranks that are gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.causes.cause import Diagnosis, Strength, cause
from harness.causes.parallel import reduced_in_another_order
from harness.causes.rendezvous import is_rendezvous
from harness.errors import peer_was_lost
from harness.waiting import IN_VAIN
from harness.watch.evidence import Evidence
from harness.watch.hangs.pairing import (
    EXTRA,
    MISSING,
    ORDER,
    PARTED,
    SKIPPED,
    Call,
    Frame,
    Unpaired,
)
from harness.watch.hangs.reading import Loop, loops_left, loops_of, rank_guard, same_branching
from harness.watch.naming import ranks

FAMILY = "hangs"


def _stack(content: Mapping[str, Any]) -> tuple[Frame, ...]:
    return tuple(Frame(path, int(line), name) for path, line, name in content.get("stack", ()))


def _own_error(evidence: Evidence, rank: int) -> Mapping[str, Any] | None:
    """Return what the script raised on a rank, unless it only tells that others did not come."""
    error = evidence.ends.get(rank, {}).get("error")
    if error is None or is_rendezvous(error):
        return None
    said = str(error["message"])
    in_vain = peer_was_lost(said) or any(sign in said.lower() for sign in IN_VAIN)
    return None if in_vain and error["type"] != "AssertionError" else dict(error)


def _failed(evidence: Evidence) -> list[int]:
    """Return the ranks that failed by themselves, the first one first."""
    own = [rank for rank in evidence.ends if _own_error(evidence, rank) is not None]
    return sorted(own, key=lambda rank: float(evidence.ends[rank].get("time", 0)))


def _lost(evidence: Evidence) -> list[int]:
    """Return the ranks that were gone first, without a word."""
    silent = {r: float(gone["time"]) for r, gone in evidence.gone.items() if r not in evidence.ends}
    first = min(silent.values(), default=0.0)
    return [rank for rank, when in silent.items() if when - first < 0.005]


def _undisturbed(evidence: Evidence) -> Unpaired | None:
    """Return the call without a partner, if no rank raised or was killed."""
    found = evidence.unpaired
    return None if found is None or _failed(evidence) or _lost(evidence) else found


def _waits(found: Unpaired) -> str:
    """Say who is left with which call."""
    return f"{ranks(found.others)} called {found.expected} and waited for {ranks(found.odd)}"


def _left(evidence: Evidence, found: Unpaired) -> list[Loop]:
    """Return the loops in which the others wait and that the odd rank is out of, outer first."""
    expected = found.expected
    rank = found.odd[0]
    mine = found.calls[rank]
    outside: tuple[Frame, ...] = ()
    if mine is not None:
        outside = mine.via
    elif rank not in evidence.ends:
        outside = _stack(evidence.stalls.get(rank, {}))
        if not outside:
            return []
    elif (error := evidence.ends[rank].get("error")) is not None:
        outside = _stack(error)
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


def _batches(evidence: Evidence) -> dict[int, int]:
    """Return rank -> batches of its last pass over the loader it trains from, as far as known."""
    found = {}
    for rank in evidence.ranks:
        passes = [e for e in evidence.events("pass", rank) if e.get("grad")]
        if passes:
            found[rank] = int(passes[-1]["batches"])
    return found


def _has_left(evidence: Evidence) -> tuple[Unpaired, list[Loop]] | None:
    found = _undisturbed(evidence)
    if found is None or found.kind not in (MISSING, PARTED) or _skipping(evidence):
        return None
    if found.kind == PARTED and found.fits():
        return None
    if found.kind == MISSING and not all(_cannot_come(evidence, rank) for rank in found.odd):
        return None
    left = _left(evidence, found)
    return (found, left) if left else None


def _cannot_come(evidence: Evidence, rank: int) -> bool:
    stall = evidence.stalls.get(rank, {})
    return rank in evidence.ends or bool(stall.get("waiting") or stall.get("still"))


@cause(
    family=FAMILY,
    sees="Training stops without an error; after the time limit, half an hour by default, the "
    "other ranks report a timeout in the gradient reduction.",
    why="One rank has left the loop on a condition of its own, such as early stopping on its own "
    "validation loss. The others go into the next step, whose collectives it never joins. A "
    "barrier makes ranks wait for each other; it does not tell them what was decided.",
    confirm="Print the value that the condition is about on every rank: it differs.",
    change="let all ranks decide on the same, reduced value",
    fix="""
stop = torch.tensor(float(loss < target), device=device)
dist.all_reduce(stop, op=dist.ReduceOp.MAX)      # any rank; MIN: all ranks
if stop: break
""",
    reported=(
        "Lightning-AI/pytorch-lightning#379",
        "talmolab/sleap-nn#471",
        "ultralytics/yolov5#8345",
    ),
)
def stop_decision_local(evidence: Evidence) -> Diagnosis | None:
    """Recognise a loop that one rank has left under a condition while others are in it."""
    known = _has_left(evidence)
    if known is None:
        return None
    found, left = known
    conditional = [loop for loop in left if loop.left_by is not None]
    if not conditional or _uneven(evidence, found):
        return None
    loop = conditional[-1]
    sure = len(left) == 1 and loop.counted
    return Diagnosis(
        strength=Strength.PROVEN if sure else Strength.LIKELY,
        because=(
            f"left the loop at line {loop.line}; {_waits(found)}",
            f"the loop is left under the condition at {loop.path}:{loop.left_by}",
        ),
        where=f"{loop.path}:{loop.left_by}",
        ranks=found.odd,
        explains=False,
    )


@cause(
    family=FAMILY,
    sees="The end of an epoch is never reached; the error of the ranks with more batches names a "
    "timeout in the gradient reduction.",
    why="Each rank loops over its own share of the samples, and the shares are not of one length. "
    "The ranks with a batch more wait in it for reductions that nobody sends any more.",
    confirm="Print the number of batches of every rank.",
    change="give every rank as many batches, or wrap the loop in model.join()",
    fix="""
sampler = DistributedSampler(dataset, drop_last=True)
# or, keeping all samples: with model.join(divide_by_initial_world_size=False):
""",
    reported=(
        "pytorch/pytorch#33148",
        "pytorch/pytorch#38174",
        "Lightning-AI/pytorch-lightning#20404",
    ),
)
def uneven_inputs(evidence: Evidence) -> Diagnosis | None:
    """Recognise a loop over inputs that has ended on one rank while others are in it."""
    known = _has_left(evidence)
    if known is None:
        return None
    found, left = known
    over = [loop for loop in left if not loop.counted]
    batches = _uneven(evidence, found)
    if not over or (not batches and any(loop.left_by is not None for loop in left)):
        return None
    waits = next((found.calls[rank] for rank in found.others if found.calls[rank]), None)
    if not batches and waits is not None and not _calls_at(evidence, found.odd, waits):
        # Nor did they call it in the rounds before: it is no part of what all ranks do in the loop.
        return None
    loop = over[-1]
    counts = "; ".join(f"rank {rank} had {n} batches" for rank, n in sorted(batches.items()))
    return Diagnosis(
        strength=Strength.PROVEN if batches else Strength.LIKELY,
        because=(
            f"had no more of {loop.over}; {_waits(found)}",
            *([counts] if counts else ()),
        ),
        where=f"{loop.path}:{loop.line}",
        ranks=found.odd,
        explains=False,
    )


def _uneven(evidence: Evidence, found: Unpaired) -> dict[int, int]:
    """Return rank -> batches, where the odd ranks had fewer than the others."""
    batches = _batches(evidence)
    mine = [batches[rank] for rank in found.odd if rank in batches]
    theirs = [batches[rank] for rank in found.others if rank in batches]
    return batches if mine and theirs and max(mine) < min(theirs) else {}


@cause(
    family=FAMILY,
    sees="The run hangs at, or right after, something that one rank does alone: evaluating, "
    "saving, logging.",
    why="A collective is called by some ranks only. It pairs with whatever the others call next, "
    "or with nothing. The forward pass of a wrapped module is one too if the module has buffers, "
    "and so are SyncBatchNorm, and saving a sharded model.",
    confirm="Look what stands under the condition on the rank.",
    change="call it on all ranks, or use model.module there",
    fix="""
if rank == 0:
    evaluate(model.module)       # not the wrapper
dist.barrier()                   # for all, outside of the condition
""",
    reported=(
        "pytorch/pytorch#143647",
        "speechbrain/speechbrain#2401",
        "Lightning-AI/pytorch-lightning#19045",
    ),
)
def rank0_only_collective(evidence: Evidence) -> Diagnosis | None:
    """Recognise calls that some ranks made in between and the others nowhere."""
    found = _undisturbed(evidence)
    if found is None or found.kind not in (EXTRA, SKIPPED, MISSING, PARTED):
        return None
    alone = found.odd if found.kind in (EXTRA, PARTED) else found.others
    others = tuple(rank for rank in found.calls if rank not in alone)
    call = found.calls[alone[0]]
    if call is None or _calls_at(evidence, others, call) or len(alone) >= len(found.calls):
        return None
    other = found.calls[others[0]]
    if other is not None and _is_the_other_branch(call, other):
        return None
    guarded = ((frame, rank_guard(frame.path, frame.line)) for frame in call.via)
    frame, guard = next((one for one in guarded if one[1] is not None), (None, None))
    if guard is None and (found.kind != EXTRA or _has_left(evidence) is not None):
        return None
    theirs = "ended without it" if other is None else f"called {other}"
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(
            f"called {call}, which {ranks(others)} never did; {ranks(others)} {theirs}",
            *([f"{frame} stands under `if {guard}`"] if guard else ()),
        ),
        where=call.at if frame is None else str(frame),
        ranks=alone,
        explains=False,
    )


def _is_the_other_branch(call: Call, other: Call) -> bool:
    """Say whether one condition leads to the two calls, so that each rank makes one of them."""
    parts = zip(reversed(call.via), reversed(other.via), strict=False)
    mine, theirs = next(((a, b) for a, b in parts if a != b), (None, None))
    if mine is None or theirs is None or mine.path != theirs.path:
        return False
    return same_branching(mine.path, mine.line, theirs.line)


def _calls_at(evidence: Evidence, of: tuple[int, ...], call: Call) -> bool:
    """Say whether any of the ranks has made such a call from the same line, ever."""
    return any(
        call.via == made.via and call.operation == made.operation
        for rank in of
        if rank in evidence.calls
        for calls in evidence.calls[rank].made.values()
        for made in calls
    )


def _skipping(evidence: Evidence) -> dict[int, tuple[int, dict[str, Any]]]:
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


@cause(
    family=FAMILY,
    sees="Nothing for a long time; then the last step hangs on all ranks but one. In between, "
    "updates average gradients of different batches.",
    why="A rank skips a step, say a batch whose loss is not finite. Collectives pair by their "
    "order: its next reduction meets the one in which the others wait, and stays one behind.",
    confirm="Count the backward passes of every rank.",
    change="let all ranks skip if one has to, or reduce zeros instead",
    fix="""
skip = (~loss.isfinite()).int()
dist.all_reduce(skip, op=dist.ReduceOp.MAX)
if skip: continue
""",
    reported=(
        "NVIDIA-NeMo/Automodel#2468",
        "facebookresearch/optimizers#149",
        "Lightning-AI/pytorch-lightning#5359",
    ),
)
def step_skipped_on_one_rank(evidence: Evidence) -> Diagnosis | None:
    """Recognise a rank that is some calls behind, and was seen to leave them out."""
    found = _undisturbed(evidence)
    if found is None:
        return None
    skipping = _skipping(evidence)
    mine = {rank: at for rank, at in skipping.items() if rank in found.odd}
    if found.kind == SKIPPED and len(found.odd) < len(found.calls) - len(found.odd) + 1:
        skipped = found.between[found.others[0]]
        if not _calls_at(evidence, found.odd, skipped[0]):
            return None
        return Diagnosis(
            strength=Strength.PROVEN,
            because=(
                f"left out {skipped[0]}, which {ranks(found.others)} made, and went on with what "
                "follows",
            ),
            where=skipped[0].at,
            ranks=found.odd,
            step=min((update for update, _ in mine.values()), default=None),
            explains=True,
        )
    if found.kind != MISSING or not mine:
        return None
    update, window = next(iter(mine.values()))
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(
            f"made {window['forwards']} forward passes and {window['backwards']} backward passes "
            f"before this update; {_waits(found)}",
        ),
        where=found.expected.at,
        ranks=tuple(mine),
        step=update,
    )


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
    found = _undisturbed(evidence)
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
        if _is_the_other_branch(mine, theirs):
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
    aborted = _mismatch_of_last_calls(evidence)
    if aborted is not None:
        return aborted
    found = evidence.unpaired
    if found is None or _failed(evidence) or found.kind != PARTED or found.fits():
        return None
    if _has_left(evidence) is not None or rank0_only_collective(evidence) is not None:
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


def _mismatch_of_last_calls(evidence: Evidence) -> Diagnosis | None:
    """Compare what a rank that is gone was about to call with what the others called then."""
    for rank in _lost(evidence):
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
                        f"called {_last(mine)}, paired with {_last(theirs)} of rank {other}",
                        f"the process of rank {rank} was gone in this call",
                    ),
                    where=mine["at"],
                    ranks=(rank,),
                )
    return None


def _last(call: Mapping[str, Any]) -> str:
    sizes = ", ".join("x".join(map(str, shape)) or "1" for shape in call["shapes"][:2])
    what = f"{call['operation']} of {sizes} {call['dtype']}" if sizes else str(call["operation"])
    return f"{what} at {call['at']}"


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
    failed = _failed(evidence)
    if not failed or evidence.world_size == 1:
        return None
    errors = {rank: _own_error(evidence, rank) or {} for rank in failed}
    alike = {(e["type"], tuple(e["stack"][:1] and e["stack"][0][:2])) for e in errors.values()}
    if len(alike) == 1 and len(failed) == evidence.world_size:
        return None
    rank = failed[0]
    error, stack = errors[rank], _stack(errors[rank])
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
    lost = _lost(evidence)
    if not lost or len(lost) == evidence.world_size or _failed(evidence):
        return None
    if _mismatch_of_last_calls(evidence) is not None:
        return None
    felt = [rank for rank, end in evidence.ends.items() if end.get("error")]
    rank = lost[0]
    last = evidence.last_calls.get(rank)
    because = [f"the process was gone, without an exception ({evidence.gone[rank]['pid']})"]
    if last is not None:
        because.append(f"the last that its own code called was {_last(last)}")
    if felt:
        because.append(f"{ranks(felt)} noticed it in a collective")
    return Diagnosis(
        strength=Strength.PROVEN if felt or evidence.stalls else Strength.LIKELY,
        because=tuple(because),
        where=None if last is None else last["at"],
        ranks=tuple(lost),
        explains=False,
    )
