"""Losses with a factor of N or 1/N on top of the average that DistributedDataParallel takes."""

from __future__ import annotations

import math

from harness.causes import proof
from harness.causes.cause import Diagnosis, Strength, cause
from harness.causes.loss_terms import averaged_by_torch, counted_terms
from harness.watch.evidence import Evidence
from harness.watch.journal import Event


def _factors(evidence: Evidence, name: str) -> list[Event]:
    """Return the updates whose loss, a mean, was multiplied or divided by the number of ranks.

    All updates have to be of that kind.
    """
    if not averaged_by_torch(evidence):
        return []
    found, looks = [], 0
    for window in evidence.updates(evidence.ranks[0]):
        counted = counted_terms(window)
        if counted:
            looks += 1
            if any(m.mean for m in counted) and _of_the_whole(window, name, evidence.world_size):
                found.append(window)
    return found if len(found) >= 2 and len(found) == looks else []


def _of_the_whole(window: Event, name: str, world: int) -> bool:
    """Say whether the loss as a whole has a factor of N or 1/N, besides that of accumulation."""
    terms = window["loss_terms"][0]
    paths = [tuple(map(tuple, by)) for *_, by in terms]
    common = [steps[0] for steps in zip(*paths, strict=False) if len(set(steps)) == 1]
    scale = next(iter(window.get("loss_scales", ())), None)
    if common[:1] == [("Mul", scale)]:
        del common[0]
    passes = window.get("backwards", 1)
    if passes > 1 and ("Div", float(passes)) in common:
        common.remove(("Div", float(passes)))
    # `(a + b) / 2` is a mean, on two ranks as well.
    if name == "Div" and len(paths) > 1 and abs(sum(term[3] for term in terms) - 1) < 1e-6:
        return False
    product, wanted = 1.0, float(world) if name == "Mul" else 1 / world
    for place, (what, by) in enumerate(common):
        product = product * by if what == "Mul" else product / by
        if abs(product / wanted - 1) < 1e-6:
            return (name, float(world)) in common[: place + 1]
    return False


def _shown_as_average(evidence: Evidence, window: Event) -> str | None:
    """Return where the loss of an update was averaged over ranks before backward, if it was."""
    for event in evidence.events("reduced", evidence.ranks[0]):
        loss = next(iter(window.get("losses", ())), None)
        average = (event["all"] or [math.nan])[0] / evidence.world_size
        if event["step"] == window["step"] and loss and abs(average / loss - 1) < 1e-5:
            at: str | None = event["at"]
            return at
    return None


def _over_all_ranks(evidence: Evidence, window: Event) -> bool:
    """Say whether the loss of an update may be over the rows of all ranks, gathered for it."""
    rows = next(iter(window.get("rows", ())), 0)
    counts = [main.count for main in counted_terms(window) if main.mean]
    gathers = evidence.events("gathered", evidence.ranks[0])
    return (
        any(event["step"] == window["step"] for event in gathers)
        and min(counts, default=0) >= evidence.world_size * rows
    )


def _scaled(evidence: Evidence, name: str, said: str) -> Diagnosis | None:
    found = _factors(evidence, name)
    if not found:
        return None
    window, world = found[0], evidence.world_size
    because = [
        f"the loss of each rank is its mean {said} {world}, at all {len(found)} updates that were "
        "looked at, and DDP averages over ranks besides"
    ]
    strength = Strength.LIKELY
    if name == "Div":
        shown = _shown_as_average(evidence, window)
        if shown is not None:
            because.append(f"the ranks' losses were added up at {shown}, for this loss")
        elif world == 2:
            # Halving a loss is common, whatever the number of ranks.
            strength = Strength.FACT
    if all(_over_all_ranks(evidence, one) for one in found):
        because.append(
            "it is over rows gathered from all ranks: the factor is right if only a rank's own "
            "rows have a gradient there"
        )
        strength = Strength.FACT
    wanted = float(world) if name == "Mul" else 1 / world
    rate = next(iter(evidence.events("rate")), None)
    if rate is not None and rate["made_with"] and rate["lr"]:
        taken_back = rate["made_with"] / rate["lr"]
        if abs(taken_back / wanted - 1) < 1e-6:
            because.append(f"the optimizer was made with {taken_back:g} times its learning rate")
            strength = Strength.FACT
    return Diagnosis(
        strength=strength,
        because=tuple(because),
        where=next(iter(window.get("backward_at", ())), None),
        step=window["update"],
        explains=False,
    )


@cause(
    family="normalisation",
    sees="N GPUs train as with N times the learning rate; replicas are equal.",
    why="DDP averages gradients already; the factor comes on top. Adam divides it out, a clip "
    "before Adam does not.",
    confirm="Run with --audit: the gradient is N times that of one process.",
    change="drop the factor world_size, or say in a comment that it is wanted",
    fix="""
loss = criterion(model(x), y)      # DDP averages over ranks
loss.backward()
""",
    reported=("neuralmagic/sparseml#135", "IrvingMeng/MagFace#12"),
)
@proof.proven_by(proof.world_times, alone=False)
def loss_scaled_by_world(evidence: Evidence) -> Diagnosis | None:
    """Recognise a local mean times the number of ranks."""
    return _scaled(evidence, "Mul", "times")


@cause(
    family="normalisation",
    sees="N GPUs train as with the learning rate over N; more GPUs, worse results.",
    why="The loss is divided by the number of ranks, for the log or out of caution, and DDP "
    "divides the gradients by it once more.",
    confirm="Run with --audit: the gradient is 1/N of that of one process.",
    change="run backward on the loss itself, and log a detached copy",
    fix="""
loss.backward()
logged = loss.detach().clone()
dist.all_reduce(logged)
logged /= world_size
""",
    reported=("sanderwood/bgpt#5", "facebookresearch/3detr#56"),
)
@proof.proven_by(proof.world_part, alone=False)
def loss_divided_by_world(evidence: Evidence) -> Diagnosis | None:
    """Recognise a local mean over the number of ranks."""
    return _scaled(evidence, "Div", "divided by")
