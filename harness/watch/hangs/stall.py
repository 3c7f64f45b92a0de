"""Notices that this rank waits in vain, and writes down what it was doing; a thread that sleeps.

It sends nothing and holds nothing that the program needs, so it can neither block nor pair with a
collective. A rank that has waited for too long raises an alarm, a file in the folder; then all
ranks write what they have called and where they are, and one of them gives the answer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness.watch.answers.gathering import gather
from harness.watch.answers.outputs import Outputs, publish
from harness.watch.exit_codes import STOPPED
from harness.watch.hangs.collectives import (
    Collectives,
    place_of,
    stack_of,
    stack_of_error,
    waits_in_torch,
)
from harness.watch.hangs.stopping import answer_to_stop, first_waiting, is_stuck
from harness.watch.hangs.witness import tell_witness
from harness.watch.instruments.context import Context
from harness.watch.instruments.last_call import LastCall
from harness.watch.instruments.patches import Patches
from harness.watch.meeting.folder import Folder, process_began
from harness.watch.meeting.presence import Presence
from harness.watch.stderr import say

TICK = 1.0
"""Seconds between two looks."""
USUAL = 300.0
"""Seconds without progress after which a waiting rank says so, if nothing else was typed."""
LOOK = 20.0
"""Seconds without progress after which the record is read, which takes some 10 ms, if not typed."""
PART = 0.8
"""And not more than this part of the time limit that torch itself has for the collective."""
GRACE = 2.5
"""Seconds in which the other ranks notice an alarm and write what they were doing."""

ANSWERED = 10.0
"""Seconds that the rank that answers may need for it."""


class Stall:
    """Watches over one rank."""

    def __init__(
        self,
        presence: Presence,
        context: Context,
        meet: Callable[[], None],
        account: Callable[[], dict[str, Any]],
        typed: float | None,
    ) -> None:
        """Wait for the process group.

        Args:
            presence: this rank among the others.
            context: what the instruments share.
            meet: lets the watcher find its folder.
            account: returns what the watcher says of itself at the end of its process.
            typed: seconds of --hang-timeout. If given, a run that is stuck is ended after the
                answer; if not, it is left to torch's own time limit.
        """
        self.outputs = Outputs()
        self._presence = presence
        self._context = context
        self._meet = meet
        self._account = account
        self._typed = typed
        self._tick = TICK if typed is None else min(TICK, typed / 4)
        self._collectives = Collectives()
        self._last_call = LastCall(context)
        self._patches = Patches()
        self._main = threading.main_thread().ident or 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._progress: tuple[str, int] | None = None
        self._since = self._moved = time.monotonic()
        self._limit: float | None = None
        self._looked = False
        self._place: tuple[Any, ...] = ()
        self._told: tuple[Any, ...] | None = None
        self._alarmed: float | None = None
        self._spoken = False
        safely = context.safely
        for owner in (torch.distributed, torch.distributed.distributed_c10d):
            self._patches.around(
                owner, "init_process_group", after=safely("hangs", lambda *_, **__: self.begin())
            )
            self._patches.around(
                owner,
                "destroy_process_group",
                before=safely("hangs", lambda *_, **__: self._collectives.remember_groups()),
            )
        self._patches.around(os, "_exit", before=safely("exits", self._before_exit))
        if torch.distributed.is_initialized():
            safely("hangs", self.begin)()

    def begin(self) -> None:
        """Start to watch; the process group is there."""
        self._meet()
        presence = self._presence
        if presence.world_size == 1 or self._thread is not None or presence.folder is None:
            return
        if not self._collectives.known:
            presence.note(
                "this torch keeps no record of collectives: which have no partner is open"
            )
        self._last_call.open(presence.folder.last_call(presence.rank))
        tell_witness(presence.folder, presence.peers, presence.world_size, self.outputs)
        self._thread = threading.Thread(target=self._watch, name="crossrank", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        self._patches.close()
        self._last_call.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * TICK)

    def ended(self, error: BaseException | None) -> dict[str, Any]:
        """Write this rank's last collectives; return how its script ended, for the others."""
        folder = self._presence.folder
        how: dict[str, Any] = {"time": time.time(), "error": None}
        if error is not None:
            how["error"] = {
                "type": type(error).__name__,
                "message": str(error)[:2000],
                "stack": stack_of_error(error),
            }
        if folder is None or self._thread is None:
            return how
        with contextlib.suppress(OSError):
            folder.stall(self._presence.rank).unlink()
        try:
            calls = self._collectives.to_json()
        except Exception as failed:
            self._presence.note(f"no longer observed: collectives ({type(failed).__name__})")
        else:
            folder.write(folder.calls(self._presence.rank), calls)
        return how

    def ask_others(self) -> None:
        """After a failure: let the others write what they are doing, if they still can."""
        folder, rank = self._presence.folder, self._presence.rank
        if folder is None or self._presence.world_size == 1:
            return
        folder.claim("alarm")
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            open_ = [peer for peer in self._presence.peers if peer != rank and self._is_open(peer)]
            if not open_:
                return
            time.sleep(0.02)

    def wait_for_answer(self) -> None:
        """After a failure: let the rank that gives the answer finish it."""
        folder = self._presence.folder
        deadline = time.monotonic() + ANSWERED
        while folder is not None and time.monotonic() < deadline:
            answering = (folder.root / "answered.claimed").exists()
            others = [peer for peer in self._presence.peers if peer != self._presence.rank]
            if not answering or (folder.root / "said.claimed").exists():
                return
            if all(note_if_gone(folder, peer) for peer in others):
                return
            time.sleep(0.02)

    def _is_open(self, peer: int) -> bool:
        """Say whether nothing has come of a rank yet: no record, no end, and it is alive."""
        folder = self._presence.folder
        assert folder is not None
        if folder.stall(peer).exists() or folder.end(peer).exists():
            return False
        return not note_if_gone(folder, peer)

    def _watch(self) -> None:
        while not self._over.wait(self._tick):
            try:
                self._look()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                self._presence.note(f"no longer observed: hangs ({said})")
                return

    def _look(self) -> None:
        folder, now = self._presence.folder, time.monotonic()
        assert folder is not None
        progress = (self._collectives.progress(), self._context.updates)
        if progress != self._progress:
            self._progress, self._since, self._looked = progress, now, False
        place = place_of(self._main)
        if place != self._place:
            self._place, self._moved = place, now
        waiting = self._waits(now)
        alarm = folder.alarm
        if self._typed is not None and folder.stopped_elsewhere.exists():
            self._end()
        if waiting and folder.claim("alarm"):
            self._alarmed = now
        if not alarm.exists():
            if self._told is not None:
                self._withdraw(folder)
            return
        if self._alarmed is None:
            self._alarmed = now
        if self._told is not None and self._told[1] and not waiting:
            # What it was waiting for has come after all.
            alarm.unlink(missing_ok=True)
            self._withdraw(folder)
            return
        still = now - self._moved >= (self._typed or USUAL)
        state = (progress, waiting, still)
        if state != self._told:
            self._tell(folder, state, now)
        others = [peer for peer in self._presence.peers if peer != self._presence.rank]
        if waiting and (
            not any(self._is_open(peer) for peer in others) or now - self._alarmed > GRACE
        ):
            self._judge(folder)

    def _waits(self, now: float) -> bool:
        """Say whether the rank has waited in a collective for longer than it should have to."""
        idle = now - self._since
        if idle < (self._typed or LOOK):
            return False
        if not self._looked:
            self._looked = True
            self._limit = self._collectives.waits()
        if self._typed is not None:
            limit = self._typed
        else:
            limit = min(USUAL, PART * self._limit) if self._limit else USUAL
        if idle < limit:
            return False
        if self._limit is not None:
            return True
        # Point-to-point messages and the store are not in the record.
        unmoved = now - self._moved >= limit
        return unmoved and waits_in_torch(sys._current_frames().get(self._main))

    def _tell(self, folder: Folder, state: tuple[Any, ...], now: float) -> None:
        rank = self._presence.rank
        if self._told is None or self._told[0] != state[0]:
            folder.write(folder.calls(rank), self._collectives.to_json())
        content = {
            "time": time.time(),
            "waiting": state[1],
            "still": state[2],
            "idle": now - self._since,
            "stack": stack_of(sys._current_frames().get(self._main)),
            "updates": self._context.updates,
            "since_update": self._context.window.so_far(),
        }
        folder.write(folder.stall(rank), content)
        self._told = state

    def _withdraw(self, folder: Folder) -> None:
        self._told = self._alarmed = None
        folder.stall(self._presence.rank).unlink(missing_ok=True)

    def _judge(self, folder: Folder) -> None:
        """Give the answer, on one rank, once it is sure that the run cannot go on."""
        presence = self._presence
        # What the ranks of other places were doing was laid out here, if they share no folder.
        members = [
            r for r in range(presence.world_size) if r in presence.peers or folder.start(r).exists()
        ]
        if self._typed is not None and folder.stopped.exists():
            self._end_with(members)
        evidence = gather(folder, members, presence.world_size)
        if not is_stuck(evidence) or first_waiting(evidence) not in presence.peers:
            return
        if self._typed is None:
            if not self._spoken and folder.claim("hang-announced"):
                answer = answer_to_stop(folder, members, presence.world_size)
                say(f"{answer.headline} (type --hang-timeout SECONDS to end such a run)")
            self._spoken = True
        elif folder.claim("answered"):
            answer = answer_to_stop(folder, members, presence.world_size)
            say("\n".join([*answer.lines(), *publish(answer, self.outputs)]))
            folder.claim("said")
            folder.claim("stopped")
            self._end_with(members)

    def _end_with(self, members: Sequence[int]) -> None:
        """End, once ranks of other places know of it: the launcher ends the others here."""
        folder = self._presence.folder
        assert folder is not None
        deadline = time.monotonic() + GRACE
        while len(members) > len(self._presence.peers) and time.monotonic() < deadline:
            if folder.stopped_everywhere.exists() or folder.stopped_elsewhere.exists():
                break
            time.sleep(0.02)
        self._end()

    def _end(self) -> None:
        """End a process whose main thread is stuck in a collective for ever."""
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        # The stuck thread may be the one that holds the stream.
        flushing.join(timeout=1)
        os._exit(STOPPED)

    def _before_exit(self, code: int = 0, *_: Any, **__: Any) -> None:
        """Leave word before an exit that runs no handlers, so that it is no sudden death."""
        folder = self._presence.folder
        if folder is not None and not folder.end(self._presence.rank).exists():
            content = {"code": code, **self._account(), "time": time.time(), "error": None}
            folder.write(folder.end(self._presence.rank), content)


def note_if_gone(folder: Folder, rank: int) -> bool:
    """Say whether the process of a rank of this host is gone, and leave word if it is."""
    about = folder.read(folder.start(rank))
    if not about or about["host"] != socket.gethostname() or not about["began"]:
        return False
    if process_began(about["pid"]) == about["began"]:
        return False
    if not folder.end(rank).exists() and not folder.gone(rank).exists():
        folder.write(folder.gone(rank), {"time": time.time(), "pid": about["pid"]})
    return True


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
