"""Where replicas part: which step, which tensor, which rank. Pure functions over what was read."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness.watch.layout import EVALUATION, GRADIENTS, PARAMETERS, START, Entry, index_of, place_of
from harness.watch.schedule import earliest

Seen = Mapping[int, tuple[tuple[Entry, ...], tuple[int, ...]]]
"""Rank -> entries and their digests, at one place."""
NOT_ALIKE = (
    "some compute digests with the package xxhash and some without it; pip install xxhash for all"
)
Look = Callable[[int], Seen]
"""Index -> what each rank wrote there, as far as it is still there."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that is not the same on all ranks which hold it."""

    name: str
    kind: str
    groups: tuple[tuple[int, ...], ...]
    """Ranks that agree with each other, the largest group first."""
    values: dict[int, str] = field(default_factory=dict)
    """Rank -> value, where it can be shown."""
    structural: bool = False
    """Shape or dtype differ, or a rank lacks it altogether."""

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks outside of the majority; empty where there is no majority."""
        total = sum(map(len, self.groups))
        if len(self.groups[0]) * 2 <= total:
            return ()
        return tuple(sorted(rank for group in self.groups[1:] for rank in group))


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place in execution order where replicas are no longer equal."""

    step: int
    phase: str
    differences: tuple[Difference, ...]
    """In the order in which the ranks execute; the first one is the answer."""
    compared: int
    """How many things of the same kind were compared there."""
    ranks: tuple[int, ...]
    sampled: bool = False
    """Of the gradients, said to be equal, no more than a sample was read."""
    since: int | None = None
    """The first update that can have made it, where what differs is read in parts; else None."""

    @property
    def steps(self) -> range:
        """The updates one of which has made it."""
        return range(self.step if self.since is None else self.since, self.step + 1)

    @property
    def order(self) -> float:
        """Its place in the order of execution."""
        if self.phase == EVALUATION:
            return index_of(self.step, GRADIENTS) - 0.5
        return index_of(self.step, self.phase)


def differences(seen: Seen) -> list[Difference]:
    """Return what differs at one place, each thing among the ranks of its cohort only."""
    held: dict[tuple[str, str, str, str], dict[int, tuple[Entry, int]]] = defaultdict(dict)
    cohorts: dict[tuple[str, str], set[str]] = defaultdict(set)
    methods: dict[tuple[str, str], set[str]] = defaultdict(set)
    for rank, (entries, digests) in sorted(seen.items()):
        for entry, digest in zip(entries, digests, strict=True):
            held[entry.kind, entry.name, entry.cohort, entry.method][rank] = (entry, digest)
            cohorts[entry.kind, entry.name].add(entry.cohort)
            methods[entry.kind, entry.name].add(entry.method)
    found = []
    for (kind, name, _, _), copies in held.items():
        groups: dict[object, list[int]] = defaultdict(list)
        for rank in sorted(seen):
            if rank in copies:
                entry, digest = copies[rank]
                groups[digest, entry.shape, entry.dtype].append(rank)
            elif cohorts[kind, name] == {""} and len(methods[kind, name]) == 1:
                groups[None].append(rank)
        if len(groups) > 1:
            entries_there = [entry for entry, _ in copies.values()]
            shapes = {(entry.shape, entry.dtype) for entry in entries_there}
            found.append(
                Difference(
                    name=name,
                    kind=kind,
                    groups=tuple(sorted(map(tuple, groups.values()), key=lambda g: (-len(g), g))),
                    values=_values(copies),
                    structural=None in groups or len(shapes) > 1,
                )
            )
    return found


def not_alike(seen: Seen) -> tuple[int, ...]:
    """Return the ranks whose digests of something are made otherwise than those of the first."""
    rows = sorted(seen.items())
    first = {(e.kind, e.name): e.method for _, (entries, _) in rows[:1] for e in entries}
    return tuple(
        rank
        for rank, (entries, _) in rows
        if any(first.get((e.kind, e.name), e.method) != e.method for e in entries)
    )


