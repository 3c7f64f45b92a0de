"""Between places: who shares a folder, and the comparison of those who do not, over the store.

All of it happens in a thread of its own, so that a store that does not answer blocks nothing of the
program. On each rank it tells where the rank is; on the first rank of each place it goes on as long
as the run does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from harness.watch.divergence import NOT_ALIKE, Divergence, to_json
from harness.watch.instruments.patches import Patches
from harness.watch.layout import GRADIENTS, place_of
from harness.watch.meeting.alarms import Alarms
from harness.watch.meeting.board import Board
from harness.watch.meeting.bundle import bundle, lay_out
from harness.watch.meeting.crossing import Crossing, Progress
from harness.watch.meeting.exchange import Exchange
from harness.watch.meeting.folder import Folder
from harness.watch.meeting.places import Places, line_of, read_places, word_of

if TYPE_CHECKING:
    from torch.distributed import Store

SOON, LATE = 0.02, 1.0
"""Seconds between two looks at who is there: the first, and the longest."""
PULSE = 0.25
"""Seconds between two looks at the flags of the others where there is nothing to compare."""
CLOSING = 5.0
"""Seconds that the end of a rank may take for it."""


class Bridge:
    """From this rank to the other places of the run."""

    def __init__(
        self,
        store: Store,
        folder: Folder,
        *,
        name: str,
        rank: int,
        world_size: int,
        host: str,
        on_found: Callable[[Divergence, str], None],
    ) -> None:
        """Begin to tell the others where this rank is.

        Args:
            store: the store of the run.
            folder: where this rank writes.
            name: the same on all ranks, and another one for each watcher of a process.
            rank: this rank.
            world_size: how many there are.
            host: the name of this host.
            on_found: told of a divergence between places, on one place, from another thread.
        """
        self.places: Places | None = None
        self.failed: str | None = None
        # Where this process is the one that serves the store, it goes on to do so.
        self._store: Store | None = store
        self._folder = folder
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._host = host
        self._on_found = on_found
        self._word: str | None = None
        self._progress: dict[str, Progress] = {}
        self._crossings: dict[str, Crossing] = {}
        self._due: dict[str, int] = {}
        """Stream -> the index that this rank has written last."""
        self._sources: dict[str, str] = {}
        self._patches = Patches()
        # Held, the old store would serve its old keys to the next process group.
        for owner in (torch.distributed, torch.distributed.distributed_c10d):
            self._patches.around(owner, "init_process_group", before=self._release)
        self._awake = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="crossrank-hosts", daemon=True)
        self._thread.start()

    def offer(self, stream: str, index: int, source: str) -> None:
        """Say that this rank has written an index of a stream; costs next to nothing."""
        self._due[stream], self._sources[stream] = index, source
        if place_of(index)[1] != GRADIENTS:
            self._awake.set()

    def close(self) -> None:
        """Stop, after what is due by now; at most for a while."""
        self._over.set()
        self._awake.set()
        self._patches.close()
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            self.failed = self.failed or "the store did not answer"

    def hand_over(self, *, alone: bool) -> bool | None:
        """Give all that this place knows to the place that ends last.

        Args:
            alone: the script has failed; others may not come to an end of their own.

        Returns:
            True if this place has to answer, for all ranks: the files of the others are here now.
            False if another place does. None if that could not be settled.
        """
        given: list[bool] = []

        def act(board: Board) -> None:
            given.append(self._hand_over(board, alone))

        if self.is_alone:
            return True
        self._at_end(act)
        return given[0] if given else None

    def _live(self) -> None:
        try:
            assert self._store is not None
            board = Board(self._store, self._name)
            self._meet(board)
            if self.places is None or self.is_alone:
                return
            self._carry_on(board, Alarms(self._folder, self.places, self._rank, self.place))
        except Exception as error:
            self.failed = _said(error)

    def _meet(self, board: Board) -> None:
        wait, told = SOON, False
        while self.places is None:
            self._word = self._word or word_of(self._folder)
            if self._word is not None and not told:
                told = True
                board.add_line("places", line_of(self._rank, self._word, self._host))
            lines = (board.read("places") or "").splitlines()
            self.places = read_places(lines, self._world_size)
            if self.places is not None or self._over.wait(wait):
                return
            wait = min(2 * wait, LATE)

    def _carry_on(self, board: Board, alarms: Alarms) -> None:
        """Compare as the ranks of this place go on, until the end of this one; carry alarms."""
        assert self.places is not None
        compares = self.places.of(self._rank)[0] == self._rank
        looked = 0.0
        while True:
            over = self._over.is_set()
            self._awake.clear()
            if compares:
                self._step(board)
            if time.monotonic() - looked >= PULSE and alarms.is_due():
                alarms.carry(board)
                looked = time.monotonic()
            if self._folder.stopped_elsewhere.exists():
                # The place that said so ends now, and may take the store along.
                return
            if over:
                break
            (self._awake if compares else self._over).wait(PULSE)
        if not compares:
            return
        progress = {stream: asdict(one) for stream, one in self._progress.items()}
        self._folder.write(self._folder.across, progress)

    def _step(self, board: Board) -> None:
        for stream, last in list(self._due.items()):
            crossing = self._crossing(board, stream)
            crossing.catch_up(last)
            crossing.look_out()
            if crossing.found is not None and not self._folder.found_across.exists():
                source = self._sources[stream]
                content = {"source": source, "found": to_json(crossing.found)}
                self._folder.write(self._folder.found_across, content)
                if board.swap("announced", "", self.place) == self.place:
                    self._on_found(crossing.found, source)

    def _crossing(self, board: Board, stream: str) -> Crossing:
        assert self.places is not None
        if stream not in self._crossings:
            ranks = self.places.of(self._rank)
            self._crossings[stream] = Crossing(
                board,
                Exchange(self._folder, stream, ranks),
                stream,
                ranks,
                list(self.places.ranks),
                self.place,
                self._progress.setdefault(stream, Progress()),
            )
        return self._crossings[stream]

    def _hand_over(self, board: Board, alone: bool) -> bool:
        assert self.places is not None
        # Where the first rank of the place has left off; its own end may have been earlier.
        for stream, progress in (self._folder.read(self._folder.across) or {}).items():
            self._progress[stream] = Progress(**progress)
        self._crossings.clear()
        self._step(board)
        mine = bundle(self._folder, self.places.of(self._rank), self._due)
        board.put_large(f"end/{self.place}", mine)
        ended = board.count("ended")
        if not alone and ended < len(self.places.ranks):
            return False
        if board.swap("answers", "", self.place) != self.place:
            return False
        if alone:
            Alarms(self._folder, self.places, self._rank, self.place).ask(board)
        others = [one for one in self.places.ranks if one != self.place]
        found = [board.read_large(f"end/{one}") for one in others]
        lay_out(self._folder, [one for one in found if one is not None])
        return True

    def limits(self) -> list[str]:
        """Return sentences on what was not compared between places."""
        said = []
        for stream, one in self._progress.items():
            if one.skipped:
                said.append(
                    f"{self._sources[stream]}: {one.skipped} of {one.due} comparisons between "
                    "hosts were left out, as the store was too slow for them"
                )
            if one.apart:
                said.append(f"{self._sources[stream]}: not compared between hosts: {NOT_ALIKE}")
            elif one.over and not self._folder.found_across.exists():
                said.append(
                    f"{self._sources[stream]}: no longer compared between hosts, whose replicas "
                    "differ again and again in what is no fault"
                )
        return said

    def tell(self, code: int) -> None:
        """Tell the places that have ended before with which exit code the answer ends."""

        def act(board: Board) -> None:
            board.put("code", str(code))

        self._at_end(act)

    def answered(self) -> int | None:
        """Wait for a while until the place that ends last has answered; return its exit code.

        A launcher waits long for a host that ends otherwise than the others. And where this process
        serves the store, the others need it until then.
        """
        codes: list[int] = []

        def act(board: Board) -> None:
            deadline = time.monotonic() + CLOSING
            while time.monotonic() < deadline:
                code = board.read("code")
                if code is not None:
                    codes.append(int(code))
                    return
                time.sleep(SOON)

        self._at_end(act)
        return codes[0] if codes else None

    @property
    def serves(self) -> bool:
        """Whether the store may be a part of this process."""
        return self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def _at_end(self, act: Callable[[Board], None]) -> None:
        if self._store is None or self.failed or self.places is None:
            return
        if self.is_alone and not self.spans_hosts:
            return
        store = self._store

        def guarded() -> None:
            try:
                act(Board(store, self._name))
            except Exception as error:
                self.failed = _said(error)

        acting = threading.Thread(target=guarded, name="crossrank-ends", daemon=True)
        acting.start()
        acting.join(2 * CLOSING)
        if acting.is_alive():
            self.failed = "the store did not answer"

    @property
    def place(self) -> str:
        """The word of the folder of this rank."""
        return str(self._word)

    @property
    def is_alone(self) -> bool:
        """Whether all ranks of the run share this folder."""
        return self.places is not None and len(self.places.ranks) == 1

    @property
    def spans_hosts(self) -> bool:
        """Whether ranks of several hosts share this folder."""
        places = self.places
        return places is not None and len({places.hosts[r] for r in places.of(self._rank)}) > 1

    def _release(self, *_: Any, **__: Any) -> None:
        self._store = None
        self._over.set()
        self._awake.set()


def _said(error: Exception) -> str:
    # A store that is gone adds the stack of its C++ code.
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
