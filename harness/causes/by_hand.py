"""Gradients and weights that the script reduces itself: all of them, some, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.causes.parallel import bare_gradients, has_odd_ranks
from harness.causes.unequal import Unequal, unequal_gradients
from harness.watch.evidence import Evidence
from harness.watch.journal import Event

NEVER_AVERAGED = "gradients_never_averaged"
"""What training with averages of the weights now and then looks like before the first of them."""
_TIMES = 2
"""Averages of the weights that make it a way of training."""


@cause(
    family="parallel layouts",
    sees="A few parameters differ between ranks, the others agree; gradients are averaged by hand.",
    why="Who averages gradients by hand has to reach every parameter. One that a filter, a flag or "
    "a list made too early leaves out is trained on each rank's own data.",
    confirm="Count the all-reduces of an update and compare them with the parameters.",
    change="average the gradient of every parameter",
    fix="""
for parameter in model.parameters():   # all of them, in one order
    dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
""",
)
def reduction_left_out(evidence: Evidence) -> Diagnosis | None:
    """Recognise parameters that are not reduced where others of the same optimizer are."""
    bare = bare_gradients(evidence)
    if bare is None or bare[2] or not bare[1]:
        return None
    unequal, replicas, _ = bare
    # What tensor parallelism reduces where, it knows itself.
    if has_odd_ranks(unequal) or unequal.parts:
        return None
    orders = _reduced(unequal)
    if len(unequal.names) == unequal.compared:
        return _all_left_out(evidence, unequal, orders)
    reduced = {name for names in orders.values() for name in names}
    averaged = {
        name
        for event in evidence.events("weights_reduced")
        if event["optimizer"] == evidence.optimizer
        for name in event["names"]
    }
    # Weights that are averaged after each update are what averaged gradients would make of them.
    if (reduced | averaged) & set(replicas):
        return None
    return Diagnosis(
        # Gradients may be reduced in one flat tensor, which is not seen.
        strength=Strength.PROVEN if len(orders) == len(evidence.ranks) else Strength.LIKELY,
        because=(
            f"no wrapper holds {listed(replicas)}, and no rank reduced the gradient; the gradients "
            f"of {unequal.compared - len(unequal.names)} other parameters were equal",
        ),
        tensor=replicas[0],
    )


def _all_left_out(
    evidence: Evidence, unequal: Unequal, orders: Mapping[int, Sequence[str]]
) -> Diagnosis | None:
    """Recognise a whole update, or a whole optimizer, that is left out of the reductions."""
    before = [
        event
        for event in evidence.events("reduced_by_hand")
        if event["optimizer"] == unequal.optimizer
        if event["names"] and event["update"] < unequal.step
    ]
    if any(orders.values()) or _averages(evidence):
        return None
    if before:
        return Diagnosis(
            strength=Strength.LIKELY,
            because=(
                f"the gradients of {listed(unequal.names)} were reduced one by one before earlier "
                f"updates, and before update {unequal.step} none was",
            ),
            tensor=unequal.names[0],
        )
    others = _reduced_of_others(evidence, unequal.optimizer)
    if not others:
        return None
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(
            f"no wrapper holds {listed(unequal.names)}, all of {evidence.source}, and no rank "
            f"reduced the gradient; those of {listed(others)}, of other optimizers, were reduced",
        ),
        tensor=unequal.names[0],
    )


def _reduced_of_others(evidence: Evidence, optimizer: int) -> list[str]:
    """Return parameters of other optimizers whose gradients the script has reduced itself."""
    names = [
        name
        for event in evidence.events("reduced_by_hand", evidence.ranks[0])
        if event["optimizer"] != optimizer
        for name in event["names"]
    ]
    return list(dict.fromkeys(names))


def _reduced(unequal: Unequal) -> dict[int, list[str]]:
    """Return rank -> the gradients that it reduced itself before the update, in its order."""
    found = {}
    for rank in unequal.evidence.ranks:
        event = unequal.evidence.latest("reduced_by_hand", rank, unequal.optimizer, unequal.step)
        if event is not None:
            found[rank] = list(event["names"])
    return found


def reduced_in_another_order(evidence: Evidence) -> Diagnosis | None:
    """Recognise gradients that ranks have reduced one by one, in an order of their own."""
    unequal = unequal_gradients(evidence)
    orders = {} if unequal is None else _reduced(unequal)
    if unequal is None or len(orders) < len(evidence.ranks):
        return None
    counts = Counter(map(tuple, orders.values())).most_common()
    if len(counts) < 2 or len({tuple(sorted(order)) for order, _ in counts}) > 1:
        return None
    usual, members = counts[0]
    odd = [rank for rank, order in orders.items() if tuple(order) != usual]
    mine = orders[odd[0]]
    place = next(i for i, name in enumerate(usual) if mine[i] != name)
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(
            f"reduction {place} of this update was of {mine[place]} on rank {odd[0]} and of "
            f"{usual[place]} on others: sums of unrelated gradients",
        ),
        ranks=tuple(odd) if 2 * members > len(orders) else (),
        tensor=mine[place],
    )


@cause(
    family="parallel layouts",
    sees="Every rank trains a model of its own from the first update on.",
    why="Nothing averages the gradients: the model was never wrapped, and nobody reduces by hand.",
    confirm="Count the collectives of one update: there are none.",
    change="wrap the model in DistributedDataParallel",
    fix="""
