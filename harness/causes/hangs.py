"""Ranks that wait for each other in vain, and ranks that are gone."""

from __future__ import annotations

from harness.causes.cause import Diagnosis, Strength, cause
from harness.causes.parted import parted
from harness.causes.unpaired import (
    FAMILY,
    batches_of_ranks,
    calls_at,
    has_left,
    is_the_other_branch,
    skipping_ranks,
    undisturbed,
    waits,
)
from harness.watch.evidence import Evidence
from harness.watch.hangs.pairing import (
    EXTRA,
    MISSING,
    PARTED,
    SKIPPED,
    Unpaired,
)
from harness.watch.hangs.reading import rank_guard
from harness.watch.naming import ranks


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
    known = has_left(evidence)
    if known is None:
        return _aborted(evidence, conditional=True)
    found, left = known
    conditional = [loop for loop in left if loop.left_by is not None]
    if not conditional or _uneven(evidence, found):
        return None
    loop = conditional[-1]
    sure = len(left) == 1 and loop.counted
    return Diagnosis(
        strength=Strength.PROVEN if sure else Strength.LIKELY,
        because=(
            f"left the loop at line {loop.line}; {waits(found)}",
            f"the loop is left under the condition at {loop.path}:{loop.left_by}",
        ),
        where=f"{loop.path}:{loop.left_by}",
        ranks=found.odd,
        explains=False,
    )


def _aborted(evidence: Evidence, *, conditional: bool) -> Diagnosis | None:
    """Recognise a loop that one rank has left, where the next call has ended a process at once."""
    apart = parted(evidence)
    left = [] if apart is None else apart.loops()
    if apart is None or not left or any(loop.left_by for loop in left) is not conditional:
        return None
    loop = next(loop for loop in left if not conditional or loop.left_by)
    how = (
        f"the loop at line {loop.line} is left under the condition at {loop.path}:{loop.left_by}"
        if conditional
        else f"it is out of the loop over {loop.over} at line {loop.line}"
    )
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(
            apart.sentence(),
            f"{how}; the process of rank {apart.gone} was gone then, as gloo ends one that gets "
            "another size than it expects",
        ),
        where=f"{loop.path}:{loop.left_by if conditional else loop.line}",
        ranks=(apart.caller,),
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
    known = has_left(evidence)
    if known is None:
        return _aborted(evidence, conditional=False)
    found, left = known
    over = [loop for loop in left if not loop.counted]
    batches = _uneven(evidence, found)
    if not over or (not batches and any(loop.left_by is not None for loop in left)):
        return None
    if not batches and not calls_at(evidence, found.odd, found.expected):
        # Nor did they call it in the rounds before: it is no part of what all ranks do in the loop.
        return None
    loop = over[-1]
    counts = "; ".join(f"rank {rank} had {n} batches" for rank, n in sorted(batches.items()))
    return Diagnosis(
        strength=Strength.PROVEN if batches else Strength.LIKELY,
        because=(
            f"had no more of {loop.over}; {waits(found)}",
            *([counts] if counts else ()),
        ),
        where=f"{loop.path}:{loop.line}",
        ranks=found.odd,
        explains=False,
    )


def _uneven(evidence: Evidence, found: Unpaired) -> dict[int, int]:
    """Return rank -> batches, where the odd ranks had fewer than the others."""
    batches = batches_of_ranks(evidence)
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
    found = undisturbed(evidence)
    if found is None or found.kind not in (EXTRA, SKIPPED, MISSING, PARTED):
        return None
    alone = found.odd if found.kind in (EXTRA, PARTED) else found.others
    others = tuple(rank for rank in found.calls if rank not in alone)
    call = found.calls[alone[0]]
    if call is None or calls_at(evidence, others, call) or len(alone) >= len(found.calls):
        return None
    other = found.calls[others[0]]
    if other is not None and is_the_other_branch(call, other):
        return None
    guarded = ((frame, rank_guard(frame.path, frame.line)) for frame in call.via)
    frame, guard = next((one for one in guarded if one[1] is not None), (None, None))
    if guard is None and (found.kind != EXTRA or has_left(evidence) is not None):
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
    found = undisturbed(evidence)
    if found is None:
        return None
    skipping = skipping_ranks(evidence)
    mine = {rank: at for rank, at in skipping.items() if rank in found.odd}
    if found.kind == SKIPPED and len(found.odd) < len(found.calls) - len(found.odd) + 1:
        skipped = found.between[found.others[0]]
        if not calls_at(evidence, found.odd, skipped[0]):
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
            f"before this update; {waits(found)}",
        ),
        where=found.expected.at,
        ranks=tuple(mine),
        step=update,
    )
