"""Replicas that are not equal to begin with, or whose modules are not the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from harness.causes.cause import Diagnosis, Strength, cause, listed
from harness.causes.groups import wrong_group_after_remesh
from harness.watch.evidence import Evidence
from harness.watch.journal import Event
from harness.watch.layout import START

_Wraps = Mapping[int, Mapping[int, Event]]


def _wraps(evidence: Evidence, kind: str = "wrap") -> _Wraps:
    """Return number of a wrapper -> rank -> the event that says how it was made."""
    found: dict[int, dict[int, Event]] = defaultdict(dict)
    for event in evidence.events(kind):
        found[event["module"]][event["rank"]] = event
    return found


@cause(
    family="initial state",
    sees='A crash or a hang when the model is wrapped ("DDP expects same model across all ranks"), '
    "or, where shapes happen to fit, weights that are those of another layer.",
    why="DDP pairs the parameters of two ranks by their position, not by their name. Modules built "
    "in another order, from a set or only on some ranks, are paired wrongly.",
    confirm="Print [(name, p.shape) for name, p in model.named_parameters()] on every rank.",
    change="build the same modules in the same order on every rank",
    fix="""
for name in sorted(heads):             # a set has another order in every process
    self.heads[name] = nn.Linear(64, sizes[name])
""",
    reported=("pytorch/pytorch#32426", "pytorch/pytorch#73547", "huggingface/transformers#30702"),
)
def structure_differs(evidence: Evidence) -> Diagnosis | None:
    """Recognise a module that was wrapped with other parameters on another rank."""
    for number, by_rank in _wraps(evidence).items():
        first_rank, first = next(iter(by_rank.items()))
        for rank, event in by_rank.items():
            # Stages of a pipeline are wrapped with groups of their own.
            if rank not in first.get("ranks", evidence.ranks):
                continue
            said = _mismatch(first, event)
            if said is None:
                continue
            name, here, there = said
            return Diagnosis(
                strength=Strength.PROVEN,
                because=(
                    f"wrapper {number} got {here} on rank {first_rank} and {there} on rank {rank} "
                    "in the same place",
                ),
                where=event["at"],
                ranks=_odd(by_rank),
                tensor=name,
            )
    return None


def _mismatch(one: Event, other: Event) -> tuple[str, str, str] | None:
    """Return the name, and what stands in each, of the first place in which two modules differ."""
    for kind in ("parameters", "buffers"):
        rows, others = one[kind], other[kind]
        if rows == others:
            continue
        for place in range(max(len(rows), len(others))):
            here = rows[place] if place < len(rows) else None
            there = others[place] if place < len(others) else None
            if here != there:
                return str((here or there or [""])[0]), _row(here), _row(there)
    return None


def _row(row: list[Any] | None) -> str:
    if row is None:
        return "nothing"
    name, shape, dtype, *requires = row
    frozen = ", frozen" if requires == [False] else ""
    return f"{name} {tuple(shape)} {dtype}{frozen}"


def _odd(by_rank: Mapping[int, Event]) -> tuple[int, ...]:
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, event in by_rank.items():
        groups[repr((event["parameters"], event["buffers"]))].append(rank)
    largest = max(groups.values(), key=len)
    if 2 * len(largest) <= len(by_rank):
        return ()
    return tuple(rank for ranks in groups.values() if ranks is not largest for rank in ranks)


@cause(
    family="initial state",
    sees="The loss falls and stays above that of one process; every rank trains other weights with "
    "the same gradients.",
    why="Averaging gradients keeps equal what is equal, and keeps a difference as well. Weights "
    "drawn from a seed of the rank's own, and never sent around, stay apart.",
    confirm="Compare a checksum of the weights before the first update.",
    change="send rank 0's weights around before the first update",
    fix="""
for tensor in [*model.parameters(), *model.buffers()]:
    dist.broadcast(tensor.detach(), src=0)
