"""What an update is made from besides gradients: state, hyper-parameters, loss scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.causes.initial_state import (
    equal_when_made,
    loads_that_part,
    structure_differs,
)
from harness.causes.resume import read_before_write
from harness.causes.unequal import unequal_gradients
from harness.watch.divergence import Divergence
from harness.watch.evidence import Evidence
from harness.watch.layout import GRADIENTS, PARAMETERS, START

_RATES = ("lr", "initial_lr", "max_lr", "min_lr")


def _settings(evidence: Evidence) -> Divergence | None:
    found = evidence.divergence
    if found is None or found.phase != GRADIENTS or found.differences[0].kind != "setting":
        return None
    return found


def _key(name: str) -> str:
    """Return the setting of `param_groups[0]['betas'][1]`."""
    return name.split("'")[1] if "'" in name else name


@cause(
    family="optimizer state",
    sees="Ranks drift apart slowly with equal gradients; their learning rates are not the same.",
    why="A schedule computed from something that is the rank's own, such as the weights before "
    "they were sent around, the length of its shard or its own validation loss, is its own too.",
    confirm="Print optimizer.param_groups[0]['lr'] on every rank.",
    change="compute the schedule from what all ranks share, or on rank 0 and send it around",
    fix="""
value = torch.tensor(value)
dist.broadcast(value, src=0)           # or an all-reduce, before scheduler.step(value)
""",
    reported=("huggingface/accelerate#3797",),
)
def rank_dependent_schedule(evidence: Evidence) -> Diagnosis | None:
    """Recognise a learning rate that is not the same on all ranks."""
    found = _settings(evidence)
    if found is None or _key(found.differences[0].name) not in _RATES:
        return None
    first = found.differences[0]
    values = ", ".join(f"{value} on rank {rank}" for rank, value in sorted(first.values.items()))
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(f"{first.name} is {values}",),
        ranks=first.odd,
        tensor=first.name,
    )


@cause(
    family="optimizer state",
    sees="Ranks drift apart with equal gradients; a hyper-parameter is not the same on all.",
    why="Every rank makes its own update. It is the same one only if momentum, weight decay and "
    "all other settings of the optimizer are.",
    confirm="Print optimizer.param_groups on every rank.",
    change="give the optimizer the same settings on every rank",
    fix="""
optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay)   # no rank in them
""",
)
def hyperparameters_differ(evidence: Evidence) -> Diagnosis | None:
    """Recognise a setting other than the learning rate that is not the same on all ranks."""
    found = _settings(evidence)
    if found is None or _key(found.differences[0].name) in _RATES:
        return None
    first = found.differences[0]
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(f"{first.name} is not the same on all ranks",),
        ranks=first.odd,
        tensor=first.name,
    )


@cause(
    family="optimizer state",
    sees="After a resume, or after a reset of the moments, the ranks part, although weights and "
    "gradients are equal.",
    why="The state of an optimizer, such as Adam's moments and step, is never sent around. Loaded, "
    "reset or edited on one rank only, it makes that rank's updates other ones.",
    confirm="Print sorted(optimizer.state_dict()['state']) on every rank after loading.",
    change="load, reset or edit the optimizer's state on every rank",
    fix="""
