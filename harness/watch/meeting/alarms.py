"""Alarms of a hang between places: that there is one, what all ranks were doing, that it is over.

A rank that waits for too long raises an alarm in its folder, and the ranks that see it write what
they are doing. Where places share no folder the store of the run carries both: the alarm to the
other places, and what their ranks have written to all of them, each of which can judge then.
"""

from __future__ import annotations

import json
import time

from harness.watch.meeting.board import Board
from harness.watch.meeting.bundle import bundle, lay_out
from harness.watch.meeting.folder import Folder
from harness.watch.meeting.places import Places

PATIENCE = 3.0
"""Seconds that other places get to say what they are doing, once this one has failed."""
_SOON = 0.05


class Alarms:
    """Those of one place and of all others; one rank of each place carries them at a time."""

    def __init__(self, folder: Folder, places: Places, rank: int, place: str) -> None:
        """Carry nothing yet.

        Args:
            folder: the folder of this place.
            places: all of them.
            rank: this one.
            place: the word of this place.
        """
        self._folder = folder
        self._rank = rank
        self._place = place
        self._here = places.of(rank)
        self._others = {word: ranks for word, ranks in places.ranks.items() if word != place}
        self._from_elsewhere = False
        """Whether the alarm in this folder is that of another place."""
        self._sent: list[tuple[str, int]] = []
        self._times = 0
        self._got: dict[str, str] = {}
        """Place -> which of its parcels was laid out here."""

    def is_due(self) -> bool:
        """Say whether it is on this rank: those before it have ended, or are gone."""
        before = self._here[: self._here.index(self._rank)]
        return all(self._folder.end(r).exists() or self._folder.gone(r).exists() for r in before)

    def carry(self, board: Board) -> None:
        """Take an alarm from here to the others or from them to here, and what belongs to it."""
        alarm, raised_by = self._folder.alarm, board.read("alarm")
        if raised_by is None and self._from_elsewhere:
            self._from_elsewhere = False
            alarm.unlink(missing_ok=True)
        if raised_by is None and alarm.exists():
            raised_by = board.swap("alarm", "", self._place) or self._place
        if raised_by is None:
            return
        if not alarm.exists():
            if raised_by == self._place:
                # What the rank was waiting for has come after all.
                board.remove("alarm")
                return
            self._from_elsewhere = self._folder.claim("alarm")
        self._send(board)
        self._fetch(board)
        self._stop(board)

    def ask(self, board: Board) -> None:
        """After a failure here: get what all other places know, at most for a while."""
        board.swap("alarm", "", self._place)
        deadline = time.monotonic() + PATIENCE
        elsewhere = [rank for ranks in self._others.values() for rank in ranks]
        while time.monotonic() < deadline:
            self._fetch(board)
            if all(self._has_told(rank) for rank in elsewhere):
                return
            time.sleep(_SOON)

    def _has_told(self, rank: int) -> bool:
        return any(path.exists() for path in self._folder.about_a_stop(rank))

    def _send(self, board: Board) -> None:
        written = [
            (path.name, path.stat().st_mtime_ns)
            for rank in self._here
            for path in self._folder.about_a_stop(rank)
            if path.exists()
        ]
        if written and written != self._sent:
            self._sent, self._times = written, self._times + 1
            board.put_large(f"stop/{self._place}", bundle(self._folder, self._here, {}))
            board.put(f"stop/{self._place}/times", f"{self._rank} {self._times}")

    def _fetch(self, board: Board) -> None:
        """Lay out what other places have sent."""
        for place, ranks in self._others.items():
            times, key = board.read(f"stop/{place}/times"), f"stop/{place}"
            if times is None:
                # Its ranks may have ended, one and all.
                times, key = "end", f"end/{place}"
            if self._got.get(place) == times:
                continue
            parcel = board.read_large(key)
            if parcel is None:
                continue
            self._got[place] = times
            lay_out(self._folder, [parcel])
            names = json.loads(parcel)["files"]
            for rank in ranks:
                if self._folder.stall(rank).name not in names:
                    self._folder.stall(rank).unlink(missing_ok=True)

    def _stop(self, board: Board) -> None:
        """Pass on that the run was judged to be stuck, and is to be ended."""
        by = board.read("stopped")
        if by is None and self._folder.stopped.exists():
            by = board.swap("stopped", "", self._place) or self._place
        if by == self._place:
            # Where the store ends with a host of this place, the others would not hear of it.
            if all(board.read(f"stopped/{place}") is not None for place in self._others):
                self._folder.claim("stopped-everywhere")
        elif by is not None and not self._folder.stopped_elsewhere.exists():
            for what in ("answered", "said", "stopped", "stopped-elsewhere"):
                self._folder.claim(what)
            board.put(f"stopped/{self._place}", "seen")