""",
    reported=(
        "pytorch/torchtitan#166",
        "allenai/OLMo-core#319",
        "mosaicml/llm-foundry#830",
        "pytorch/pytorch#140183",
    ),
)
def init_differs(evidence: Evidence) -> Diagnosis | None:
    """Recognise parameters that were never equal, with gradients that are."""
    found = evidence.divergence
    if found is None or found.phase != START or found.differences[0].kind != "parameter":
        return None
    if structure_differs(evidence) is not None or was_equal_when_wrapped(evidence):
        return None
    if loads_that_part(evidence) or wrong_group_after_remesh(evidence) is not None:
        return None
    if equal_when_made(evidence):
        return None
    names = [one.name for one in found.differences if one.kind == "parameter"]
    wrapped = any(evidence.events("wrap"))
    because = (
        "they were wrapped without being sent around (init_sync=False)"
        if wrapped
        else "nobody wrapped the model, and the gradients of the first update are equal"
    )
    return Diagnosis(
        strength=Strength.PROVEN,
        because=(f"unequal before the first update: {listed(names)}", because),
        tensor=names[0],
    )


def was_equal_when_wrapped(evidence: Evidence) -> bool:
    """Say whether the weights were equal on all ranks at the first call of each wrapper."""
    called = _wraps(evidence, "wrapper")
    if not called:
        return False
    return all(
        len({tuple(event["digests"]) for event in by_rank.values()}) == 1
        for by_rank in called.values()
    )


def equal_when_made(evidence: Evidence) -> list[str]:
    """Return the differing parameters, if all were equal when their module was wrapped."""
    names = [] if evidence.divergence is None else [d.name for d in evidence.divergence.differences]
    equal = []
    for by_rank in _wraps(evidence).values():
        if set(by_rank) != set(evidence.ranks):
            continue
        events = list(by_rank.values())
        rows = [name for name, *_ in events[0]["parameters"]]
        for place, name in enumerate(rows):
            digests = {tuple(event["digests"][place : place + 1]) for event in events}
            if len(digests) == 1 and digests != {()}:
                equal += [one for one in names if one == name or one.endswith(f".{name}")]
    return equal if set(equal) == set(names) else []


def module_loads(evidence: Evidence) -> list[Event]:
    """Return where modules were loaded."""
    return [event for event in evidence.events("load") if event["what"] == "module"]


def loads_that_part(evidence: Evidence) -> list[Event]:
    """Return where modules were loaded with what may not be the same on all ranks.

    Not before they were wrapped: a wrapper sends rank 0's weights around.
    """
    found: dict[int, list[Event]] = {}
    for rank in evidence.ranks:
        found[rank] = []
        for event in evidence.journals[rank]:
            if event["kind"] == "wrap":
                found[rank] = []
            elif event["kind"] == "load" and event["what"] == "module":
                found[rank].append(event | {"rank": rank})
    contents = {tuple(e.get("content") for e in loads) for loads in found.values()}
    if len(contents) == 1 and None not in next(iter(contents)):
        return []
    return [event for loads in found.values() for event in loads]


@cause(
    family="initial state",
    sees="A resumed run goes on from other weights on some ranks, and no error comes.",
    why="A checkpoint that only some ranks load, or that each rank loads a part of, leaves the "
    "replicas unequal unless weights are sent around afterwards. DDP does so once, when it wraps.",
    confirm="Compare a checksum of the weights right after loading.",
    change="load on every rank before wrapping, or send the weights around after loading",
    fix="""
model.module.load_state_dict(state)    # on every rank
for parameter in model.parameters():
    dist.broadcast(parameter.detach(), src=0)
""",
    reported=("NVIDIA/Megatron-LM#6920",),
)
def weights_not_resynced_on_load(evidence: Evidence) -> Diagnosis | None:
    """Recognise weights that part where a checkpoint was loaded."""
    found = evidence.divergence
    if structure_differs(evidence) is not None:
        return None
    if found is None:
        return _unequal_when_called(evidence)
    if found.phase != START or found.differences[0].kind != "parameter":
        return None
    loads = loads_that_part(evidence)
    ranks = tuple(sorted({event["rank"] for event in loads}))
    if not ranks:
        return None
    some = len(ranks) < len(evidence.ranks)
    return Diagnosis(
        strength=Strength.PROVEN if some else Strength.LIKELY,
        because=(
            "a module was loaded on these ranks only, and its weights were not sent around after it"
            if some
            else "a module was loaded on every rank, and what they hold then is not the same",
        ),
        where=loads[0]["at"],
        ranks=ranks if some else (),
    )


def _unequal_when_called(evidence: Evidence) -> Diagnosis | None:
    """Recognise weights that were equal when they were wrapped, and not when they were used.

    For weights that no optimizer holds itself, such as those of which each rank updates a part.
    """
    made, called = _wraps(evidence), _wraps(evidence, "wrapper")
    loads = [event for event in evidence.events("load") if event["rank"] == evidence.ranks[0]]
    for number, by_rank in called.items():
        then, now = made.get(number, {}), list(by_rank.values())
        if set(by_rank) != set(evidence.ranks) or set(then) != set(by_rank):
            continue
        if any(event["ranks"] != list(evidence.ranks) for event in then.values()):
            continue
        same = len({tuple(event["digests"]) for event in then.values()}) == 1
        names = [name for name, *_ in next(iter(then.values()))["parameters"]]
        unequal = [
            name
            for place, name in enumerate(names)
            if name not in now[0]["ignored"]
            and all(place < len(event["digests"]) for event in now)
            and len({event["digests"][place] for event in now}) > 1
        ]
        since = [event for event in loads if event["step"] <= now[0]["step"]]
        if not same or not unequal or not since:
            continue
        return Diagnosis(
            strength=Strength.LIKELY,
            because=(
                f"the weights of wrapper {number} were equal when it was made; at its first call "
                f"{listed(unequal)} are not, and a checkpoint had been loaded",
            ),
            where=since[-1]["at"],
            step=now[0]["step"],
            tensor=unequal[0],
        )
    return None