state = torch.load(path, map_location="cpu")   # not only on rank 0
optimizer.load_state_dict(state["optimizer"])
""",
    reported=("wenet-e2e/wenet#2619",),
)
def optimizer_state_differs(evidence: Evidence) -> Diagnosis | None:
    """Recognise state that is not the same on all ranks, with weights and gradients that are."""
    found = evidence.divergence
    if found is None:
        return None
    first = found.differences[0]
    if found.phase == START and first.kind.startswith("state "):
        lack = first.odd if first.structural else ()
        said = "on some ranks there is none" if first.structural else "the ranks differ in it"
        return Diagnosis(
            strength=Strength.PROVEN,
            because=(
                f"before the first update of {evidence.source} its state was not the same: {said}",
            ),
            ranks=lack,
        )
    if found.phase != PARAMETERS or evidence.optimizer is None:
        return None
    # Where groups of ranks have models of their own, so is the state of each.
    of = {rank for group in first.groups for rank in group}
    unequal = state_differs_before(evidence, evidence.optimizer, found.step, of)
    if unequal is None:
        return _state_written(evidence, found)
    update, key, names = unequal
    if not {one.name for one in found.differences} <= set(names):
        return None
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(f"after update {update}, {key} of {listed(names)} was not the same on all ranks",),
    )


def _state_written(evidence: Evidence, found: Divergence) -> Diagnosis | None:
    """Recognise state that somebody wrote on some ranks just before the weights parted."""
    names = {one.name for one in found.differences}
    wrote: dict[int, tuple[int, list[str]]] = {}
    for rank in found.ranks:
        for window in evidence.updates(rank, evidence.optimizer):
            if window["update"] not in found.steps:
                continue
            if names.intersection(window.get("written", ())):
                # Weights were written as well, which is reason enough.
                return None
            of = [name for name in window.get("state_written", ()) if name in names]
            if of:
                wrote[rank] = window["update"], of
    if not wrote or len(wrote) == len(found.ranks):
        return None
    update, of = next(iter(wrote.values()))
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(
            f"the optimizer's state of {listed(of)} was written or lost between updates "
            f"{update - 1} and {update}, not by an update; gradients and settings were equal",
        ),
        ranks=tuple(wrote),
        tensor=of[0],
    )


def state_differs_before(
    evidence: Evidence, optimizer: int, step: int, ranks: Collection[int]
) -> tuple[int, str, list[str]] | None:
    """Return update, key and parameters of the first state known to differ before an update.

    Only between the ranks that are named.
    """
    seen: dict[int, dict[int, Any]] = defaultdict(dict)
    for event in evidence.events("state"):
        if event["optimizer"] != optimizer or event["rank"] not in ranks:
            continue
        if event["update"] < step:
            seen[event["update"]][event["rank"]] = event["digests"]
    for update, by_rank in sorted(seen.items()):
        first = next(iter(by_rank.values()))
        for key in first:
            names = [
                name
                for name in first[key]
                if len({str(held.get(key, {}).get(name)) for held in by_rank.values()}) > 1
            ]
            if names:
                return update, key, names
    return None


@cause(
    family="optimizer state",
    sees="One rank has other weights than the rest from some update on; gradients, learning "
    "rates and optimizer state were equal.",
    why="Between two updates somebody wrote to the weights of one rank: pruning, clamping, a "
    "swap of weights for evaluation, a load. DDP never compares weights; the difference stays.",
    confirm="Print parameter._version on every rank before and after what is suspected.",
    change="write to weights on every rank alike, or send them around afterwards",
    fix="""
with torch.no_grad():
    parameter.mul_(mask)               # on every rank
    dist.broadcast(parameter, src=0)   # or on one, and then sent around
""",
)
def out_of_band_write(evidence: Evidence) -> Diagnosis | None:
    """Recognise weights that part with equal gradients, settings and state."""
    found = evidence.divergence
    if found is None or found.differences[0].kind != "parameter":
        return None
    if found.phase == START:
        return _written_after_wrapping(evidence, found)
    if found.phase != PARAMETERS or optimizer_state_differs(evidence) is not None:
        return None
    if read_before_write(evidence) is not None:
        return None
    names = {one.name for one in found.differences}
    wrote: dict[int, list[str]] = {}
    update = found.step
    for rank in evidence.ranks:
        for window in evidence.updates(rank, evidence.optimizer):
            written = [name for name in window.get("written", ()) if name in names]
            if written and window["update"] in found.steps:
                wrote[rank], update = written, window["update"]
    writers = tuple(wrote)
    odd = set(found.differences[0].odd)
    if writers and (len(writers) < len(evidence.ranks) or not odd):
        return Diagnosis(
            strength=Strength.PROVEN if len(writers) < len(evidence.ranks) else Strength.LIKELY,
            because=(
                f"{listed(wrote[writers[0]])} was written between updates {update - 1} and "
                f"{update}, not by the optimizer",
            ),
            ranks=writers,
            tensor=wrote[writers[0]][0],
        )
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(
            "gradients and settings of this update were equal, and so were the weights before; "
            "whether the optimizer's state was is not known",
        ),
        ranks=tuple(sorted(odd)),
    )


def _written_after_wrapping(evidence: Evidence, found: Divergence) -> Diagnosis | None:
    """Recognise weights that were equal when they were wrapped, and that no load has parted."""
    equal = equal_when_made(evidence)
    if not equal or structure_differs(evidence) is not None or loads_that_part(evidence):
        return None
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(
            f"{listed(equal)} was equal on all ranks when it was wrapped, and is not before the "
            f"first update of {evidence.source}: written in between, and not sent around",
        ),
        ranks=found.differences[0].odd,
        tensor=equal[0],
    )


@cause(
    family="optimizer state",
    sees="Under mixed precision the gradients of one rank weigh more or less than the others'.",
    why="A GradScaler decides for itself: one that has seen an overflow on one rank only skips "
    "that rank's update and scales its loss by another factor from then on.",
    confirm="Print scaler.get_scale() on every rank.",
    change="let all ranks see an overflow, so that their scalers decide alike",
    fix="""
