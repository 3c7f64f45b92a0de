"""Find a run directory from what a person types, and judge it again from its files alone."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scenarios
from harness.errors import RecordError, UsageError
from harness.plan import Layout
from harness.scenario import Scenario
from harness.tables import Tables
from harness.verdict import Verdict, decide
from launch.autopsy import Batch, RankExit, failures

_STAMP = re.compile(r"\d{8}T\d{6}Z")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A run directory, judged again."""

    layout: Layout
    name: str
    scenario: Scenario
    tables: Tables
    verdict: Verdict
    stored: dict[str, Any] | None
    """What verdict.json says; None if there is none."""


def stamp(seconds: float | None = None) -> str:
    """Return the time with which names of directories begin: now, or seconds since the epoch."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(seconds))


def begun(run: Path) -> tuple[str, int, str]:
    """Return what orders run directories by when they began, the oldest first.

    A name begins with the time, in seconds, unless somebody gave it another one; of runs begun in
    the same second the plan, written first and once, tells which was earlier.
    """
    try:
        written = (run / "plan.json").stat().st_mtime_ns
    except OSError:
        written = 0
    time_of_name = run.name.partition("-")[0]
    if not _STAMP.fullmatch(time_of_name):
        time_of_name = stamp(written / 1e9)
    return time_of_name, written, run.name


def find(typed: str, results: Path = Path("results")) -> Layout:
    """Return the run that `typed` means: a run directory, a directory of runs, or `latest`.

    In a directory of runs the newest one is taken.

    Raises:
        UsageError: if there is no run; says what was looked at and what to type.
    """
    path = results if typed == "latest" else Path(typed)
    if (path / "plan.json").exists():
        return Layout(path.resolve())
    plans = [*path.glob("*/plan.json"), *path.glob("*/*/plan.json")]
    if not plans:
        runs = sorted((found.parent for found in results.glob("*/*/plan.json")), key=begun)
        newest = f"; the newest are\n  {chr(10).join(f'  {run}' for run in runs[-3:]).strip()}"
        raise UsageError(
            f"no run in {path}: it holds no plan.json{newest if runs else ''}\n"
            "type run=results/SCENARIO/RUN, or run=latest"
        )
    return Layout(max((plan.parent for plan in plans), key=begun).resolve())


def judge(layout: Layout) -> Judged:
    """Judge a run from its directory alone; writes nothing.

    Raises:
        HarnessError: if the directory cannot be read or its scenario is not known here.
    """
    tables = Tables.read(layout)
    name = tables.plan.scenario
    scenario = scenarios.load(name).on(_torch(layout))
    stored = None
    if layout.verdict.exists():
        stored = read_json(layout.verdict)
    wrong = failures(_batches(layout))
    if not layout.ranks.exists():
        wrong = ["the launcher never came to its end: ranks.json is missing"]
    return Judged(
        layout=layout,
        name=name,
        scenario=scenario,
        tables=tables,
        verdict=decide(scenario, name, tables, wrong),
        stored=stored,
    )


def _torch(layout: Layout) -> str | None:
    """Return the version of torch that a run was made with; None where nobody wrote it down."""
    try:
        packages = read_json(layout.environment).get("packages")
    except RecordError:
        return None
    version = packages.get("torch") if isinstance(packages, dict) else None
    return str(version) if version else None


def differences(judged: Judged) -> list[str]:
    """Say where this verdict differs from the stored one; empty if nowhere."""
    if judged.stored is None:
        return ["there is no stored verdict"]
    now = json.loads(judged.verdict.to_json(judged.scenario))
    found = []
    if now["conclusion"] != judged.stored.get("conclusion"):
        found.append(f"conclusion: {judged.stored.get('conclusion')} -> {now['conclusion']}")
    before = {item["claim"]: item for item in judged.stored.get("findings", [])}
    for item in now["findings"]:
        old = before.get(item["claim"])
        if old is None:
            found.append(f"{item['claim']}: new claim, {item['outcome']}")
            continue
        for key in ("outcome", "effect", "floor", "reason"):
            if old.get(key) != item[key]:
                found.append(f"{item['claim']}: {key} {old.get(key)} -> {item[key]}")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        RecordError: if the file cannot be read or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise RecordError(f"{path} holds no JSON object")
    return data


def _batches(layout: Layout) -> list[Batch]:
    if not layout.ranks.exists():
        return []
    try:
        data = json.loads(layout.ranks.read_text(encoding="utf-8"))
        return [
            Batch(**{**item, "exits": tuple(RankExit(**exit_) for exit_ in item["exits"])})
            for item in data
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecordError(f"cannot read {layout.ranks}: {error}") from error
