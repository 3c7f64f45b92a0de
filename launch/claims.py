"""`python -m launch.claims`: every statement of the two articles, and what a run says of it.

The findings are those of each scenario's newest sound run under results/. `--check` only says
whether scenarios/CLAIMS.md has the statements and findings of the scenarios as they are now.
Exit codes: 0 written or up to date, 2 out of date, 12 a scenario has not been run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from harness.errors import HarnessError
from harness.plan import write_text
from harness.plural import number_of
from harness.report import terminal
from harness.report.wording import against
from launch import ending, newest
from launch.statements import (
    NOT_HERE,
    NOT_RUN,
    Settling,
    Statement,
    articles,
    merged,
    settling,
    statements,
)

TABLE = Path(__file__).resolve().parent.parent / "scenarios" / "CLAIMS.md"
FEW = 5
"""So many scenarios that were not run are named; of more their number is said."""
HEAD = """# What two articles assert, and what runs say of it

Each statement with the finding of the scenarios' claims that decide it: it *holds*, is *refuted*,
or is true *partly* where those claims differ. A claim that asserts the contrary is marked `~`.
Effect and floor are of the same run. Written by `make claims` from the newest sound run of each
scenario; which claim decides which statement stands in the scenario (`settles=`).
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One statement, and what is known of it."""

    statement: Statement
    finding: str
    """holds, refuted, partly, unknown, not run, or not run here."""
    by: tuple[Settling, ...]
    findings: tuple[Mapping[str, Any] | None, ...]
    """What the newest sound run says of each claim in `by`; None if there is no such run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the table, or check it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="launch.claims", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare only")
    parser.add_argument("--json", action="store_true", help="print it as JSON, write nothing")
    parser.add_argument("--results", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    try:
        if options.check:
            text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
            wrong = outdated(text)
            for line in wrong:
                print(f"crossrank: scenarios/CLAIMS.md {line}; type make claims", file=sys.stderr)
            return 2 if wrong else 0
        found = rows(options.results)
        if options.json:
            print(json.dumps([about(row) for row in found], indent=2))
            return 0
        show(found)
        absent = sorted({item.scenario for row in found for item in missing(row)})
        if absent:
            print(f"crossrank: {_unwritten(absent, options.results)}", file=sys.stderr)
            return 12
        write_text(TABLE, markdown(found))
    except HarnessError as error:
        print(f"crossrank: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _unwritten(absent: Sequence[str], results: Path) -> str:
    several = len(absent) > FEW
    named = number_of(len(absent), "scenario") if several else ", ".join(absent)
    only = "" if several else f" scenarios={','.join(absent)}"
    return (
        f"scenarios/CLAIMS.md stays as it was: no sound run of {named} in {results}\n"
        f"type make corpus gpus=4{only}, then make claims"
    )


def rows(results: Path) -> list[Row]:
    """Return every statement with what the newest sound runs say of it."""
    by = settling(newest.own())
    runs = {
        name: newest.sound(name, results)
        for name in {item.scenario for items in by.values() for item in items}
    }
    found = []
    for name, statement in statements().items():
        items = by.get(name, [])
        findings = [
            run.finding(item.claim) if (run := runs[item.scenario]) else None for item in items
        ]
        outcomes = [
            item.of(finding["outcome"]) if finding else NOT_RUN
            for item, finding in zip(items, findings, strict=True)
        ]
        found.append(
            Row(
                statement=statement,
                finding=NOT_HERE if statement.reason else merged(outcomes),
                by=tuple(items),
                findings=tuple(findings),
            )
        )
    return found


def missing(row: Row) -> list[Settling]:
    """Return the claims of a row that no sound run has judged."""
    return [item for item, found in zip(row.by, row.findings, strict=True) if found is None]


def expected() -> dict[str, tuple[str, tuple[Settling, ...]]]:
    """Return the finding on every statement if each run ends as its scenario expects."""
    by = settling(newest.own())
    result = {}
    for name, statement in statements().items():
        items = tuple(by.get(name, ()))
        outcome = merged([item.of(item.expects.value) for item in items])
        result[name] = (NOT_HERE if statement.reason else outcome, items)
    return result


def outdated(text: str) -> list[str]:
    """Return a sentence for each statement whose row is missing or says otherwise."""
    cells = r"^\| ([A-Z]\d+) \| (.*?) \| ([a-z ]+) \| (.*?) \| (.*?) \|$"
    there = {row[1]: row for row in re.finditer(cells, text, re.MULTILINE)}
    wrong = [f"has {name}, which is no statement" for name in there if name not in statements()]
    for name, (finding, items) in expected().items():
        row = there.get(name)
        if row is None:
            wrong.append(f"does not have {name}")
        elif row[3] != finding:
            wrong.append(f"says {row[3]}, not {finding}, of {name}")
        elif row[2] != _sentence(statements()[name]):
            wrong.append(f"words {name} otherwise")
        elif row[5] != _by(statements()[name], items):
            wrong.append(f"names other claims for {name}")
    return wrong


def markdown(found: Sequence[Row]) -> str:
    """Return the text of scenarios/CLAIMS.md."""
    lines = [HEAD, f"{tally(found)}.", ""]
    for letter, of in articles().items():
        lines += [f"## {letter}: {of}", ""]
        lines += ["| id | statement | finding | effect, floor | decided by |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        for row in found:
            if row.statement.id.startswith(letter):
                cells = (
                    row.statement.id,
                    _sentence(row.statement),
                    row.finding,
                    "<br>".join(_sizes(row)),
                    _by(row.statement, row.by),
                )
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def tally(found: Sequence[Row]) -> str:
    """Return how many statements came out which way."""
    counts = Counter(row.finding for row in found)
    words = ", ".join(f"{count} {finding}" for finding, count in counts.most_common())
    return f"{len(found)} statements: {words}"


def about(row: Row) -> dict[str, Any]:
    """Return a row as JSON."""
    statement = row.statement
    return {
        "id": statement.id,
        "section": statement.section,
        "says": statement.says,
        "number": statement.number or None,
        "finding": row.finding,
        "reason": statement.reason or None,
        "by": [
            {
                "scenario": item.scenario,
                "claim": item.claim,
                "contrary": item.contrary,
                "outcome": finding["outcome"] if finding else None,
                "effect": finding["effect"] if finding else None,
                "floor": finding["floor"] if finding else None,
                "unit": finding["unit"] if finding else None,
            }
            for item, finding in zip(row.by, row.findings, strict=True)
        ],
    }


def show(found: Sequence[Row]) -> None:
    """Print the table."""
    out = terminal.console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("id", no_wrap=True)
    table.add_column("statement", ratio=4, overflow="fold")
    table.add_column("finding", no_wrap=True)
    table.add_column("decided by", ratio=5, overflow="fold")
    styles = {"holds": "bold green", "refuted": "bold magenta", "partly": "bold cyan"}
    for row in found:
        statement = row.statement
        table.add_row(
            statement.id,
            Text(statement.says + (f" ({statement.number})" if statement.number else "")),
            Text(row.finding, style=styles.get(row.finding, "yellow")),
            _deciding(row),
        )
    out.print(table)
    out.print(tally(found), style="bold")


def _deciding(row: Row) -> Text:
    """Return each claim with its effect below it, or why there is none."""
    if row.statement.reason or not row.by:
        return Text(row.statement.reason or "no claim decides it yet", style="dim")
    lines = [
        (f"{_named(item)}\n", f"  {finding['outcome']}, {size}\n" if finding else "  not run\n")
        for item, finding, size in zip(row.by, row.findings, _sizes(row), strict=True)
    ]
    text = Text.assemble(*(part for name, said in lines for part in (name, (said, "dim"))))
    text.rstrip()
    return text


def _sizes(row: Row) -> list[str]:
    return [_size(finding) for finding in row.findings]


def _size(finding: Mapping[str, Any] | None) -> str:
    if finding is None:
        return "–"
    if finding["effect"] is None:
        return "exact" if finding["floor"] is None else "–"
    return against(finding)


def _sentence(statement: Statement) -> str:
    said = f"{statement.says} ({statement.number})" if statement.number else statement.says
    return _cell(said)


def _by(statement: Statement, items: Sequence[Settling]) -> str:
    if statement.reason:
        return _cell(statement.reason)
    return "<br>".join(f"`{_named(item)}`" for item in items)


def _named(item: Settling) -> str:
    return f"{'~' if item.contrary else ''}{item.scenario}.{item.claim}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    ending.run(main)
