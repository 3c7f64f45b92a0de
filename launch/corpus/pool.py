"""Run many cases side by side on one warm server, at most so many ranks at a time.

One thread a run: it waits for its ranks most of the time. What an interruption finds under way is
stopped, judged as far as it got, and called interrupted.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

from harness.errors import HarnessError
from harness.plan import Layout, Plan
from launch.corpus.cases import Case
from launch.engine import Engine, Running

RANKS_A_CORE = 4
"""Ranks wait for each other, and those of a hang for nothing. 9 runs of 4 ranks took 35 s one at a
time, 22 s two at a time and 22 s three at a time (measured on 2 cores that others used as well)."""
TICK_S = 0.2
T = TypeVar("T")


class Stopped(HarnessError):
    """The run was stopped from outside before it was through."""

    exit_code = 130


class Stoppable:
    """An engine whose batches end when the event is set, in whichever thread they run."""

    def __init__(self, engine: Engine, stop: threading.Event) -> None:
        """Wrap an engine."""
        self.name = engine.name
        self.engine = engine
        self.stop = stop

    def start(self, plan: Plan, layout: Layout, arms: Sequence[str], batch: int) -> Running:
        """Start the ranks of one batch.

        Raises:
            Stopped: if there is nothing to be started any more.
        """
        self.check()
        return _Ranks(self.engine.start(plan, layout, arms, batch), self)

    def close(self) -> None:
        """Give back what the engine keeps."""
        self.engine.close()

    def check(self) -> None:
        """Raise `Stopped` once the event is set."""
        if self.stop.is_set():
            raise Stopped("interrupted before all arms were through")


class _Ranks:
    def __init__(self, running: Running, engine: Stoppable) -> None:
        self.command = running.command
        self.leaving = running.leaving
        self.signal = running.signal
        self.stop = running.stop
        self._poll = running.poll
        self._engine = engine

    def poll(self, seconds: float) -> Mapping[int, int | None]:
        self._engine.check()
        return self._poll(seconds)


def budget(device: str) -> int:
    """Return how many ranks this machine bears at a time; on CUDA that is up to each run."""
    if device == "cuda":
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return RANKS_A_CORE * (cores or 1)


@dataclass
class Pool:
    """Cases that wait, run and are through."""

    ranks: int
    """So many ranks at a time; a case of more runs alone."""
    stop: threading.Event = field(default_factory=threading.Event)
    under_way: list[Case] = field(default_factory=list)

    def run(
        self,
        cases: Sequence[Case],
        work: Callable[[Case], T],
        done: Callable[[Case, T], None],
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Run all cases, the heaviest first; `work` never raises, `done` is called in this thread.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when everything under way has come to its end.
        """
        waiting = sorted(cases, key=lambda case: -case.weight)
        running: dict[Future[T], Case] = {}
        with ThreadPoolExecutor(max_workers=max(1, self.ranks)) as threads:
            try:
                while waiting or running:
                    for case in [case for case in waiting if self._fits(case, running)]:
                        if self._fits(case, running):
                            waiting.remove(case)
                            running[threads.submit(work, case)] = case
                    self.under_way = list(running.values())
                    tick()
                    self._collect(running, done, TICK_S)
            except KeyboardInterrupt:
                self.stop.set()
                # An impatient second Ctrl-C must not cost the records of what has run.
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                while running:
                    self._collect(running, done, None)
                raise
            finally:
                self.stop.set()

    def _fits(self, case: Case, running: Mapping[Future[T], Case]) -> bool:
        used = sum(other.gpus for other in running.values())
        return not running or used + case.gpus <= self.ranks

    def _collect(
        self,
        running: dict[Future[T], Case],
        done: Callable[[Case, T], None],
        seconds: float | None,
    ) -> None:
        ended, _ = wait(running, timeout=seconds, return_when=FIRST_COMPLETED)
        for future in ended:
            done(running.pop(future), future.result())
