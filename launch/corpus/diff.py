"""`python -m launch.corpus.diff a=previous b=latest`: what two runs of the corpus say otherwise.

Each is `latest`, `previous`, a date or a directory; `@4` behind it takes its runs of 4 ranks only,
which compares numbers of ranks: a=latest@2 b=latest@4.
Exit codes: 0 the same findings (effects may have moved), 10 findings differ, 2 the command line is
wrong, 12 a corpus cannot be read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from harness.errors import UsageError
from harness.floor import CLEAN
from harness.plural import number_of
from harness.report import terminal
from harness.report.wording import number
from harness.verdict import strict
from launch import ending, words
from launch.corpus.comparing import Change, Difference, Move, Side, compare, side
from launch.corpus.record import Corpus, find
from launch.words import Key

DIFFER = 10
SHOWN = 20
"""Moved effects that the terminal shows; JSON has all of them."""
MEASURED = ("effect before", "after", "moved, floors")
KEYS: Mapping[str, Key] = {
    "a": Key(about="the one before: previous, a date, a directory", read=words.text),
    "b": Key(about="the one after", read=words.text, default="latest"),
    "results": Key(about="directory of results", read=words.path, default=Path("results")),
    "json": Key(about="print the differences as JSON", read=words.switched, default=False),
}


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
    both = [change for change in found.changes if change.claim or (change.before and change.after)]
    if both:
        out.print()
        out.print(_changes(both))
    for name, alone in ((before.name, found.vanished), (after.name, found.appeared)):
        if alone:
            out.print()
            out.print(Text.assemble((f"only in {name}: ", "bold"), _runs(alone)))
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
    missing = len(found.vanished) + len(found.appeared)
    otherwise = len(found.changes) - claims - missing
    moved = number_of(len(found.moves), "effect")
    parts = [
        f"{number_of(found.compared, 'finding')} compared: {told or 'none changed'}",
        f"{number_of(otherwise, 'run')} ended otherwise" if otherwise else "",
        f"in one of them only: {number_of(missing, 'run')}" if missing else "",
        f"{moved} moved by more than {CLEAN:g} floors, or a tenth without one",
    ]
    out.print("; ".join(part for part in parts if part), style="bold", soft_wrap=True)


def _runs(alone: Sequence[Change]) -> str:
    sizes = {one.gpus for one in alone}
    return ", ".join(
        one.scenario if len(sizes) == 1 else f"{one.scenario} gpus={one.gpus}" for one in alone
    )


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
