"""`python -m launch.show scenario=NAME`: its claims and arms, the code that differs, the last run.

Exit codes: 0, or 2 if there is no such scenario.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import scenarios
from harness.plural import number_of
from harness.report import terminal
from harness.report.source import Source, sources
from harness.scenario import Scenario
from launch import ending, newest, words
from launch.arguments import conf_folders
from launch.environment import torch_version
from launch.newest import Ended
from launch.statements import statements
from launch.words import Key

KEYS: Mapping[str, Key] = {
    "scenario": Key(about="its name: make list", read=words.text, needed=True),
    "results": Key(about="directory of results", read=words.path, default=Path("results")),
}
STYLES = {"holds": "bold green", "refuted": "bold magenta", "unknown": "bold yellow"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print one scenario; returns the exit code.

    Raises:
        UsageError: if there is none of that name.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    typed = words.parse(arguments, KEYS, f"{__doc__}\nmake show")
    name = typed["scenario"]
    scenario = scenarios.load(name).on(torch_version())
    last = next(newest.ended(name, typed["results"]), None)
    out = terminal.console()
    out.print(Text.assemble((name, "bold"), f"  {scenario.title}"))
    least = f"{number_of(scenario.min_ranks, 'rank')} or more"
    out.print(Text(f"{scenario.family}; {least}", style="dim"))
    _section(out, "Claims")
    _claims(out, scenario, last)
    _section(out, "Arms")
    _arms(out, scenario)
    _section(out, "The code that differs")
    _code(out, scenario)
    if scenario.cause:
        _section(out, f"Cause: {scenario.cause}")
        _cause(out, scenario.cause)
    _section(out, "Parameters")
    _values(out, name)
    _section(out, "Last run here")
    _last(out, name, last)
    return 0


def _section(out: Console, title: str) -> None:
    out.print()
    out.print(Text(title, style="bold underline"))


def _claims(out: Console, scenario: Scenario, last: Ended | None) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("claim", overflow="fold", ratio=1)
    for name in ("expected", "found", "effect", "floor"):
        table.add_column(name, no_wrap=True, justify="right" if name[0] in "ef" else "left")
    for claim in scenario.claims:
        found = last.finding(claim.name) if last else None
        off = found is not None and found["outcome"] != claim.expects.value
        table.add_row(
            Text.assemble(
                (f"{claim.kind.value}: ", "dim"),
                claim.text,
                (f"  {claim.source}" if claim.source else "", "dim"),
            ),
            Text(claim.expects.value, style="bold red" if off else "dim"),
            Text(found["outcome"], style=STYLES[found["outcome"]]) if found else Text("-"),
            _number(found["effect"]) if found else "",
            _floor(found) if found else "",
        )
    out.print(table)
    ids = dict.fromkeys(word.lstrip("~") for claim in scenario.claims for word in claim.settles)
    for word in ids:
        statement = statements().get(word)
        if statement:
            out.print(Text(f"settles {word}: {statement.says}", style="dim"))


def _arms(out: Console, scenario: Scenario) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("arm", "role", "ranks", "what differs", "options"):
        table.add_column(name, overflow="fold", no_wrap=name in ("arm", "role", "ranks"))
    for arm in scenario.arms:
        ranks = "all" if arm.ranks is None else str(arm.ranks)
        options = " ".join(f"{key}={value}" for key, value in arm.options.items())
        alone = f"{ranks}, alone" if arm.isolated else ranks
        table.add_row(arm.name, arm.role.value, alone, Text(arm.about), Text(options, style="dim"))
    out.print(table)


def _code(out: Console, scenario: Scenario) -> None:
    found, absent = sources(scenario)
    for source in found:
        out.print(Text(f"{source.file}:{source.first}", style="dim"))
        code(out, source)
    if absent:
        out.print(f"no source at hand for {', '.join(absent)}")


def code(out: Console, source: Source) -> None:
    """Print the lines of a function; those that read what the arm is are marked."""
    marked = set(source.branches)
    for number, line in enumerate(source.lines, start=source.first):
        if number in marked:
            out.print(Text(f"{number:>4} > {line}", style="bold yellow"), soft_wrap=True)
        else:
            out.print(Text(f"{number:>4}   {line}"), soft_wrap=True)


def _cause(out: Console, name: str) -> None:
    from harness.causes import catalogue

    cause = catalogue().get(name)
    if cause is None:
        out.print("is not in the catalogue: python -m harness.watch causes lists it")
        return
    for label, said in (
        ("seen", cause.sees),
        ("why", cause.why),
        ("confirm", cause.confirm),
        ("change", cause.change),
    ):
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", width=7)
        table.add_column(overflow="fold")
        table.add_row(label, Text(" ".join(said.split())))
        out.print(table)
    for line in cause.fix.splitlines():
        out.print(Text(f"         {line}", style="green"), soft_wrap=True)
    if cause.reported:
        out.print(Text(f"reported {', '.join(cause.reported)}", style="dim"), soft_wrap=True)


def _values(out: Console, name: str) -> None:
    for folder in conf_folders():
        path = folder / "scenario" / f"{name}.yaml"
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.strip() and not line.startswith("#"):
                    value, _, about = line.partition("#")
                    typed = f"scenario.{value.strip().replace(': ', '=', 1):24}"
                    shown = Text.assemble(f"{typed}  ", (about.strip(), "dim"))
                    out.print(shown, soft_wrap=True)
            return


def _last(out: Console, name: str, last: Ended | None) -> None:
    if last is None:
        out.print(f"none: type make repro scenario={name} gpus=4", markup=False)
        return
    verdict = last.verdict
    style = {"as_expected": "bold green", "unexpected": "bold red"}.get(
        verdict["conclusion"], "bold yellow"
    )
    said = verdict["conclusion"].replace("_", " ")
    facts = (
        f"  {number_of(last.plan.world_size, 'rank')}, {last.plan.backend}, seed {last.plan.seed}"
    )
    out.print(Text.assemble((said, style), facts))
    out.print(Text(str(verdict["headline"])))
    for failure in verdict["failures"]:
        out.print(Text.assemble(("failed  ", "bold red"), str(failure)))
    terminal.paths(out, last.layout)


def _floor(found: Mapping[str, Any]) -> str:
    if found["floor"] is None:
        return "exact" if found["effect"] is not None else ""
    return _number(found["floor"])


def _number(value: Any) -> str:
    return terminal.number(float(value)) if value is not None else ""


if __name__ == "__main__":
    ending.run(main)
