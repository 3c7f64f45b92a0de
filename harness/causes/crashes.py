"""Errors that DistributedDataParallel, or autograd below it, raises on all ranks alike."""

from __future__ import annotations

from harness.causes.cause import Diagnosis, Strength, cause
from harness.causes.unequal import last_of, unequal_gradients
from harness.watch.evidence import Evidence

FAMILY = "crashes"


def _raised(evidence: Evidence, words: str) -> tuple[tuple[int, ...], str | None]:
    """Return the ranks whose script ended with an error of these words, and the user's line."""
    found, where = [], None
    for rank, end in sorted(evidence.ends.items()):
        error = end.get("error")
        if error is None or words not in str(error["message"]):
            continue
        found.append(rank)
        if where is None and error.get("stack"):
            path, line, _ = error["stack"][0]
            where = f"{path}:{line}"
    return tuple(found), where


def _wrappers(evidence: Evidence, rank: int, option: str) -> bool:
    """Say whether a wrapper of a rank was made with an option on."""
    return any(event[option] for event in evidence.events("wrapper", rank))


@cause(
    family=FAMILY,
    sees='"one of the variables needed for gradient computation has been modified by an inplace '
    'operation", with several ranks only.',
    why="A forward pass keeps running statistics for its backward. Sending or averaging buffers "
    "before the next pass writes into what is kept, and backward refuses.",
    confirm="Leave out what writes to the buffers: backward ends.",
    change="send buffers around before the first of the passes only",
    fix="""
average_buffers(model)                 # before the first pass, not before each
loss = criterion(model(real)) + criterion(model(fake))
loss.backward()
""",
    reported=("pytorch/pytorch#22095", "pytorch/pytorch#175024", "takuseno/d3rlpy#439"),
)
def buffer_written_before_backward(evidence: Evidence) -> Diagnosis | None:
    """Recognise the error, with buffers that were written since the update before."""
    ranks, where = _raised(evidence, "modified by an inplace operation")
    for rank in ranks:
        updates = max((int(e["update"]) + 1 for e in evidence.events("update", rank)), default=0)
        for event in evidence.events("buffers_written", rank):
            if event["update"] >= updates:
                return Diagnosis(
                    # The layer itself may have written to something else in place.
                    strength=Strength.LIKELY,
                    because=(
                        "a backward pass met a tensor that was written after its forward pass",
                        f"{event['buffers'][0]} was written between two forward passes",
                    ),
                    where=where,
                    ranks=() if len(ranks) == evidence.world_size else ranks,
                    tensor=event["buffers"][0],
                    explains=False,
                )
    return None


@cause(
    family=FAMILY,
    sees="`expect_autograd_hooks_ INTERNAL ASSERT FAILED at reducer.cpp`, in the first backward "
    "pass.",
    why="With static_graph DDP learns in the first pass which gradients to wait for. Under "
    "no_sync it prepares nothing for that, and its own hooks then find themselves not expected.",
    confirm="Make the first pass outside of no_sync, or leave static_graph out.",
    change="synchronise the first pass, or leave static_graph out",
    fix="""
with model.no_sync() if not last and step > 0 else nullcontext():
    criterion(model(x), y).backward()
""",
    reported=(
        "huggingface/accelerate#3679",
        "pytorch/pytorch#143580",
        "Lightning-AI/pytorch-lightning#18086",
    ),
)
def static_graph_no_sync(evidence: Evidence) -> Diagnosis | None:
    """Recognise the assertion of the reducer, below a wrapper with static_graph."""
    ranks, where = _raised(evidence, "expect_autograd_hooks_")
    ranks = tuple(rank for rank in ranks if _wrappers(evidence, rank, "static_graph"))
    if not ranks:
        return None
    return Diagnosis(
        strength=Strength.PROVEN,
        because=("a wrapper with static_graph made its first pass under no_sync",),
        where=where,
        ranks=() if len(ranks) == evidence.world_size else ranks,
        explains=False,
    )


@cause(
    family=FAMILY,
    sees='"Expected to mark a variable ready only once" in backward; or no error, and a layer that '
    "is used several times has other gradients on every rank.",
    why="A reentrant checkpoint runs a backward pass of its own inside backward. The reducer takes "
    "the gradient for finished after the first of them: with find_unused_parameters it has "
    "finished it already and raises, and of a layer in several checkpoints it averages a part.",
    confirm="Pass use_reentrant=False to checkpoint: the error is gone, and the ranks agree.",
    change="checkpoint(..., use_reentrant=False), or static_graph=True",
    fix="""
hidden = checkpoint(layer, hidden, use_reentrant=False)
""",
    reported=(
        "pytorch/pytorch#46166",
        "huggingface/accelerate#3536",
        "huggingface/transformers#30113",
    ),
)
def ready_twice(evidence: Evidence) -> Diagnosis | None:
    """Recognise the reducer's error, or gradients that part behind reentrant checkpoints."""
    ranks, where = _raised(evidence, "mark a variable ready only once")
    if ranks:
        return Diagnosis(
            strength=Strength.PROVEN,
            because=("the reducer got the gradient of a parameter twice in one backward pass",),
            where=where,
            ranks=() if len(ranks) == evidence.world_size else ranks,
            explains=False,
        )
    unequal = unequal_gradients(evidence)
    module = None if unequal is None else unequal.hooked
    if unequal is None or module is None:
        return None
    told = unequal.wrapper(module)
    inside = {w.get("backwards_inside_backward", 0) for w in unequal.windows.values()}
    armed = unequal.last("last_forward_synchronised", module)
    if told is None or told["static_graph"] or 0 in inside or not all(armed.values()):
        return None
    return Diagnosis(
        # A hook, or a change on one rank, may come on top of checkpoints that are harmless.
        strength=Strength.LIKELY,
        because=(
            f"{max(inside)} backward passes ran inside another one before this update, as "
            "reentrant checkpoints make them",
        ),
        where=last_of(next(iter(unequal.windows.values())), "backward_at"),
    )
