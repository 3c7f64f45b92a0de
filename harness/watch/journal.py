"""What a rank did, an event a line: written at once, so that it outlives the process, and bounded.

The digests say that replicas differ; the journal says what the program did around that time.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from pathlib import Path
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
"""`kind` and `step` (updates made so far by all optimizers of the rank), then what the kind has."""

FIRST = 512
"""Events of each kind that are written as they happen."""
LAST = 64
"""Later events of each kind: so many are kept, and written when the run ends or diverges."""


class Journal:
    """The events of this rank."""

    def __init__(self) -> None:
        """Keep events in memory until there is a file."""
        self.step = 0
        self._file: int | None = None
        self._waiting: list[Event] = []
        self._written: Counter[str] = Counter()
        self._later: dict[str, deque[Event]] = {}

    def open(self, path: Path) -> None:
        """Write to a file from now on, first of all what has happened already.

        Raises:
            OSError: the file cannot be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self._append(event)

    def write(self, kind: str, **fields: Any) -> None:
        """Note an event; what it holds must be JSON."""
        event = {"kind": kind, "step": self.step, **fields}
        if self._written[kind] >= FIRST:
            self._later.setdefault(kind, deque(maxlen=LAST)).append(event)
            return
        self._written[kind] += 1
        if self._file is None:
            self._waiting.append(event)
        else:
            self._append(event)

    def flush(self) -> None:
        """Write the last events that were held back."""
        if self._file is None:
            return
        later, self._later = self._later, {}
        for events in later.values():
            for event in events:
                self._append(event)

    def _append(self, event: Event) -> None:
        assert self._file is not None
        os.write(self._file, (json.dumps(event) + "\n").encode())


def read_journal(path: Path) -> tuple[Event, ...]:
    """Return the events of a rank; a torn last line is no event, a missing file has none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return tuple(events)


def read_last_call(path: Path) -> dict[str, Any] | None:
    """Return what a rank was about to call when it last wrote, or None."""
    try:
        page = path.read_bytes()
        content = json.loads(page.partition(b"\n")[0])
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    if content["operation"] == "backward" and len(page) >= 8:
        # The same backward pass is written once; how many updates came before it, each time.
        content["updates"] = int.from_bytes(page[-8:], "little")
    return content
