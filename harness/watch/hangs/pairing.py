"""Which collective has no partner: the calls of all ranks laid side by side. Pure data, no torch.

Ranks wait where the last of them is late, which is seldom where they parted. Collectives pair by
their number within a group, so the first number whose calls do not fit is where it began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

SAME_SIZE = frozenset(
    ("all_reduce", "allreduce_coalesced", "all_reduce_coalesced", "broadcast", "reduce")
)
"""Operations to which every rank of the group has to bring as many elements, of one dtype."""
GLOO_SAME_SIZE = frozenset(("all_gather", "_all_gather_base", "_allgather_base"))
ROOTED = frozenset(("broadcast", "reduce", "gather", "scatter"))
"""Ranks have different roles in them, and often a line of code each."""
FARTHEST = 64
"""Calls by which two ranks may be shifted for the shift to be recognised."""


class Frame(NamedTuple):
    """A line of the user's code."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective that a rank has called."""

    group: str
    number: int
    """Of the calls of its group, from 1."""
    operation: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    via: tuple[Frame, ...] = ()
    """The frames that led to it, the innermost first; without those of torch."""
    done: bool = True
    time: float = 0.0
    backend: str = "gloo"

    @property
    def at(self) -> str | None:
        """`path:line` of the innermost frame."""
        return str(self.via[0]) if self.via else None

    @property
    def elements(self) -> int:
        """Elements that the rank brings."""
        return sum(prod(shape) for shape in self.shapes)

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """What has to be alike on all ranks."""
        sized = self.operation in SAME_SIZE or (
            self.backend == "gloo" and self.operation in GLOO_SAME_SIZE
        )
        return (self.operation, self.elements, self.dtypes) if sized else (self.operation,)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """The signature, and where it was called."""
        return (self.signature, self.via)

    def __str__(self) -> str:
        what = f"{self.operation} {self.number}"
        if self.shapes:
            sizes = ", ".join("x".join(map(str, shape)) or "1" for shape in self.shapes[:2])
            what += f" of {sizes} {self.dtypes[0] if self.dtypes else ''}".rstrip()
        return what if self.at is None else f"{what} at {self.at}"


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The last collectives of a rank."""

    groups: Mapping[str, tuple[int, ...]]
    """Group -> its ranks, as far as known."""
    made: Mapping[str, tuple[Call, ...]]
    """Group -> calls in their order, without gaps."""

    @property
    def last(self) -> Call | None:
        """The latest call of all groups."""
        every = [calls[-1] for calls in self.made.values() if calls]
        return max(every, key=lambda call: call.time, default=None)

    @property
    def waiting(self) -> Call | None:
        """The earliest call that is not over."""
        every = [call for calls in self.made.values() for call in calls if not call.done]
        return min(every, key=lambda call: call.time, default=None)


def from_json(content: Mapping[str, Any]) -> Calls:
    """Return what `harness.watch.hangs.collectives` has written."""
    chains = [
        tuple(Frame(path, int(line), function) for path, line, function in chain)
        for chain in content["chains"]
    ]
    made: dict[str, list[Call]] = {}
    for group, number, operation, shapes, dtypes, chain, done, time, backend in content["calls"]:
        call = Call(
            group=group,
            number=number,
            operation=operation,
            shapes=tuple(tuple(shape) for shape in shapes),
            dtypes=tuple(dtypes),
            via=chains[chain],
            done=done,
            time=time,
            backend=backend,
        )
        calls = made.setdefault(group, [])
        # A gap means that what is before it was overwritten in part.
        if calls and number != calls[-1].number + 1:
            calls.clear()
        calls.append(call)
    return Calls(
        groups={name: tuple(ranks) for name, ranks in content["groups"].items()},
        made={group: tuple(calls) for group, calls in made.items()},
    )


MISSING = "missing"
"""Some ranks have not made the call, and until then all were alike."""
EXTRA = "extra"
"""Some ranks made calls in between that the others did not make, and went on alike."""
SKIPPED = "skipped"
"""Some ranks left out calls that the others made, and went on alike."""
ORDER = "order"
"""The same calls, in another order."""
PARTED = "parted"
"""Different calls, and nothing after them that would tell which one is out of place."""


@dataclass(frozen=True, kw_only=True)
class Unpaired:
    """The first call that has no partner, or has the wrong one."""

    kind: str
    group: str
    number: int
    calls: Mapping[int, Call | None]
    """Rank -> its call of that number; None if it made none."""
    odd: tuple[int, ...]
    """The ranks that lack it, or made something else than most."""
    count: int = 1
    """Calls that are missing, extra, skipped or out of order."""
    between: Mapping[int, tuple[Call, ...]] = field(default_factory=dict)
    """Rank -> all its calls that are concerned."""

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks that are not odd."""
        return tuple(rank for rank in self.calls if rank not in self.odd)

    @property
    def expected(self) -> Call:
        """The call that the odd ranks would have to join; of the odd ones if they made more."""
        side = self.odd if self.kind == EXTRA else self.others
        return next(call for rank in side if (call := self.calls[rank]) is not None)

    def fits(self) -> bool:
        """Say whether all that called brought the same operation, size and dtype."""
        return len({call.signature for call in self.calls.values() if call is not None}) == 1


