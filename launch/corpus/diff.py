"""`python -m launch.corpus.diff a=previous b=latest`: what two runs of the corpus say otherwise.

Each is `latest`, `previous`, a date or a directory; `@4` behind it takes its runs of 4 ranks only,
which compares numbers of ranks: a=latest@2 b=latest@4.
Exit codes: 0 the same findings (effects may have moved), 10 findings differ, 2 the command line is
wrong, 12 a corpus cannot be read.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from harness.errors import UsageError
from harness.floor import CLEAN
from harness.report import terminal
from harness.report.wording import number
from harness.verdict import strict
from launch import ending, words
from launch.corpus.record import Corpus, Entry, find
from launch.words import Key

DIFFER = 10
SHOWN = 20
"""Moved effects that the terminal shows; JSON has all of them."""
MEASURED = ("effect before", "after", "moved, floors")
SHARE = 0.1
"""An effect without a floor has moved when it changes by more than so much of itself."""
KEYS: Mapping[str, Key] = {
    "a": Key(about="the one before: previous, a date, a directory", read=words.text),
    "b": Key(about="the one after", read=words.text, default="latest"),
    "results": Key(about="directory of results", read=words.path, default=Path("results")),
    "json": Key(about="print the differences as JSON", read=words.switched, default=False),
}


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


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two corpora; returns the exit code.

    Raises:
        HarnessError: if one of them cannot be found or read.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    typed = words.parse(arguments, KEYS, f"{__doc__}\nmake corpus-diff")
    before = _side(typed["a"] or "previous", typed["results"])
    after = _side(typed["b"], typed["results"])
    found = compare(before, after)
    if typed["json"]:
        told = {"a": before.facts, "b": after.facts, **asdict(found)}
        print(json.dumps(strict(told), indent=2))
    else:
        _show(before, after, found)
    return DIFFER if found.changes else 0


def _side(typed: str, results: Path) -> Side:
    name, _, only = typed.rpartition("@") if "@" in typed else (typed, "", "")
    if only and not only.isdigit():
        raise UsageError(f"{typed}: behind @ stands a number of ranks, as in latest@4")
    record = Corpus.read(find(name, results))
    return side(record, int(only) if only else None)


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


def _show(before: Side, after: Side, found: Difference) -> None:
    out = terminal.console()
    states = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", before.name, after.name):
        states.add_column(name, no_wrap=True)
    for key, value in before.facts.items():
        other = after.facts[key]
        style = "bold yellow" if value != other else "dim"
        states.add_row(Text(key), Text(value, style=style), Text(other, style=style))
    out.print(states)
    if found.changes:
        out.print()
        out.print(_changes(found.changes))
    if found.moves:
        out.print()
        out.print(_moves(found.moves[:SHOWN]))
        if len(found.moves) > SHOWN:
            out.print(f"and {len(found.moves) - SHOWN} more, in json=true", style="dim")
    out.print()
    claims = sum(bool(change.claim) for change in found.changes)
    kinds = {
        "changed": sum(bool(c.claim and c.before and c.after) for c in found.changes),
        "appeared": sum(bool(c.claim and not c.before) for c in found.changes),
        "vanished": sum(bool(c.claim and not c.after) for c in found.changes),
    }
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    runs = len(found.changes) - claims
    parts = [
        f"{found.compared} findings compared: {told or 'none changed'}",
        f"{runs} runs ended otherwise" if runs else "",
        f"{len(found.moves)} effects moved by more than {CLEAN:g} floors, or a tenth without one",
    ]
    out.print("; ".join(part for part in parts if part), style="bold", soft_wrap=True)


def _changes(changes: Sequence[Change]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("scenario", "ranks", "claim", "before", "after"):
        table.add_column(name, no_wrap=name != "claim", overflow="fold")
    table.add_column("why", overflow="fold", style="dim", ratio=1)
    for change in changes:
        before, after = change.before or "appeared", change.after or "vanished"
        table.add_row(
            change.scenario,
            change.gpus,
            change.claim or "(the run)",
            Text(before, style="dim" if not change.before else "magenta"),
            Text(after, style="bold red" if not change.after else "bold magenta"),
            Text(" ".join(change.reason.split())),
        )
    return table


def _moves(moves: Sequence[Move]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for name in ("scenario", "ranks", "claim", "effect before", "after", "moved, floors"):
        table.add_column(name, justify="right" if name in MEASURED else "left")
    for move in moves:
        table.add_row(
            move.scenario,
            move.gpus,
            move.claim,
            number(move.before),
            number(move.after),
            number(move.floors) if move.floors is not None else "no floor",
        )
    return table


if __name__ == "__main__":
    ending.run(main)