model = DistributedDataParallel(model)
""",
)
def gradients_never_averaged(evidence: Evidence) -> Diagnosis | None:
    """Recognise replicas without a wrapper whose gradients all differ in the first update."""
    bare = bare_gradients(evidence)
    if bare is None or bare[2] or bare[0].step or has_odd_ranks(bare[0]):
        return None
    unequal = bare[0]
    if len(unequal.names) < unequal.compared or unequal.parts:
        return None
    if reduction_left_out(evidence) is not None:
        return None
    averaged = min((e["update"] for e in _averages(evidence)), default=None)
    if averaged is not None:
        return Diagnosis(
            strength=Strength.FACT,
            because=(
                "no wrapper holds any parameter of this optimizer, and the script reduces the "
                f"weights themselves before update {averaged}: between such averages "
                "replicas may differ on purpose, and `--unequal` takes their names",
            ),
        )
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(
            "no wrapper holds any parameter of this optimizer, and no gradient is equal on all "
            "ranks",
        ),
    )


def _averages(evidence: Evidence, rank: int | None = None) -> list[Event]:
    """Return the events in which weights were reduced, each or all in one tensor."""
    events = [
        *evidence.events("weights_reduced", rank),
        # Gradients in one tensor would have been reduced before the update in which they differ.
        *(e for e in evidence.events("reduced_as_one", rank) if e["update"]),
    ]
    return [event for event in events if event["optimizer"] == evidence.optimizer]


def averages_by_hand(evidence: Evidence) -> str | None:
    """Say how replicas that differ from the first update on are meant to, or None.

    Training with averages of the weights now and then, made by the script itself: that once is not
    enough to say so, since weights may be made equal in the beginning.
    """
    made_equal = _made_equal(evidence)
    if made_equal is not None:
        return made_equal
    found, parted = gradients_never_averaged(evidence), evidence.divergence
    if parted is None or found is None or found.strength > Strength.FACT:
        return None
    names = {one.name for one in parted.differences}

    def of_all(event: Event) -> bool:
        cut_short = event["count"] > len(event["names"])
        return event["count"] >= len(names) and (cut_short or names <= set(event["names"]))

    times = [{e["update"] for e in _averages(evidence, r) if of_all(e)} for r in evidence.ranks]
    averages = sorted(set.intersection(*times))
    if len(averages) < _TIMES:
        return None
    shown = ", ".join(map(str, averages[:3])) + (", ..." if len(averages) > 3 else "")
    return (
        f"the script averages the weights of {evidence.source} itself, before updates {shown}: "
        "replicas differ on purpose in between and were not compared"
    )


def _made_equal(evidence: Evidence) -> str | None:
    """Recognise rounds of local training: replicas that part are equal again in the next one."""
    bare, number = bare_gradients(evidence), evidence.optimizer
    if bare is None or bare[2] or number is None or bare[0].step or has_odd_ranks(bare[0]):
        return None
    rounds = evidence.made_equal.get(number, ())
    if len(rounds) < _TIMES:
        return None
    return (
        f"the script makes replicas equal itself, between one optimizer and the next "
        f"({len(rounds)} times): they differ on purpose in between and were not compared"
    )