@dataclass(frozen=True)
class _Difference:
    kind: str
    index: int
    count: int = 1


def first_unpaired(records: Mapping[int, Calls]) -> Unpaired | None:
    """Return the earliest call, of any group, that does not fit on all ranks.

    Args:
        records: rank -> what is known of its calls. Ranks of whom nothing is known take no part.
    """
    names = dict.fromkeys(name for calls in records.values() for name in calls.made)
    found = [one for name in names if (one := _in_group(name, records)) is not None]
    return min(found, key=_began, default=None)


def _began(found: Unpaired) -> float:
    return min(call.time for call in found.calls.values() if call is not None)


def _in_group(name: str, records: Mapping[int, Calls]) -> Unpaired | None:
    members = {ranks for c in records.values() if (ranks := c.groups.get(name))}
    if len(members) > 1:
        # Groups of the same name that are not the same group.
        return None
    inside = next(iter(members), ()) or tuple(r for r, c in records.items() if name in c.made)
    sides = {rank: records[rank].made.get(name, ()) for rank in inside if rank in records}
    if len(sides) < 2:
        return None
    first = max((calls[0].number for calls in sides.values() if calls), default=1)
    if first > 1 and not all(sides.values()):
        return None
    sides = {r: tuple(c for c in calls if c.number >= first) for r, calls in sides.items()}
    return _laid_side_by_side(name, first, sides)


def _laid_side_by_side(
    name: str, first: int, sides: Mapping[int, tuple[Call, ...]]
) -> Unpaired | None:
    # Most ranks have made the very same calls; one of them stands for all of these.
    same: dict[int, list[int]] = {}
    for rank, calls in sides.items():
        like = next((one for one in same if _equal(sides[one], calls)), rank)
        same.setdefault(like, []).append(rank)
    between = {(a, b): _compare(sides[a], sides[b]) for a in same for b in same if a != b}
    agree = {
        a: sum(
            len(same[b])
            for b in same
            if b == a or (found := between[a, b]) is None or found.kind == MISSING
        )
        for a in same
    }
    # The rank that most agree with; of two it is the one that came farther.
    base = max(same, key=lambda rank: (agree[rank], len(sides[rank]), -rank))
    differing = {
        rank: found
        for one, ranks in same.items()
        if one != base and (found := between[base, one]) is not None
        for rank in ranks
    }
    if not differing:
        return None
    index = min(found.index for found in differing.values())
    chosen = min(
        (found for found in differing.values() if found.index == index),
        key=lambda found: found.kind == MISSING,
    )
    if chosen.kind == MISSING:
        longest = max(len(calls) for calls in sides.values())
        odd = tuple(rank for rank, calls in sides.items() if len(calls) < longest)
    else:
        odd = tuple(r for r, f in differing.items() if (f.kind, f.index) == (chosen.kind, index))
    return Unpaired(
        kind=chosen.kind,
        group=name,
        number=first + index,
        calls={r: calls[index] if index < len(calls) else None for r, calls in sides.items()},
        odd=odd,
        count=chosen.count,
        between={r: calls[index : index + chosen.count] for r, calls in sides.items()},
    )