def divergence(look: Look, index: int) -> Divergence | None:
    """Return the divergence that what differs at `index` gives proof of, or None.

    Differing gradients alone are no fault: some optimizers do the reduction themselves. They
    count once the parameters differ after the update, and then they are where it began.
    """
    step, phase = place_of(index)
    look = _members_apart(look)
    seen = look(index)
    found = differences(seen)
    if phase == START:
        due = [d for d in found if _wrapped(seen, d.name)]
        return _made(0, START, due, seen) if due else None
    if index in (index_of(0, GRADIENTS), index_of(1, GRADIENTS)):
        began = _unequal_start(look)
        if began:
            return began
    if not found:
        return None
    local = rank_local(look)
    if phase == GRADIENTS:
        held = {e.name for entries, _ in seen.values() for e in entries if e.kind == "gradient"}
        settings = [d for d in found if d.kind == "setting"]
        if held <= local or not settings:
            return None
        return _made(step, GRADIENTS, settings, seen)
    due = [d for d in found if d.name not in local]
    if not due:
        return None
    names = {d.name for d in due}
    before = look(index_of(step, GRADIENTS))
    earlier = [d for d in differences(before) if d.kind == "gradient" and d.name in names]
    if earlier:
        # Backward reaches the last layers first.
        return _made(step, GRADIENTS, earlier[::-1], before)
    entries = [e for entries, _ in before.values() for e in entries if e.name in names]
    sampled = step > 0 and any(e.sampled for e in entries)
    parts = [e.parts for entries, _ in seen.values() for e in entries if e.name in names]
    # Whatever is read most often dates the others.
    first = earliest(step, min(parts, default=0))
    since = first if first < step else None
    return _made(step, PARAMETERS, due, seen, sampled=sampled, since=since)


def members(start: Seen) -> set[str]:
    """Return the names of parameters of which each group of ranks has values of its own.

    A model for each group, or an expert: equal within the group that its wrapper reduces over, and
    not between groups, before the first update. What begins with the same values everywhere, such
    as a scale of ones or a pretrained part, is one of them where its wrapper has the same groups.
    """
    held: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for entries, digests in start.values():
        for entry, digest in zip(entries, digests, strict=True):
            if entry.kind == "parameter" and entry.group:
                held[entry.name][entry.group].add(digest)
    apart = {
        frozenset(by_group)
        for by_group in held.values()
        if all(len(values) == 1 for values in by_group.values())
        and len(set[int]().union(*by_group.values())) > 1
    }
    return {name for name, by_group in held.items() if frozenset(by_group) in apart}


def _members_apart(look: Look) -> Look:
    """Let each group of ranks that has a model of its own be compared within itself only."""
    start = look(0)
    own = (
        members(start) if any(e.group for entries, _ in start.values() for e in entries) else set()
    )
    if not own:
        return look

    def apart(index: int) -> Seen:
        seen = {}
        for rank, (entries, digests) in look(index).items():
            groups = {e.group for e in entries if e.name in own}
            # What an optimizer of one model is told is that model's as well.
            whole = {e.group for e in entries if e.kind != "setting"} == groups and len(groups) == 1
            group = next(iter(groups)) if whole else ""
            seen[rank] = (
                tuple(
                    replace(e, cohort=f"{e.cohort} of {e.group or group}")
                    if e.name in own or (e.kind == "setting" and group)
                    else e
                    for e in entries
                ),
                digests,
            )
        return seen

    return apart


def at_evaluation(seen: Seen, updates: int) -> Divergence | None:
    """Return what differs between modules at an evaluation after so many updates.

    Where weights are known to differ, ranks evaluate models of their own.
    """
    due = differences(seen)
    if not due or any(one.kind == "parameter" for one in due):
        return None
    return _made(updates, EVALUATION, due, seen)


def _unequal_start(look: Look) -> Divergence | None:
    start = look(0)
    local = rank_local(look)
    due = [d for d in differences(start) if d.name not in local]
    return _made(0, START, due, start) if due else None


