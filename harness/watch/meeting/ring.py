"""Digests of one optimizer on one rank: a file of fixed size that its peers read.

Slots of equal length. The first ones are kept for good, because only they tell which tensors were
replicas to begin with, and because ranks that never wait for each other are far apart soon; the
others are used again and again.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CHECKSUM = 16
"""Bytes of the checksum that a slot begins with: a torn slot is no slot."""
_HEAD = struct.Struct("<QII")
"""Then come index + 1, version of the layout, number of digests, and the digests."""
_BEFORE = _CHECKSUM + _HEAD.size
KEPT = 65
BYTES = 8 << 20
"""Size that a ring may grow to."""
_FEWEST = 64


@dataclass(frozen=True)
class Slot:
    """What a rank observed at one place of its execution."""

    index: int
    layout: int
    digests: tuple[int, ...]


def slots_for(columns: int) -> int:
    """Return how many slots of so many digests a ring has."""
    return KEPT + max(_FEWEST, BYTES // (_BEFORE + 8 * columns) - KEPT)


class Writer:
    """The ring of this rank."""

    def __init__(self, path: Path, columns: int) -> None:
        """Create the file.

        Raises:
            OSError: it cannot be created.
        """
        self.columns = columns
        self._slots = slots_for(columns)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.pwrite(self._file, struct.pack("<Q", columns), 0)

    def write(self, index: int, layout: int, digests: Sequence[int]) -> bytes:
        """Put what was observed at `index` into its slot, and return what was written."""
        count = len(digests)
        content = struct.pack(f"<QII{count}q", index + 1, layout, count, *digests)
        raw = _checksum(content) + content
        os.pwrite(self._file, raw, _offset(index, self._slots, self.columns))
        return raw

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Reader:
    """The ring of another rank, which may not have been created yet."""

    def __init__(self, path: Path) -> None:
        """Open nothing until something is asked for."""
        self._path = path
        self._file: int | None = None
        self._columns = 0
        self._slots = 0

    def holds(self, index: int, raw: bytes) -> bool | None:
        """Say whether exactly this was written at `index`; None if nothing was, or no longer is.

        It needs no understanding of what was written.
        """
        found = self._raw(index, len(raw))
        if found == raw:
            return True
        # Ranks seldom come at the same time: to most questions this is the answer.
        place = slice(_CHECKSUM, _CHECKSUM + 8)
        return False if found[place] == raw[place] else None

    def read(self, index: int) -> Slot | None:
        """Return what was observed at `index`, or None: not yet, no longer, or half written."""
        raw = self._raw(index)
        if len(raw) < _BEFORE:
            return None
        written, layout, count = _HEAD.unpack_from(raw, _CHECKSUM)
        content = raw[_CHECKSUM : _BEFORE + 8 * count]
        if written != index + 1 or _checksum(content) != raw[:_CHECKSUM]:
            return None
        return Slot(index, layout, struct.unpack_from(f"<{count}q", content, _HEAD.size))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _raw(self, index: int, size: int | None = None) -> bytes:
        if self._file is None and not self._open():
            return b""
        assert self._file is not None
        if size is None:
            size = _BEFORE + 8 * self._columns
        return os.pread(self._file, size, _offset(index, self._slots, self._columns))

    def _open(self) -> bool:
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        raw = os.pread(self._file, 8, 0)
        if len(raw) < 8:
            self.close()
            return False
        (self._columns,) = struct.unpack("<Q", raw)
        self._slots = slots_for(self._columns)
        return True


def _offset(index: int, slots: int, columns: int) -> int:
    place = index if index < KEPT else KEPT + (index - KEPT) % (slots - KEPT)
    return 8 + place * (_BEFORE + 8 * columns)


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM).digest()