def _equal(base: Sequence[Call], other: Sequence[Call]) -> bool:
    pairs = zip(base, other, strict=False)
    return len(base) == len(other) and all(_alike(a, b) for a, b in pairs)


def _alike(a: Call, b: Call) -> bool:
    """Say whether two calls are the same one, as far as their lines are known.

    What a communication hook sends after a first answer is called in a thread of the backend on
    one rank, where no line is known, and at once on another.
    """
    return a.key == b.key or (a.signature == b.signature and not (a.via and b.via))


def _compare(base: Sequence[Call], other: Sequence[Call]) -> _Difference | None:
    """Say how `other` differs from `base`, where it first does."""
    # A rank of its own role calls from a line of its own; such pairs of lines are remembered.
    roles: set[tuple[Any, Any]] = set()
    common = min(len(base), len(other))
    for index in range(common):
        a, b = base[index].key, other[index].key
        if _alike(base[index], other[index]) or (a, b) in roles:
            continue
        found = _swap(base, other, index, roles) or _shift(base, other, index, roles)
        if found is not None:
            return found
        if base[index].signature != other[index].signature:
            return _Difference(PARTED, index)
        roles.add((a, b))
    if len(base) == len(other):
        return None
    return _Difference(MISSING, common, abs(len(base) - len(other)))


def _shift(
    base: Sequence[Call], other: Sequence[Call], index: int, roles: set[tuple[Any, Any]]
) -> _Difference | None:
    """Recognise calls that one of the two has in between, after which they go on alike."""
    a, b = base[index], other[index]
    both = any(call.key == b.key for call in base) and any(call.key == a.key for call in other)
    if both and a.signature == b.signature and a.operation in ROOTED:
        # Ranks take turns with the two lines.
        return None
    found: dict[int, _Difference] = {}
    for count in range(1, FARTHEST + 1):
        for kind, left, right in (
            (EXTRA, base[index:], other[index + count :]),
            (SKIPPED, base[index + count :], other[index:]),
        ):
            if _go_on_alike(left, right, roles):
                # The more calls agree afterwards, the less it is chance.
                agreeing = min(len(left), len(right))
                found.setdefault(agreeing, _Difference(kind, index, count))
    return found[max(found)] if found else None


def _go_on_alike(base: Sequence[Call], other: Sequence[Call], roles: set[tuple[Any, Any]]) -> bool:
    if not base or not other:
        return False
    pairs = zip(base, other, strict=False)
    return all(_alike(a, b) or (a.key, b.key) in roles for a, b in pairs)


def _swap(
    base: Sequence[Call], other: Sequence[Call], index: int, roles: set[tuple[Any, Any]]
) -> _Difference | None:
    """Recognise the same calls in another order, after which they go on alike.

    Those with roles have no order of their own.
    """
    left: Counter[Any] = Counter()
    for count in range(1, min(FARTHEST, len(base) - index, len(other) - index) + 1):
        a, b = base[index + count - 1], other[index + count - 1]
        if a.operation in ROOTED and a.signature == b.signature:
            return None
        left.update([a.key])
        left.subtract([b.key])
        if not any(left.values()):
            rest = base[index + count :], other[index + count :]
            over = not any(rest)
            return _Difference(ORDER, index, count) if over or _go_on_alike(*rest, roles) else None
    return None