scaler.scale(loss).backward()          # through the wrapper: the average carries inf to all ranks
# averaged by hand: before unscale_, which notes whether this rank's gradients are finite
""",
    reported=("facebookresearch/mmf#1073",),
)
def loss_scale_differs(evidence: Evidence) -> Diagnosis | None:
    """Recognise a loss scale that is not the same on all ranks after as many updates."""
    # Ranks that share no gradients may each train a model of their own.
    if not any(evidence.events("wrap")) and not any(evidence.events("reduced_by_hand")):
        return None
    # A scale is written down where it changes; a rank that is behind has not changed it yet.
    reached = min((events[-1]["step"] for events in evidence.journals.values()), default=0)
    scales: dict[int, dict[int, float]] = defaultdict(dict)
    events = sorted(evidence.events("loss_scale"), key=lambda event: int(event["step"]))
    for place, event in enumerate(events):
        step, by_rank = event["step"], scales[event["scaler"]]
        by_rank[event["rank"]] = event["scale"]
        if place + 1 < len(events) and events[place + 1]["step"] == step:
            continue
        known = len(by_rank) == len(evidence.ranks) and step < reached
        if known and len(set(by_rank.values())) > 1:
            said = ", ".join(f"{scale:g} on rank {rank}" for rank, scale in sorted(by_rank.items()))
            return Diagnosis(
                strength=Strength.PROVEN, because=(f"the loss scale is {said}",), step=step
            )
    return None


@cause(
    family="optimizer state",
    sees="Ranks drift apart in layers that a step does not use; gradients, None taken as zero, are "
    "equal.",
    why="An optimizer leaves a parameter alone that has no gradient, and applies momentum and "
    "weight decay to one whose gradient is zero. zero_grad decides which of the two it is.",
    confirm="Print which parameters have grad None, on every rank, right before the update.",
    change="clear gradients in the same way on every rank",
    fix="""
optimizer.zero_grad(set_to_none=True)  # on all ranks, whether they log gradients or not
""",
    reported=("pytorch/pytorch#115607",),
)
def grad_none_on_one_rank(evidence: Evidence) -> Diagnosis | None:
    """Recognise gradients that differ only in being there on some ranks."""
    unequal = unequal_gradients(evidence)
    if unequal is None:
        return None
    none: dict[int, set[str]] = {}
    for rank in evidence.ranks:
        event = evidence.latest("parameters", rank, unequal.optimizer, unequal.step)
        none[rank] = set() if event is None else set(event["without_gradient"])
    backwards = {window.get("backwards", 0) for window in unequal.windows.values()}
    lacking = [rank for rank in none if none[rank].issuperset(unequal.names)]
    others = [rank for rank in none if none[rank].isdisjoint(unequal.names)]
    if len(backwards) != 1 or not lacking or len(lacking) + len(others) < len(none) or not others:
        return None
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(
            f"no gradient of {listed(unequal.names)} on {len(lacking)} of {len(none)} ranks, and "
            f"one on rank {others[0]}",
        ),
        ranks=tuple(lacking if len(lacking) < len(others) else others),
        tensor=unequal.names[0],
    )
