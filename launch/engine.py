"""Carry out a plan batch by batch on any engine: watch the ranks, stop the hung, keep the records.

A batch is a list of arms that share their processes. The first one holds every arm that is not
isolated; when it breaks, the arms behind the broken one get a batch of their own.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from harness.plan import Layout, Plan, write_text
from launch.autopsy import Batch, autopsy, broken_arm

GRACE_S = 1.0
"""After the first rank has failed, the others get so long to leave their own last words."""
LONGER_S = 60.0
"""Ranks get so much more to start and to leave: importing torch can take long, and so can an agent
that gathers how its ranks ended."""
STACK_S = 2.0
"""So long a hung rank gets to write its stack before it is killed."""


class Running(Protocol):
    """The processes of one batch."""

    command: Sequence[str]
    """What a person would type to start the same."""

    def poll(self, seconds: float) -> Mapping[int, int | None]:
        """Wait up to `seconds` for news; return rank -> exit code, None while it runs."""

    def leaving(self) -> bool:
        """Say whether a rank is gone while its exit code is still to come."""

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
                broken = broken_arm(batch)
                left.remove(broken if broken in left else left[0])
                for arm in left:
                    # It was cut off through no fault of its own: begin it again from nothing.
                    shutil.rmtree(layout.arm(arm), ignore_errors=True)
                if left:
                    waiting.insert(0, left)
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
                continue
            # Nothing is recorded while ranks start or leave, which the time limit is not about.
            quiet = not size or _is_leaving(plan, layout, arms) or running.leaving()
            if now - moved > plan.arm_timeout_s + (LONGER_S if quiet else 0):
                hung = True
                running.signal(signal.SIGUSR1)
                time.sleep(STACK_S)
                break
    finally:
        running.stop()
    sound = not hung and all(code == 0 for code in codes.values())
    sound = sound and all(_ended(plan, layout, arm) for arm in arms)
    exits = [] if sound else [autopsy(plan, layout, arms, number, *item) for item in codes.items()]
    return Batch(
        arms=tuple(arms),
        command=tuple(running.command),
        seconds=round(time.monotonic() - born, 3),
        exits=tuple(exits),
        hung=hung,
    )


def _ended(plan: Plan, layout: Layout, arm: str) -> bool:
    return all(_last_line(layout.stream(arm, rank)) for rank in range(plan.arm(arm).ranks))


def _is_leaving(plan: Plan, layout: Layout, arms: Sequence[str]) -> bool:
    """Say whether the last arm is through, or some rank has written that it failed."""
    if _ended(plan, layout, arms[-1]):
        return True
    streams = [layout.stream(arm, place) for arm in arms for place in range(plan.arm(arm).ranks)]
    return any(_last_line(path, status="failed") for path in streams)


def _left_early(
    plan: Plan, layout: Layout, arms: Sequence[str], codes: Mapping[int, int | None]
) -> bool:
    """Say whether a rank ended with code 0 though an arm of its own is not through."""
    return any(
        codes[rank] == 0 and not _last_line(layout.stream(arm, place))
        for arm, dealt in plan.deal(arms).items()
        for place, rank in enumerate(dealt)
    )


def _last_line(path: Path, *, status: str = "completed") -> bool:
    """Say whether a stream came to this end."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            tail = file.read()
    except OSError:
        return False
    last = f'{{"end":"{status}"'.encode()
    return tail.endswith(b"}\n") and (tail.startswith(last) or b"\n" + last in tail)


def _size(plan: Plan, layout: Layout, arms: Sequence[str]) -> int:
    total = 0
    for arm in arms:
        for rank in range(plan.arm(arm).ranks):
            path = layout.stream(arm, rank)
            total += path.stat().st_size if path.exists() else 0
    return total
