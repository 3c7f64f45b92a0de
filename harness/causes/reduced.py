"""Gradients that part behind a reduction which was armed and complete."""

from __future__ import annotations

from collections import Counter

from harness.causes.cause import Diagnosis, Strength, cause
from harness.causes.crashes import ready_twice
from harness.causes.initial_state import structure_differs
from harness.causes.optimizer_state import loss_scale_differs
from harness.causes.parallel import changed_among_parts
from harness.causes.synchronisation import (
    ddp_forward_bypassed,
    no_sync_wrong_half,
    unused_parameters,
)
from harness.causes.unequal import last_of, unequal_gradients
from harness.causes.wrapping import (
    hooks_lost,
    params_ignored,
    params_replaced,
    unfrozen_after_wrap,
)
from harness.watch.evidence import Evidence
from harness.watch.journal import Event


@cause(
    family="synchronisation",
    sees="Gradients of one wrapped model differ between ranks although backward has reduced them.",
    why="A communication hook stands in for DDP's all-reduce. What it returns is the gradient, and "
    "if it does not return the same on every rank the replicas part.",
    confirm="Leave out register_comm_hook: the ranks agree.",
    change="let the communication hook return the same on every rank",
    fix="""
model.register_comm_hook(None, default_hooks.allreduce_hook)   # as DDP does without a hook
""",
)
def communication_hook(evidence: Evidence) -> Diagnosis | None:
    """Recognise a hook that is all that stands between backward and the gradients."""
    unequal = unequal_gradients(evidence)
    if unequal is None:
        return _hook_is_there(evidence)
    module = unequal.hooked
    if module is None or _otherwise_explained(evidence):
        return None
    told = unequal.wrapper(module)
    if told is None or not told["hooks"]:
        return None
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(f"the wrapper has the communication hook {', '.join(told['hooks'])}",),
    )


def _hook_is_there(evidence: Evidence) -> Diagnosis | None:
    for event in evidence.events("wrapper"):
        if event["hooks"]:
            return Diagnosis(
                strength=Strength.FACT,
                because=(
                    f"wrapper {event['module']} reduces with the communication hook "
                    f"{', '.join(event['hooks'])}: gradients are what it returns",
                ),
                explains=False,
            )
    return None


@cause(
    family="synchronisation",
    sees="Gradients of replicas differ between ranks in one update, on few ranks.",
    why="DDP, or a sum over a group, leaves the same bits in the gradient on every rank. Whoever "
    "changes it afterwards on some of them, such as a filter for NaN or a clip on rank 0, makes "
    "the replicas part.",
    confirm="Compare p.grad right after backward and right before the update.",
    change="do the same to the gradients on every rank",
    fix="""
loss.backward()
change(model.parameters())             # on every rank, and decided by all of them together
optimizer.step()
""",
    reported=("deepspeedai/DeepSpeed#1801",),
)
def gradient_changed_on_one_rank(evidence: Evidence) -> Diagnosis | None:
    """Recognise gradients that part behind a reduction that was armed and complete."""
    unequal = unequal_gradients(evidence)
    module = None if unequal is None else unequal.hooked
    if unequal is None or module is None or _otherwise_explained(evidence):
        return changed_among_parts(evidence)
    told = unequal.wrapper(module)
    synchronised = unequal.last("last_forward_synchronised", module)
    backwards = {window.get("backwards", 0) for window in unequal.windows.values()}
    odd = unequal.differences[0].odd
    if told is None or told["hooks"] or not all(synchronised.values()) or 0 in backwards:
        return None
    if not odd and len(evidence.ranks) > 2:
        return None
    return Diagnosis(
        strength=Strength.LIKELY,
        because=("the wrapper was called, its reduction was on, and no hook was lost",),
        ranks=odd,
    )


@cause(
    family="synchronisation",
    sees="One rank has other gradients than the rest in one update, and has made more or fewer "
    "passes for it.",
    why="An update that one rank leaves out, or a micro-batch more on it, leaves gradients of "
    "other batches there. Every rank makes its own update, and nobody compares their numbers.",
    confirm="Count the backward passes and updates of each rank.",
    change="decide together whether an update is made, and from how many micro-batches",
    fix="""
bad = (~loss.isfinite()).int()
dist.all_reduce(bad, op=dist.ReduceOp.MAX)     # one rank's trouble is everybody's
if not bad:
    optimizer.step()
""",
    reported=("NVIDIA-NeMo/Automodel#2468", "facebookresearch/mmf#1073"),
)
def update_skipped_on_one_rank(evidence: Evidence) -> Diagnosis | None:
    """Recognise ranks whose passes before an update are not as many as those of the others."""
    unequal = unequal_gradients(evidence)
    if unequal is None:
        return None
    counts = {rank: _passes(window) for rank, window in unequal.windows.items()}
    earlier = {
        rank: _passes(window)
        for rank in evidence.ranks
        if unequal.step and (window := evidence.update(rank, unequal.optimizer, unequal.step - 1))
    }
    if len(set(earlier.values())) > 1:
        # Ranks have micro-batches of their own number, and agreed all the same.
        return None
    most = Counter(counts.values()).most_common(2)
    if len(most) < 2 or (most[0][1] == most[1][1] and len(counts) > 2):
        return None
    usual = most[0][0]
    if len(counts) == 2:
        usual = earlier.get(evidence.ranks[0], (0, 0))
    odd = [rank for rank, count in counts.items() if count != usual]
    if not odd or len(odd) == len(counts):
        return None
    if _skipped_by_scaler(evidence, unequal.step):
        return None
    forwards, backwards = counts[odd[0]]
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(
            f"{forwards} forward and {backwards} backward passes before this update, on the "
            f"other ranks {usual[0]} and {usual[1]}",
        ),
        where=last_of(unequal.windows[odd[0]], "backward_at"),
        ranks=tuple(odd),
    )


def _passes(window: Event) -> tuple[int, int]:
    return window.get("forwards", 0), window.get("backwards", 0)


_BEFORE_BACKWARD_IS_OVER = (
    ddp_forward_bypassed,
    no_sync_wrong_half,
    params_replaced,
    unfrozen_after_wrap,
    params_ignored,
    hooks_lost,
    unused_parameters,
    update_skipped_on_one_rank,
    ready_twice,
)


def _skipped_by_scaler(evidence: Evidence, step: int) -> bool:
    """Say whether scalers had come to other decisions by that update."""
    scaled = loss_scale_differs(evidence)
    return scaled is not None and (scaled.step or 0) <= step


def _otherwise_explained(evidence: Evidence) -> bool:
    unequal = unequal_gradients(evidence)
    if unequal is not None and _skipped_by_scaler(evidence, unequal.step):
        return True
    rules = (structure_differs, *_BEFORE_BACKWARD_IS_OVER)
    return any(rule(evidence) for rule in rules)
