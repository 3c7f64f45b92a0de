"""Puts digests where the peers can read them, and reads theirs; never waits for anyone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from harness.watch.digests.pending import Pending
from harness.watch.divergence import Seen
from harness.watch.layout import GRADIENTS, Layout, index_of, place_of
from harness.watch.meeting.folder import Folder
from harness.watch.meeting.ring import Reader, Slot, Writer

_SPARE = 64
"""Columns beyond those of the first layout: parameters and settings may be added later."""
_FIRST = index_of(0, GRADIENTS)
_BEHIND = 4
"""Digests that a GPU may owe, those of two updates; then the program waits for the oldest."""


class Exchange:
    """The digests of one stream, of this rank and of its peers."""

    def __init__(
        self, folder: Folder, stream: str, peers: Sequence[int], phase: str | None = None
    ) -> None:
        """Open what the peers write; `peers` are all ranks of the folder.

        With a phase, everything written belongs to it, whatever its index.
        """
        self._phase = phase
        self._folder = folder
        self._stream = stream
        self._readers = {peer: Reader(folder.ring(stream, peer)) for peer in peers}
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._writer: Writer | None = None
        self._version = -1
        self._rank: int | None = None
        self._queue: deque[tuple[int, int, Sequence[int] | Pending]] = deque()
        self._written: dict[int, bytes] = {}
        """What was written last, by its index."""

    def narrow(self, peers: Sequence[int]) -> None:
        """Leave out ranks that turned out to write elsewhere."""
        self._readers = {peer: reader for peer, reader in self._readers.items() if peer in peers}

    def declare(self, rank: int, layout: Layout) -> bool:
        """Say what this rank's digests mean from now on; False if there are too many to keep.

        Raises:
            OSError: the folder cannot be written.
        """
        columns = max(map(len, layout.phases.values()))
        if self._writer is None:
            self._writer = Writer(self._folder.ring(self._stream, rank), columns + _SPARE)
        elif columns > self._writer.columns:
            return False
        self._rank = rank
        self._version += 1
        path = self._folder.layout(self._stream, rank, self._version)
        self._folder.write(path, layout.to_json())
        return True

    def post(self, index: int, digests: Sequence[int] | Pending) -> list[int]:
        """Write what this rank observed, and return the indices at which there is more to see now.

        What a GPU still has to compute is written by a later call, in the order of the calls.

        Raises:
            OSError: the folder cannot be written.
        """
        if not self._queue and not isinstance(digests, Pending):
            assert self._writer is not None
            self._written = {index: self._writer.write(index, self._version, digests)}
            return [index]
        self._queue.append((index, self._version, digests))
        return self._write(behind=_BEHIND)

    def finish(self) -> list[int]:
        """Write what is still owed, waiting for it, and return the indices.

        Raises:
            OSError: the folder cannot be written.
        """
        return self._write(behind=0)

    def _write(self, *, behind: int) -> list[int]:
        self._written = {}
        while self._queue:
            index, version, digests = self._queue[0]
            if isinstance(digests, Pending):
                if len(self._queue) <= behind and not digests.ready():
                    break
                digests = digests.take()
            self._queue.popleft()
            assert self._writer is not None
            self._written[index] = self._writer.write(index, version, digests)
        return list(self._written)

    def all_equal(self, index: int) -> bool | None:
        """Say whether every peer has written the same; None while one of them has not."""
        mine = self._written.get(index)
        if mine is not None and index > _FIRST:
            equal = True
            for peer, reader in self._readers.items():
                if peer != self._rank:
                    held = reader.holds(index, mine)
                    if held is None:
                        return None
                    equal = equal and held
            if equal:
                return True
        slots: list[Slot] = []
        for reader in self._readers.values():
            slot = reader.read(index)
            if slot is None:
                return None
            slots.append(slot)
        # The first step is always looked at in full: names may differ where digests do not, and
        # equal gradients are what tells replicas with unequal values from parts.
        first = slots[0]
        return index > _FIRST and all(s.digests == first.digests for s in slots)

    def look(self, index: int) -> Seen:
        """Return what each rank wrote at `index`, with its meaning."""
        seen = {}
        for rank, reader in self._readers.items():
            slot = reader.read(index)
            if slot is None:
                continue
            layout = self._layout(rank, slot.layout)
            if layout is not None:
                phase = self._phase or place_of(index)[1]
                seen[rank] = (layout.phases[phase], slot.digests)
        return seen

    def _layout(self, rank: int, version: int) -> Layout | None:
        if (rank, version) not in self._layouts:
            content = self._folder.read(self._folder.layout(self._stream, rank, version))
            if content is None:
                return None
            self._layouts[rank, version] = Layout.from_json(content)
        return self._layouts[rank, version]
