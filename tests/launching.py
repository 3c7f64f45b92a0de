"""The launcher as a user starts it, what it left on disk, and which of its processes still run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness.plan import Layout

MARK = "CROSSRANK_TEST_MARK"
"""A variable that everything started for a test inherits: its results directory."""
ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "cases"
T = TypeVar("T")
GIVE_UP_S = 240
"""When a command that should have ended long ago is killed; no test waits for it to pass."""


def heed_ctrl_c() -> None:
    """Undo, in a process that is being started, what a shell does to those in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a launcher that knows the scenarios of the tests."""
    # Output that is not buffered is never flushed at the end, where a pipe may be broken.
    leave = ("COV_", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(leave)}
    return kept | {"CROSSRANK_SCENARIOS": str(CASES), "PYTHONPATH": str(ROOT), **more}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A launcher that has ended, and the run directory it left, if it left one."""

    code: int
    out: str
    err: str
    layouts: tuple[Layout, ...]

    @property
    def layout(self) -> Layout:
        """The only run directory."""
        assert len(self.layouts) == 1, (self.out, self.err)
        return self.layouts[0]

    @property
    def verdict(self) -> dict[str, Any]:
        """What verdict.json says."""
        return verdict_of(self.layout)


def verdict_of(layout: Layout) -> dict[str, Any]:
    """Return what the verdict.json of a run says."""
    found: dict[str, Any] = json.loads(layout.verdict.read_text(encoding="utf-8"))
    return found


def layouts(results: Path) -> tuple[Layout, ...]:
    """Return the run directories in a results directory, oldest first."""
    return tuple(Layout(plan.parent) for plan in sorted(results.glob("*/*/plan.json")))


def launch(*arguments: str, results: Path, cwd: Path = ROOT, **more: str) -> Run:
    """Run `python -m launch` to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "launch", *arguments, f"results={results}"],
        cwd=cwd,
        env=environment(**{MARK: str(results), **more}),
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Run(code=done.returncode, out=done.stdout, err=done.stderr, layouts=layouts(results))


def processes(results: Path) -> dict[int, str]:
    """Return pid -> command line of everything that runs for this results directory."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            line = (folder / "cmdline").read_bytes()
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if state != "Z" and f"{MARK}={results}".encode() in variables:
            found[int(folder.name)] = line.replace(b"\0", b" ").decode("utf-8", "replace")
    return found


def wait_for(condition: Callable[[], T | None], what: str) -> T:
    """Wait until `condition` returns something true; fail, naming it, when it never does."""
    end = time.monotonic() + GIVE_UP_S
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"waited {GIVE_UP_S} s in vain for {what}")


def assert_no_orphans(results: Path) -> None:
    """Wait until nothing runs any more for this results directory."""
    wait_for(lambda: not processes(results), f"the end of {processes(results)}")


def metrics(layout: Layout, names: Mapping[str, int]) -> Iterator[tuple[Any, ...]]:
    """Yield every record of these arms (name -> ranks) but its time: what a run found out."""
    from harness import record

    for arm, ranks in names.items():
        for rank in range(ranks):
            stream = record.read(layout, arm, rank)
            assert stream is not None
            for row in stream.rows:
                yield arm, rank, row.repeat, row.step, row.phase, tuple(sorted(row.metrics.items()))
            yield arm, rank, stream.end
