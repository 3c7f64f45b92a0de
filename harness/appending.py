"""A file that grows by whole records: what a full disk cut off is taken back."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from harness.errors import RecordError


class Appending:
    """A new file that is only appended to, each time wholly or not at all."""

    def __init__(self, path: Path) -> None:
        """Create the file and the directories above it.

        Raises:
            RecordError: if that cannot be done, or the file is there already.
        """
        self.size = 0
        """Bytes appended so far."""
        self._path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, flags, 0o644)
        except OSError as error:
            raise RecordError(f"cannot open {path}: {error.strerror}") from error

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            RecordError: if the disk is full or gone; the file then ends as before the call.
        """
        if self._file < 0:
            raise RecordError(f"cannot append to {self._path}: it is closed")
        try:
            written = os.write(self._file, data)
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            self._undo()
            raise RecordError(f"cannot append to {self._path}: {error.strerror}") from error
        except BaseException:
            self._undo()
            raise
        self.size += len(data)

    def _undo(self) -> None:
        try:
            os.ftruncate(self._file, self.size)
        except OSError:
            # A torn line is readable only as the last one, so nothing may follow it.
            self.close()

    def close(self) -> None:
        """Close the file; any later append raises."""
        if self._file >= 0:
            file, self._file = self._file, -1
            with contextlib.suppress(OSError):
                os.close(file)
