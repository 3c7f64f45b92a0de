"""`python -m launch.readme`: write scenarios into README.md, verdicts into scenarios/README.md.

README.md has their names by family; what each has found is in scenarios/README.md, where a
scenario's newest sound run under results/ supplies headline, effect and floor. `--check` only says
whether claims and findings there are those of the scenarios as they are now.
Exit codes: 0 written or up to date, 2 out of date, 12 a scenario has not been run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scenarios
from harness.errors import HarnessError, PrerequisiteError
from harness.plan import write_text
from harness.report.terminal import number
from launch import ending, newest
from launch.newest import own

README = Path(__file__).resolve().parent.parent / "README.md"
FINDINGS = README.parent / "scenarios" / "README.md"
HEAD = """# What each scenario has found

Every claim with its finding, the effect and the rounding floor measured in the same run. Written by
`make readme` from the newest run of each scenario.
"""
MARKS = ("<!-- scenarios: make readme -->", "<!-- end of scenarios -->")


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="launch.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--results", type=Path, default=Path("results"))
    options = parser.parse_args(argv)
    try:
        text = README.read_text(encoding="utf-8")
        if options.check:
            found = FINDINGS.read_text(encoding="utf-8") if FINDINGS.exists() else ""
            wrong = [f"README.md {line}" for line in unlisted(text)]
            wrong += [f"scenarios/README.md {line}" for line in outdated(found)]
            for line in wrong:
                print(f"crossrank: {line}; type make readme", file=sys.stderr)
            return 2 if wrong else 0
        before, rest = text.split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        sections = [section(name, options.results) for name in own()]
        write_text(FINDINGS, "\n".join([HEAD, *sections]))
        write_text(README, f"{before}{MARKS[0]}\n\n{table()}\n{MARKS[1]}{after}")
    except HarnessError as error:
        print(f"crossrank: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def count() -> str:
    """Say how many scenarios there are."""
    several = sum(scenarios.load(name).min_ranks > 1 for name in own())
    return f"{len(own())} scenarios, {several} of them of several ranks:"


def table() -> str:
    """Return how many there are, and a row for each family with the names of its scenarios."""
    shelves: dict[str, list[str]] = {}
    for name in own():
        shelves.setdefault(scenarios.load(name).family, []).append(name)
    lines = [count(), "", "| family | scenarios |", "| --- | --- |"]
    for family, names in sorted(shelves.items()):
        lines.append(f"| {family} ({len(names)}) | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join([*lines, ""])


def unlisted(text: str) -> list[str]:
    """Return a sentence for each scenario that the text does not have, and for a wrong number."""
    wrong = [f"does not have scenario {name}" for name in own() if f"`{name}`" not in text]
    return wrong if count() in text else [*wrong, f"does not say {count()}"]


def section(name: str, results: Path) -> str:
    """Return one scenario's claims, from its newest sound run.

    Raises:
        PrerequisiteError: if it has none; says what to type.
    """
    scenario = scenarios.load(name)
    run = _newest(name, results)
    verdict, gpus = run.verdict, run.plan.world_size
    lines = [
        f"**`{name}`** ({scenario.family}): {scenario.title}  ",
        f"{_cell(verdict['headline'])}",
        "",
        f"| claim | finding | effect | floor (gpus={gpus}) |",
        "| --- | --- | ---: | ---: |",
    ]
    for finding in verdict["findings"]:
        floor = finding["floor"]
        exact = "exact" if floor is None and finding["effect"] is not None else ""
        lines.append(
            f"| {finding['kind']}: {_cell(finding['text'])} | {finding['outcome']} "
            f"| {_number(finding['effect'])} | {exact or _number(floor)} |"
        )
    return "\n".join([*lines, ""])


def outdated(text: str) -> list[str]:
    """Return a sentence for each claim whose row in the text is missing or says otherwise."""
    rows = dict(re.findall(r"^\| \w+: (.*?) \| (holds|refuted|unknown) \|", text, re.MULTILINE))
    wrong = []
    for name in own():
        scenario = scenarios.load(name)
        if f"**`{name}`**" not in text:
            wrong.append(f"does not have scenario {name}")
        for claim in scenario.claims:
            said = rows.get(_cell(claim.text))
            if said != claim.expects.value:
                wrong.append(f"says {said}, not {claim.expects.value}, of {name}: {claim.text}")
    return wrong


def _newest(name: str, results: Path) -> newest.Ended:
    found = newest.sound(name, results, conclusions=("as_expected",))
    if found is None:
        raise PrerequisiteError(
            f"{name} has no run that ended as expected in {results}\n"
            f"type make repro scenario={name} gpus=4"
        )
    return found


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _number(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else str(value or "")


if __name__ == "__main__":
    ending.run(main)