def rank_local(look: Look) -> set[str]:
    """Return the names of tensors that were never replicas: parts, or a model for each rank.

    Not on every rank in the same shape; or unequal before the first update, and with unequal
    gradients for it. Unequal with equal gradients is another thing: replicas that were given
    different values to begin with.
    """
    start, gradients = look(0), look(index_of(0, GRADIENTS))
    unequal = [d for d in differences(start) if d.kind == "parameter"]
    also = {d.name for d in differences(gradients) if d.kind == "gradient"}
    also |= _without_gradient(gradients) | _zero_until_later(look, gradients)
    local = {
        d.name for d in unequal if (d.structural or d.name in also) and not _wrapped(start, d.name)
    }
    # The bias of an expert, or of a column of a layer, is zero on every rank to begin with, and so
    # may a whole part of a layer be.
    layers = {name.rpartition(".")[0] for name in local if "." in name}
    return local | {
        entry.name
        for entries, _ in start.values()
        for entry in entries
        if entry.constant and not entry.wrapped
        if entry.name in also
        if entry.name.rpartition(".")[0] in layers or (local and len(entry.shape or ()) > 1)
    }


def _zero_until_later(look: Look, gradients: Seen) -> set[str]:
    """Return what has a gradient of zero on every rank, and may be a part or a replica.

    Below a layer that begins with zeros all gradients are equal. The second ones tell.
    """
    entries = [e for entries, _ in gradients.values() for e in entries if e.kind == "gradient"]
    zero = {e.name for e in entries} - {e.name for e in entries if not e.constant}
    later = look(index_of(1, GRADIENTS)) if zero else {}
    if zero and len(later) == len(gradients):
        zero &= {d.name for d in differences(later)}
    return zero


def begins_equal(look: Look, ranks: Sequence[int]) -> bool:
    """Say whether all parameters were equal on all of the ranks before the first update."""
    start = look(0)
    return set(start) == set(ranks) and not any(
        one.kind == "parameter" for one in differences(start)
    )


def _without_gradient(seen: Seen) -> set[str]:
    return {
        entry.name
        for entries, _ in seen.values()
        for entry in entries
        if entry.kind == "gradient" and entry.shape is None
    }


def _wrapped(seen: Seen, name: str) -> bool:
    return any(e.wrapped for entries, _ in seen.values() for e in entries if e.name == name)


def _made(
    step: int,
    phase: str,
    found: list[Difference],
    seen: Seen,
    *,
    sampled: bool = False,
    since: int | None = None,
) -> Divergence:
    kind = found[0].kind
    names = {e.name for entries, _ in seen.values() for e in entries if e.kind == kind}
    return Divergence(
        step=step,
        phase=phase,
        differences=tuple(found),
        compared=len(names),
        ranks=tuple(sorted(seen)),
        sampled=sampled,
        since=since,
    )


def _values(copies: Mapping[int, tuple[Entry, int]]) -> dict[int, str]:
    return {
        rank: repr(struct.unpack("<d", struct.pack("<q", digest))[0])
        for rank, (entry, digest) in copies.items()
        if entry.values
    }


def to_json(found: Divergence) -> dict[str, Any]:
    """Return it as JSON."""
    return {
        "step": found.step,
        "phase": found.phase,
        "compared": found.compared,
        "ranks": list(found.ranks),
        "sampled": found.sampled,
        "since": found.since,
        "differences": [
            {
                "name": d.name,
                "kind": d.kind,
                "groups": [list(group) for group in d.groups],
                "values": {str(rank): value for rank, value in d.values.items()},
                "structural": d.structural,
            }
            for d in found.differences
        ],
    }


def from_json(content: dict[str, Any]) -> Divergence:
    """Read what `to_json` wrote."""
    return Divergence(
        step=content["step"],
        phase=content["phase"],
        compared=content["compared"],
        ranks=tuple(content["ranks"]),
        sampled=content["sampled"],
        since=content["since"],
        differences=tuple(
            Difference(
                name=d["name"],
                kind=d["kind"],
                groups=tuple(tuple(group) for group in d["groups"]),
                values={int(rank): value for rank, value in d["values"].items()},
                structural=d["structural"],
            )
            for d in content["differences"]
        ),
    )
