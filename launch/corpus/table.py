"""A corpus in the terminal: what would run, each run as it ends, and the table of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.plural import number_of
from launch.corpus.cases import Case
from launch.corpus.record import Corpus, Entry

STYLES = {
    "as_expected": "green",
    "unexpected": "bold red",
    "inconclusive": "bold yellow",
    "failed": "bold red",
    "skipped": "dim",
    "interrupted": "yellow",
    "not_run": "dim",
}
SAID = {"unexpected": "UNEXPECTED", "inconclusive": "INCONCLUSIVE", "failed": "FAILED"}
WEIGHTS = {True: "part", False: "agree", None: ""}


def plan(out: Console, cases: Sequence[Case], todo: set[tuple[str, int]]) -> None:
    """Print what would run."""
    for case in cases:
        state = "to run" if (case.name, case.gpus) in todo else case.state or "is there"
        why = f": {_first(case.problem)}" if case.problem else ""
        out.print(f"{case.name}  gpus={case.gpus}  {state}{why}", markup=False, soft_wrap=True)
    counts = Counter(case.state or "can run" for case in cases)
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    out.print(
        f"{number_of(len(cases), 'case')}: {told}; {len(todo)} to run", style="bold", markup=False
    )


def line(out: Console, number: int, total: int, entry: Entry) -> None:
    """Print one run that has ended, where no bar shows it."""
    if out.is_terminal:
        return
    took = f"{entry.seconds:.1f} s" if entry.seconds is not None else ""
    words = [f"{number:>4}/{total}", f"{entry.scenario} gpus={entry.gpus}", said(entry), took]
    out.print("  ".join(word for word in words if word), markup=False, soft_wrap=True)


def said(entry: Entry) -> str:
    """Return the state in words."""
    return SAID.get(entry.state, entry.state.replace("_", " "))


def table(out: Console, record: Corpus) -> None:
    """Print a row for each scenario, by family, then what is not as expected, then the sums."""
    sizes = sorted({entry.gpus for entry in record.entries})
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("scenario", no_wrap=True)
    for size in sizes:
        shown.add_column(f"gpus={size}", no_wrap=True)
    shown.add_column("findings", no_wrap=True)
    shown.add_column("weights", no_wrap=True)
    shown.add_column("s", justify="right", no_wrap=True)
    family = None
    for name, entries in _grouped(record.entries):
        if entries[0].family != family:
            family = entries[0].family
            shown.add_row(Text(family or "broken", style="bold"))
        by = {entry.gpus: entry for entry in entries}
        took = sum(entry.seconds or 0.0 for entry in entries)
        shown.add_row(
            Text(f"  {name}"),
            *(_state(by.get(size)) for size in sizes),
            _findings(entries),
            Text(WEIGHTS[_any(entry.ranks_differ for entry in entries)], style="dim"),
            f"{took:.1f}" if took else "",
        )
    out.print(shown)
    _problems(out, record.entries)
    ran = [entry for entry in record.entries if entry.seconds is not None]
    told = f"{number_of(len(record.entries), 'case')}: {counted(record.entries)}"
    if ran:
        told += f"; {record.seconds:.0f} s, {record.seconds / len(ran):.2f} s a run"
    out.print(Text(told, style="bold"))


def counted(entries: Iterable[Entry]) -> str:
    """Return how many entries are in which state."""
    counts = Counter(entry.state for entry in entries)
    order = sorted(counts, key=list(STYLES).index)
    return ", ".join(f"{counts[state]} {state.replace('_', ' ')}" for state in order)


def _grouped(entries: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.scenario, []).append(entry)
    return sorted(groups.items(), key=lambda item: (item[1][0].family, item[0]))


def _state(entry: Entry | None) -> Text:
    return Text(said(entry), style=STYLES[entry.state]) if entry else Text("")


def _findings(entries: Sequence[Entry]) -> Text:
    """Return how many claims hold, are refuted and unknown, of the number of ranks that has most.

    Where numbers of ranks differ, the state of one of them says so.
    """
    best = max(entries, key=lambda entry: len(entry.findings))
    counts = Counter(finding["outcome"] for finding in best.findings)
    parts = []
    for outcome, style in (("holds", "green"), ("refuted", "magenta"), ("unknown", "yellow")):
        if counts[outcome]:
            word = "hold" if outcome == "holds" and counts[outcome] > 1 else outcome
            parts.append((f"{counts[outcome]} {word}  ", style))
    return Text.assemble(*parts)


def _problems(out: Console, entries: Sequence[Entry]) -> None:
    for entry in entries:
        where = f"{entry.scenario} gpus={entry.gpus}"
        for finding in entry.findings:
            if finding["outcome"] != finding["expects"]:
                told = f"{finding['claim']} {finding['outcome']}, expected {finding['expects']}"
                _problem(out, where, f"{told}: {finding['reason']}", STYLES[entry.state])
        if entry.problem and entry.state != "skipped":
            _problem(out, where, f"{said(entry)}: {_first(entry.problem)}", STYLES[entry.state])
    skipped = [entry for entry in entries if entry.state == "skipped"]
    for entry in skipped[:5]:
        _problem(out, f"{entry.scenario} gpus={entry.gpus}", f"skipped: {entry.problem}", "dim")
    if len(skipped) > 5:
        out.print(f"and {len(skipped) - 5} more skipped, in corpus.json", style="dim")


def _problem(out: Console, where: str, what: str, style: str) -> None:
    out.print(Text.assemble((f"{where}  ", style), " ".join(what.split())), soft_wrap=True)


def _any(values: Iterable[Any]) -> bool | None:
    known = [value for value in values if value is not None]
    return any(known) if known else None


def _first(text: str) -> str:
    return text.splitlines()[0] if text else ""
