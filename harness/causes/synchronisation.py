"""Gradients that are not synchronised although DistributedDataParallel is there."""

from __future__ import annotations

from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence
from harness.watch.journal import Event
from harness.watch.layout import GRADIENTS


def _unsynchronised(evidence: Evidence) -> dict[int, Event]:
    """Return the windows of the update in which gradients were not equal, or nothing."""
    found = evidence.divergence
    if found is None or found.phase != GRADIENTS or found.differences[0].kind != "gradient":
        return {}
    return evidence.at_divergence()


@cause(
    family="synchronisation",
    sees="Every rank trains a model of its own; the loss falls on all of them, no error comes.",
    why="DDP arms its reducer in its own forward. A forward pass of the module inside it gives the "
    "same output and the same graph, and backward then reduces nothing.",
    confirm="Count the all-reduces of one backward pass: there are none.",
    change="call the wrapper, not the module inside it",
    fix="""
output = model(x)            # not model.module(x), nor a reference kept from before wrapping
""",
    reported=("kohya-ss/sd-scripts#989", "kohya-ss/sd-scripts#2244", "pytorch/pytorch#109774"),
)
def ddp_forward_bypassed(evidence: Evidence) -> Diagnosis | None:
    """Recognise a backward pass whose forward pass went past the wrapper."""
    windows = _unsynchronised(evidence)
    past = {r: w for r, w in windows.items() if w.get("forwards_past_wrapper")}
    bypassed = {r: w for r, w in past.items() if w.get("forwards", 0) < w.get("backwards", 0)}
    if not bypassed or not any(evidence.events("wrap")):
        return None
    first = next(iter(bypassed.values()))
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(
            f"{first['forwards_past_wrapper']} forward passes of the inner module and "
            f"{first.get('forwards', 0)} of the wrapper before this update",
        ),
        where=next(iter(first.get("forward_past_wrapper_at", ())), None),
        ranks=tuple(bypassed),
    )


@cause(
    family="synchronisation",
    sees="Drift with gradient accumulation, or no speed-up from no_sync.",
    why="no_sync acts where the forward pass is made: it decides there whether the reducer is "
    "armed. A backward pass outside of it, after a forward pass inside, is not synchronised.",
    confirm="Print model.require_backward_grad_sync at the forward pass before each update: it "
    "must be True for the last micro-batch.",
    change="put the forward pass inside no_sync as well",
    fix="""
with model.no_sync() if not last else nullcontext():
    loss = criterion(model(x), y)      # the forward pass belongs inside as well
    loss.backward()
""",
    reported=(
        "huggingface/accelerate#1726",
        "facebookresearch/ClassyVision#706",
        "speechbrain/speechbrain#2010",
    ),
)
def no_sync_wrong_half(evidence: Evidence) -> Diagnosis | None:
    """Recognise an update none of whose forward passes had synchronisation on."""
    windows = _unsynchronised(evidence)
    off = {
        rank: window
        for rank, window in windows.items()
        if 0 < window.get("forwards", 0) == window.get("forwards_without_sync", 0)
    }
    if not off:
        return None
    first = next(iter(off.values()))
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(
            f"all {first['forwards']} forward passes before this update were made under no_sync",
        ),
        where=next(iter(first.get("forward_at", ())), None),
        ranks=tuple(off),
    )
