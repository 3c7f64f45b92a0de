"""What two corpora say otherwise: findings that changed, came or went, and effects that moved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import UsageError
from harness.floor import CLEAN
from launch.corpus.record import Corpus, Entry

SHARE = 0.1
"""An effect without a floor has moved when it changes by more than so much of itself."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two: its name, where it ran, and its entries."""

    name: str
    facts: Mapping[str, str]
    entries: Mapping[tuple[str, int], Entry]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A claim, or a whole run, that says something else."""

    scenario: str
    gpus: str
    claim: str
    """Empty where the run as a whole ended otherwise."""
    before: str
    """Empty where it is new."""
    after: str
    """Empty where it is gone."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Move:
    """An effect of the same finding that is another one."""

    scenario: str
    gpus: str
    claim: str
    before: float
    after: float
    floors: float | None
    """The move in floors, the larger of the two; None where neither side has a floor."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """All that differs between two corpora."""

    compared: int
    """Claims that both have judged."""
    changes: Sequence[Change]
    moves: Sequence[Move]

    @property
    def vanished(self) -> list[Change]:
        """Runs that only the first has."""
        return [one for one in self.changes if not one.claim and not one.after]

    @property
    def appeared(self) -> list[Change]:
        """Runs that only the second has."""
        return [one for one in self.changes if not one.claim and not one.before]


def side(record: Corpus, gpus: int | None = None) -> Side:
    """Return one side, with the runs of so many ranks or of all.

    Raises:
        UsageError: if it has none; says which numbers there are.
    """
    entries = {e.key: e for e in record.entries if gpus in (None, e.gpus)}
    if not entries:
        there = ", ".join(str(gpus) for gpus in sorted({e.gpus for e in record.entries}))
        raise UsageError(f"{record.id} has no runs of {gpus} ranks; it has runs of {there}")
    return Side(
        name=record.id if gpus is None else f"{record.id}@{gpus}",
        facts=_facts(record, entries),
        entries=entries,
    )


def _facts(record: Corpus, entries: Mapping[tuple[str, int], Entry]) -> dict[str, str]:
    environment = record.environment
    packages = environment.get("packages") or {}
    source = environment.get("source") or {}
    changed = " with changes" if source.get("dirty") else ""
    return {
        "torch": str(packages.get("torch")),
        "python": str(environment.get("python")),
        "backend": ", ".join(sorted({e.backend for e in entries.values() if e.backend})),
        "device": ", ".join(sorted({e.device for e in entries.values() if e.device})),
        "ranks": ", ".join(map(str, sorted({e.gpus for e in entries.values()}))),
        "seed": str(record.asked.get("seed")),
        "crossrank": str(environment.get("crossrank")),
        "commit": f"{str(source.get('commit'))[:10]}{changed}",
        "host": str(environment.get("host")),
    }


def compare(before: Side, after: Side) -> Difference:
    """Return what differs. Runs are paired by scenario and number of ranks.

    Where each side has one number of ranks, and not the same, they are paired by scenario.
    """
    changes: list[Change] = []
    moves: list[Move] = []
    compared = 0
    for scenario, gpus, a, b in _pairs(before, after):
        if _state(a) != _state(b):
            changes.append(
                Change(
                    scenario=scenario,
                    gpus=gpus,
                    claim="",
                    before=_state(a),
                    after=_state(b),
                    reason=(b.problem if b else "") or "",
                )
            )
        if "" in (_state(a), _state(b)):
            # The run says it for all of its claims.
            continue
        one = {f["claim"]: f for f in (a.findings if a else ())}
        two = {f["claim"]: f for f in (b.findings if b else ())}
        for claim in dict.fromkeys([*one, *two]):
            old, new = one.get(claim), two.get(claim)
            if old and new:
                compared += 1
            if (old or {}).get("outcome") != (new or {}).get("outcome"):
                changes.append(
                    Change(
                        scenario=scenario,
                        gpus=gpus,
                        claim=claim,
                        before=old["outcome"] if old else "",
                        after=new["outcome"] if new else "",
                        reason=(new or old or {})["reason"],
                    )
                )
            elif old and new and (move := _move(scenario, gpus, claim, old, new)):
                moves.append(move)
    moves.sort(key=lambda move: -(move.floors if move.floors is not None else 0.0))
    return Difference(compared=compared, changes=changes, moves=moves)


def _pairs(before: Side, after: Side) -> list[tuple[str, str, Entry | None, Entry | None]]:
    a, b = before.entries, after.entries
    sizes = [{gpus for _, gpus in entries} for entries in (a, b)]
    if len(sizes[0]) == len(sizes[1]) == 1 and sizes[0] != sizes[1]:
        (one,), (two,) = sizes
        names = sorted({name for name, _ in [*a, *b]})
        return [(name, f"{one}, {two}", a.get((name, one)), b.get((name, two))) for name in names]
    keys = sorted({*a, *b})
    return [(name, str(gpus), a.get((name, gpus)), b.get((name, gpus))) for name, gpus in keys]


def _state(entry: Entry | None) -> str:
    """Return how a run ended, as far as its findings do not say it."""
    if entry is None or entry.state in ("not_run", "interrupted"):
        return ""
    return entry.state if entry.state in ("failed", "skipped") else "ran"


def _move(
    scenario: str, gpus: str, claim: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Move | None:
    one, two = _number(old["effect"]), _number(new["effect"])
    if one is None or two is None or old["unit"] != new["unit"] or not math.isfinite(one - two):
        return None
    known = [f for f in (_number(old["floor"]), _number(new["floor"])) if f is not None]
    floors = None
    if known:
        floor = max(known)
        floors = abs(one - two) / floor if floor else math.inf if one != two else 0.0
        moved = floors > CLEAN
    else:
        moved = abs(one - two) > SHARE * max(abs(one), abs(two))
    if not moved:
        return None
    return Move(scenario=scenario, gpus=gpus, claim=claim, before=one, after=two, floors=floors)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
