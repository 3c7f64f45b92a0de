"""Carry out a plan batch by batch on any engine: watch the ranks, stop the hung, keep the records.

A batch is a list of arms that share their processes. The first one holds every arm that is not
isolated; when it breaks, the arms behind the broken one get a batch of their own.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from harness.plan import Layout, Plan, write_text
from launch.autopsy import Batch, autopsy

GRACE_S = 1.0
"""After the first rank has failed, the others get so long to leave their own last words."""
START_S = 60.0
"""Ranks that have recorded nothing yet get so much more: importing torch can take long."""
STACK_S = 0.5
"""So long a hung rank gets to write its stack before it is killed."""


class Running(Protocol):
    """The processes of one batch."""

    command: Sequence[str]
    """What a person would type to start the same."""

    def poll(self, seconds: float) -> Mapping[int, int | None]:
        """Wait up to `seconds` for news; return rank -> exit code, None while it runs."""

    def signal(self, number: int) -> None:
        """Send a signal to every rank that still runs."""

    def stop(self) -> None:
        """Kill what still runs and wait for it; no process is left afterwards."""


class Engine(Protocol):
    """A way of starting ranks."""

    name: str

    def start(self, plan: Plan, layout: Layout, arms: Sequence[str], batch: int) -> Running:
        """Start the ranks of one batch."""

    def close(self) -> None:
        """Give back what the engine keeps between batches."""


@dataclass
class Progress:
    """What the engine has got to; `changed` is called at every change."""

    total: int
    done: int = 0
    arm: str = ""
    changed: Callable[[Progress], None] = field(default=lambda progress: None)

    def at(self, done: int, arm: str) -> None:
        """Take note, and tell whoever listens."""
        if (done, arm) != (self.done, self.arm):
            self.done, self.arm = done, arm
            self.changed(self)


def carry_out(plan: Plan, layout: Layout, engine: Engine, progress: Progress) -> list[Batch]:
    """Run all arms of a plan; returns what became of each batch and writes it to `ranks.json`."""
    shared = [arm.name for arm in plan.arms if not arm.isolated]
    waiting = [shared] if shared else []
    waiting += [[arm.name] for arm in plan.arms if arm.isolated]
    batches: list[Batch] = []
    done = 0
    try:
        while waiting:
            arms = waiting.pop(0)
            batch = _run(plan, layout, engine, arms, len(batches), progress, done)
            batches.append(batch)
            left = [arm for arm in arms if not _ended(plan, layout, arm)]
            done += len(arms) - len(left)
            if left and batch.exits:
                done += 1
                if left[1:]:
                    waiting.insert(0, left[1:])
    finally:
        write_text(layout.ranks, json.dumps([asdict(batch) for batch in batches], indent=2) + "\n")
    progress.at(done, "")
    return batches


def _run(
    plan: Plan,
    layout: Layout,
    engine: Engine,
    arms: Sequence[str],
    number: int,
    progress: Progress,
    done: int,
) -> Batch:
    layout.log(number, 0).parent.mkdir(parents=True, exist_ok=True)
    born = time.monotonic()
    running = engine.start(plan, layout, arms, number)
    hung = False
    moved, size = born, -1
    failed_at: float | None = None
    ended = 0
    try:
        while True:
            codes = running.poll(0.05)
            while ended < len(arms) and _ended(plan, layout, arms[ended]):
                ended += 1
            progress.at(done + ended, arms[min(ended, len(arms) - 1)])
            if all(code is not None for code in codes.values()):
                break
            now = time.monotonic()
            if any(codes.values()) or _left_early(plan, layout, arms, codes):
                failed_at = failed_at or now
                if now - failed_at > GRACE_S:
                    break
            grown = _size(plan, layout, arms)
            if grown != size:
                moved, size = now, grown
            elif now - moved > plan.arm_timeout_s + (0 if size else START_S):
                hung = True
                running.signal(signal.SIGUSR1)
                time.sleep(STACK_S)
                break
    finally:
        running.stop()
    sound = not hung and all(code == 0 for code in codes.values())
    sound = sound and all(_ended(plan, layout, arm) for arm in arms)
    exits = () if sound else tuple(autopsy(plan, layout, arms, number, *item) for item in codes.items())
    return Batch(
        arms=tuple(arms),
        command=tuple(running.command),
        seconds=round(time.monotonic() - born, 3),
        exits=exits,
        hung=hung,
    )


def _ended(plan: Plan, layout: Layout, arm: str) -> bool:
    return all(_last_line(layout.stream(arm, rank)) for rank in range(plan.arm(arm).ranks))


def _left_early(
    plan: Plan, layout: Layout, arms: Sequence[str], codes: Mapping[int, int | None]
) -> bool:
    """Say whether a rank ended with code 0 though an arm of its own is not through."""
    gone = [rank for rank, code in codes.items() if code == 0]
    return any(
        not _last_line(layout.stream(arm, rank))
        for rank in gone
        for arm in arms
        if 1 < plan.arm(arm).ranks and rank < plan.arm(arm).ranks
    )


def _last_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            tail = file.read()
    except OSError:
        return False
    return tail.endswith(b"}\n") and b'{"end":"completed"' in tail.rsplit(b"\n", 2)[-2]


def _size(plan: Plan, layout: Layout, arms: Sequence[str]) -> int:
    total = 0
    for arm in arms:
        for rank in range(plan.arm(arm).ranks):
            path = layout.stream(arm, rank)
            total += path.stat().st_size if path.exists() else 0
    return total
