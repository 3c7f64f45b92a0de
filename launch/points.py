"""The points of a sweep: what was composed, what became of it, and which were run before."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, RecordError
from harness.plan import Layout
from harness.tables import Tables
from launch import loss, sweep_tables
from launch.config import Config
from launch.runs import begun, read_json

INTERRUPTED = "interrupted"
NOT_RUN = "not run"
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One composed configuration, or why it was refused."""

    overrides: tuple[str, ...]
    config: Config | None
    error: HarnessError | None = None


@dataclass(frozen=True, kw_only=True)
class Done:
    """What became of one point."""

    number: int
    """Its place in the order of the sweep, from 1."""
    state: str
    """as_expected, unexpected, inconclusive; failed, refused, interrupted, not run."""
    exit_code: int | None = None
    """What `make repro` of this point ends with; None if it was not run."""
    layout: Layout | None = None
    reused: bool = False
    """True if an earlier run was taken."""
    seconds: float | None = None
    problem: str | None = None
    arms: Sequence[Row] = ()
    findings: Sequence[Row] = ()

    @property
    def rows(self) -> Sequence[Row]:
        """One row per arm; an empty one where there is none, so that no point is lost."""
        return self.arms or ({},)

    def about(self) -> dict[str, Any]:
        """Return what every row says about the point."""
        return {
            "point": self.number,
            "state": self.state,
            "exit_code": self.exit_code,
            "run": f"{self.layout.root.parent.name}/{self.layout.root.name}"
            if self.layout
            else None,
            "reused": self.reused,
            "seconds": self.seconds,
            "problem": self.problem,
            "report": str(self.layout.report) if self.layout else None,
        }


def measured(
    number: int,
    config: Config,
    layout: Layout,
    *,
    reused: bool = False,
    seconds: float | None = None,
) -> Done:
    """Return what a run directory says about its point.

    Raises:
        HarnessError: if its verdict cannot be read, or its records where there should be some.
    """
    verdict = read_json(layout.verdict)
    failures = [str(failure) for failure in verdict["failures"]]
    try:
        rows = loss.rows(Tables.read(layout), config.scenario)
    except RecordError:
        if not failures:
            raise
        rows = []
    findings = [
        {name: _number(item.get(name), kind) for name, kind in sweep_tables.FINDING.items()}
        for item in verdict["findings"]
    ]
    return Done(
        number=number,
        state="failed" if failures else str(verdict["conclusion"]),
        layout=layout,
        reused=reused,
        seconds=seconds,
        problem="; ".join(failures) or None,
        exit_code=int(verdict["exit_code"]),
        arms=rows,
        findings=findings,
    )


def _number(value: Any, kind: type) -> Any:
    # The verdict is strict JSON: what is not finite stands there as text.
    return float(value) if kind is float and value is not None else value


def exit_code(done: Sequence[Done]) -> int:
    """Return the code of a whole sweep; see `launch.sweep.run`."""
    verdicts = [item.exit_code for item in done if item.layout is not None]
    if not verdicts:
        return next((item.exit_code for item in done if item.exit_code), 11)
    if 10 in verdicts:
        return 10
    return 11 if any(item.exit_code != 0 for item in done) else 0


class Finished:
    """The runs that came to a sound end, by directory, point and engine.

    Every question looks at the directory again, so that what another sweep finishes meanwhile is
    found; a run that was seen finished is not read twice.
    """

    def __init__(self) -> None:
        """Know of no run yet."""
        self._seen: set[Path] = set()
        self._runs: dict[tuple[Path, str, str], Layout] = {}

    def find(self, folder: Path, point: str, engine: str) -> Layout | None:
        """Return the newest sound run of a point in a directory of runs, or None."""
        try:
            found = sorted({*folder.iterdir()} - self._seen, key=begun)
        except OSError:
            found = []
        for root in found:
            layout = Layout(root)
            if not layout.verdict.exists():
                continue
            self._seen.add(root)
            try:
                verdict = read_json(layout.verdict)
                key = read_json(layout.environment).get("point")
                how = read_json(layout.plan).get("engine")
            except HarnessError:
                continue
            if key and not verdict.get("failures"):
                self._runs[folder, str(key), str(how)] = layout
        return self._runs.get((folder, point, engine))


class Clock:
    """How long the rest takes, from the arms that were run, not from those found finished."""

    def __init__(self, arms: int, now: Callable[[], float] = time.monotonic) -> None:
        """Start with so many arms ahead."""
        self._arms = arms
        self._now = now
        self._begun = now()
        self._run = 0
        self._seconds = 0.0
        self.through = 0
        """Arms of the points that are through, run or not."""

    def start(self) -> None:
        """Begin a point."""
        self._begun = self._now()

    def end(self, arms: int, *, counts: bool) -> None:
        """End a point of so many arms; `counts` if it was run."""
        self.through += arms
        if counts:
            self._run += arms
            self._seconds += self._now() - self._begun

    def left(self, arms: int) -> str:
        """Return in words how long the rest takes, so many arms into the point under way."""
        run = self._run + arms
        if not run:
            return ""
        seconds = self._seconds + self._now() - self._begun
        rest = seconds / run * max(0, self._arms - self.through - arms)
        return f", about {rest:.0f} s left" if rest < 90 else f", about {rest / 60:.0f} min left"
