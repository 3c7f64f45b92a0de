"""The store of the run as a board: put up, read, swap; no call here ever waits for another rank.

`get` and `wait` would wait for what nobody may ever write, and are not used. A store whose host
does not answer any more blocks whoever asks it, so only the thread of the bridge has a board.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

_ABSENT = "?"
"""Not a value of ours: a store returns what was expected where there is nothing."""
PATIENCE = timedelta(seconds=5)
"""For the connection of the clone, which has a socket of its own."""


def _connected(clone: Callable[[], Any]) -> Any:
    """Connect, and once more if it fails: now and then a connection is never answered."""
    try:
        return clone()
    except RuntimeError:
        return clone()


class Board:
    """Keys of ours in the store of the run."""

    def __init__(self, store: Store, name: str) -> None:
        """Connect; calls on it do not queue behind those of the program.

        Raises:
            RuntimeError: this kind of store cannot be cloned, or does not answer.
        """
        self._prefix = f"crossrank/watch/{name}/"
        clone = getattr(store, "clone", None)
        # Before torch 2.7 there is none: then our calls take turns with those of the program.
        self._store: Any = store if clone is None else _connected(clone)
        if clone is not None:
            self._store.set_timeout(PATIENCE)

    def read(self, key: str) -> str | None:
        """Return a value, or None if there is none: a swap that changes nothing, and no `get`."""
        value = self._store.compare_set(self._prefix + key, _ABSENT, _ABSENT)
        text = bytes(value).decode("latin-1")
        return None if text == _ABSENT else text

    def swap(self, key: str, expected: str, value: str) -> str:
        """Put up a value in place of the expected one (empty: of none); return what is there."""
        return bytes(self._store.compare_set(self._prefix + key, expected, value)).decode("latin-1")

    def put(self, key: str, value: str) -> None:
        """Put up a value."""
        self._store.set(self._prefix + key, value)

    def add_line(self, key: str, line: str) -> None:
        """Add a line to a value."""
        self._store.append(self._prefix + key, line + "\n")

    def count(self, key: str) -> int:
        """Count one more, and return how many it makes."""
        return int(self._store.add(self._prefix + key, 1))

    def put_large(self, key: str, content: bytes) -> None:
        """Put up something large."""
        # bytes pass through unchanged, str would be encoded.
        self._store.set(self._prefix + key, zlib.compress(content, 1))

    def read_large(self, key: str) -> bytes | None:
        """Return what was put up there, or None."""
        value = bytes(self._store.compare_set(self._prefix + key, _ABSENT, _ABSENT))
        return None if value == _ABSENT.encode() else zlib.decompress(value)

    def remove(self, key: str) -> None:
        """Remove a value, if it is there."""
        self._store.delete_key(self._prefix + key)
