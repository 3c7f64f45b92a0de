"""What a person sees in the terminal: header, progress, the claims, the headline, the paths."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from harness.pipes import print_nowhere
from harness.plan import Layout, Plan
from harness.plural import number_of
from harness.scenario import Finding, Outcome, Scenario
from harness.verdict import Conclusion, Verdict

STYLES = {
    Outcome.HOLDS: "bold green",
    Outcome.REFUTED: "bold magenta",
    Outcome.UNKNOWN: "bold yellow",
}
CONCLUSIONS = {
    Conclusion.AS_EXPECTED: ("as expected", "bold green"),
    Conclusion.UNEXPECTED: (
        "UNEXPECTED: a finding is not the one this scenario expects",
        "bold red",
    ),
    Conclusion.INCONCLUSIVE: ("INCONCLUSIVE", "bold yellow"),
}


class Bar(Protocol):
    """A progress bar."""

    def __call__(self, done: int, total: int, text: str) -> None:
        """Show that `done` of `total` are through and what is under way."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would end the process with 1. What runs goes on, and its exit code stays true.
        print_nowhere(self.file)


def console(*, quiet: bool = False, stderr: bool = False) -> Console:
    """Return where messages go: off a terminal plain and never wrapped; NO_COLOR counts."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 110
    return _Console(file=stream, quiet=quiet, highlight=False, soft_wrap=False, width=width)


def header(out: Console, scenario: Scenario, plan: Plan, notice: str) -> None:
    """Print what runs, and where."""
    out.print(Text.assemble((plan.scenario, "bold"), "  ", scenario.title))
    arms = number_of(len(plan.arms), "arm")
    out.print(Text(f"{notice}; {arms}, engine {plan.engine}, seed {plan.seed}", style="dim"))


def arms(out: Console, scenario: Scenario, plan: Plan) -> None:
    """Print the arms of a plan, one line each."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("arm", "role", "ranks", "repeats", "what differs"):
        table.add_column(name, justify="right" if name in ("ranks", "repeats") else "left")
    for planned in plan.arms:
        arm = scenario.arm(planned.name)
        cells = (arm.name, arm.role.value, str(planned.ranks), str(planned.repeats), arm.about)
        table.add_row(*map(Text, cells))
    out.print(table)


@contextmanager
def bar(out: Console) -> Iterator[Bar]:
    """Show a progress bar on a terminal, nothing elsewhere."""
    if out.quiet or not out.is_terminal:
        yield lambda done, total, text: None
        return
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.description}", style="dim", markup=False),
    )
    with Progress(*columns, console=out, transient=True) as progress:
        task = progress.add_task("starting ranks", total=None)

        def show(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, description=text)

        yield show


def verdict(out: Console, scenario: Scenario, result: Verdict) -> None:
    """Print the claims with their findings, then the headline and the conclusion."""
    out.print(_claims(out, scenario, result.findings))
    if result.headline:
        out.print(Text(result.headline, style="bold"))
    for failure in result.failures:
        out.print(Text.assemble(("failed  ", "bold red"), failure))
    text, style = CONCLUSIONS[result.conclusion]
    counts = _counts(result.findings)
    out.print(Text.assemble((text, style), f"  ({counts})" if counts else ""))


def paths(out: Console, layout: Layout) -> None:
    """Print where everything is."""
    out.print(Text(f"verdict  {layout.verdict}", style="dim"), soft_wrap=True)
    if layout.report.exists():
        out.print(Text(f"report   {layout.report}", style="dim"), soft_wrap=True)


def _claims(out: Console, scenario: Scenario, findings: Mapping[str, Finding]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=out.width < 110)
    table.add_column("claim", ratio=4, overflow="fold")
    table.add_column("finding", no_wrap=True)
    table.add_column("effect", justify="right", no_wrap=True)
    table.add_column("floor", justify="right", no_wrap=True)
    table.add_column("why", ratio=5, overflow="fold", style="dim")
    for claim in scenario.claims:
        finding = findings.get(claim.name)
        if finding is None:
            continue
        expected = finding.outcome in (claim.expects, Outcome.UNKNOWN)
        mark = "" if expected else f" (expected: {claim.expects.value})"
        table.add_row(
            Text.assemble((f"{claim.kind.value}: ", "dim"), claim.text),
            Text(finding.outcome.value + mark, style=STYLES[finding.outcome]),
            number(finding.effect),
            "exact"
            if finding.floor is None and finding.effect is not None
            else number(finding.floor),
            Text(finding.reason),
        )
    return table


def number(value: float | None) -> str:
    """Return a figure in three digits; empty for None."""
    if value is None:
        return ""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}"


def _counts(findings: Mapping[str, Finding]) -> str:
    by = {outcome: 0 for outcome in Outcome}
    for finding in findings.values():
        by[finding.outcome] += 1
    hold = "holds" if by[Outcome.HOLDS] == 1 else "hold"
    words = {Outcome.HOLDS: hold, Outcome.REFUTED: "refuted", Outcome.UNKNOWN: "unknown"}
    return ", ".join(f"{count} {words[outcome]}" for outcome, count in by.items() if count)


def sweep(
    out: Console,
    swept: Sequence[str],
    points: Sequence[Mapping[str, Any]],
    arms: Sequence[Mapping[str, Any]],
    findings: Sequence[Mapping[str, Any]],
) -> None:
    """Print a sweep in one line per point: its findings, and its arms with the largest figures.

    The gap is that across ranks, of whichever arm has the largest; faulty and fixed are the drift
    from the reference, in floors, of the worst arm of that role. All at the last step.
    """
    tails = [key.rpartition(".")[2] for key in swept]
    short = {key: tail for key, tail in zip(swept, tails, strict=True) if tails.count(tail) == 1}
    rows: list[dict[str, str]] = []
    for point in points:
        mine = [row for row in arms if row["point"] == point["point"]]
        found = [row for row in findings if row["point"] == point["point"]]
        agree = sum(row["outcome"] == row["expects"] for row in found)
        cells = {short.get(key, key): str(point[key]) for key in swept}
        cells["result"] = point["state"].replace("_", " ")
        cells["as expected"] = f"{agree}/{len(found)}" if found else ""
        cells["loss gap"] = number(_largest(mine, "loss_gap_last"))
        for role in ("faulty", "fixed"):
            of_role = [row for row in mine if row.get("role") == role]
            cells[f"{role}, floors"] = number(_largest(of_role, "loss_drift_last_floors"))
        rows.append(cells)
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    for name in names:
        table.add_column(name, justify="left" if name == "result" else "right")
    for row in rows:
        table.add_row(*(Text(row[name]) for name in names))
    out.print(table)
    told = {
        "loss gap": "loss gap: largest less smallest loss of the ranks, in the worst arm",
        "faulty, floors": "faulty: loss off the reference, in the worst faulty arm",
        "fixed, floors": "fixed: the same of the fixed arms",
    }
    legend = [words for name, words in told.items() if name in names]
    if legend:
        out.print(Text("; ".join([*legend, "all at the last step"]), style="dim"))
    undecided = [row["reason"] for row in findings if row["outcome"] == Outcome.UNKNOWN.value]
    for reason, count in Counter(undecided).most_common(3):
        these = number_of(count, "finding")
        out.print(Text.assemble(("unknown  ", "bold yellow"), f"{these}: {reason}"))


def _largest(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return max(values, key=lambda value: (math.isnan(value), value), default=None)
