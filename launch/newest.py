"""The runs of a scenario on this machine, the newest first: single ones and those of a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scenarios
from harness.errors import HarnessError
from harness.plan import Layout, Plan
from launch.runs import begun, read_json

CORPUS = "corpus"
"""The folder of results in which each run of the whole corpus has a directory of its own."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that has a verdict."""

    layout: Layout
    plan: Plan
    verdict: dict[str, Any]

    def finding(self, claim: str) -> dict[str, Any] | None:
        """Return what the run says about a claim; None if it did not judge it."""
        found = [item for item in self.verdict["findings"] if item["claim"] == claim]
        return found[0] if found else None


def own() -> list[str]:
    """Return the names of this project's own scenarios, without those of other folders."""
    here = scenarios.folders()[0]
    return [name for name in scenarios.names() if (here / f"{name}.py").exists()]


def ended(name: str, results: Path) -> Iterator[Ended]:
    """Yield the runs of a scenario that came to a verdict, the newest first."""
    plans = [
        *(results / name).glob("*/plan.json"),
        *(results / CORPUS).glob(f"*/{name}/*/plan.json"),
    ]
    for run in sorted((path.parent for path in plans), key=begun, reverse=True):
        layout = Layout(run)
        try:
            plan = Plan.read(layout.plan)
            yield Ended(layout=layout, plan=plan, verdict=read_json(layout.verdict))
        except HarnessError:
            continue


def sound(name: str, results: Path, *, conclusions: tuple[str, ...] = ()) -> Ended | None:
    """Return the newest run in which no rank failed, with the parameters that are the default.

    Args:
        name: of the scenario.
        results: the directory of runs.
        conclusions: those that count; empty = any.
    """
    values = defaults(name)
    for run in ended(name, results):
        legal = not conclusions or run.verdict["conclusion"] in conclusions
        if legal and not run.verdict["failures"] and dict(run.plan.params) == values:
            return run
    return None


def defaults(name: str) -> dict[str, Any]:
    """Return the values that a scenario's parameters have unless somebody types others."""
    from launch.compose import values

    return values(name)
