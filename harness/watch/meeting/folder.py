"""The folder where the ranks of one run meet: it owns every path, and finds it without a message.

Files and no messages: a rank never waits for another one here, so nothing can dead-lock, and what
a rank wrote is still there after it was killed.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SAME_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True)
class Folder:
    """Paths of a watched run, and the two ways of writing there."""

    root: Path

    def ring(self, stream: str, rank: int) -> Path:
        """Digests of one optimizer on one rank."""
        return self.root / f"{stream}.rank{rank}.ring"

    def layout(self, stream: str, rank: int, version: int) -> Path:
        """What the columns of a ring mean."""
        return self.root / f"{stream}.rank{rank}.layout{version}.json"

    def start(self, rank: int) -> Path:
        """Written when a rank begins: process id and host."""
        return self.root / f"rank{rank}.start.json"

    def end(self, rank: int) -> Path:
        """Written when a rank's script is over."""
        return self.root / f"rank{rank}.end.json"

    def finding(self, rank: int) -> Path:
        """The first divergence that this rank was the one to see."""
        return self.root / f"rank{rank}.finding.json"

    def journal(self, rank: int) -> Path:
        """What a rank did, an event a line."""
        return self.root / f"rank{rank}.journal.jsonl"

    def stall(self, rank: int) -> Path:
        """What a rank was doing when the run hung."""
        return self.root / f"rank{rank}.stall.json"

    def calls(self, rank: int) -> Path:
        """The last collectives of a rank, when it ended or the run hung."""
        return self.root / f"rank{rank}.calls.json"

    def last_call(self, rank: int) -> Path:
        """The collective that a rank was about to call."""
        return self.root / f"rank{rank}.last_call"

    def gone(self, rank: int) -> Path:
        """Written by another process, when a rank's process is gone without having ended."""
        return self.root / f"rank{rank}.gone.json"

    def audit(self, optimizer: int, update: int, rank: int) -> Path:
        """What a rank contributes to the audit of an update."""
        return self.root / f"audit.optimizer{optimizer}.update{update}.rank{rank}.pt"

    def about_a_stop(self, rank: int) -> tuple[Path, ...]:
        """Return what tells why a rank does not go on, as far as it is there."""
        return self.stall(rank), self.calls(rank), self.end(rank), self.gone(rank)

    @property
    def alarm(self) -> Path:
        """There for as long as a rank waits for more than it should have to."""
        return self.root / "alarm.claimed"

    @property
    def stopped(self) -> Path:
        """There once the answer was given, and the ranks are to be ended."""
        return self.root / "stopped.claimed"

    @property
    def stopped_elsewhere(self) -> Path:
        """There if that was at another place."""
        return self.root / "stopped-elsewhere.claimed"

    @property
    def stopped_everywhere(self) -> Path:
        """There once the other places have been told of it."""
        return self.root / "stopped-everywhere.claimed"

    @property
    def place(self) -> Path:
        """A word that tells this folder from that of another host."""
        return self.root / "place.json"

    @property
    def across(self) -> Path:
        """How far this place has come in comparing itself with others."""
        return self.root / "across.json"

    @property
    def found_across(self) -> Path:
        """The first divergence between places."""
        return self.root / "across.finding.json"

    def claim(self, what: str) -> bool:
        """Return True for the first rank that asks, and False for all others.

        False as well where the folder is gone: whoever has removed it was the first.
        """
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.close(os.open(self.root / f"{what}.claimed", os.O_CREAT | os.O_EXCL))
            return True
        return False

    def write(self, path: Path, content: Any) -> None:
        """Write JSON so that a reader sees all of it or nothing."""
        draft = path.with_suffix(f".{os.getpid()}.draft")
        draft.write_text(json.dumps(content), encoding="utf-8")
        draft.replace(path)

    def read(self, path: Path) -> Any:
        """Return the JSON of a file, or None if there is none."""
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None


def meeting_place(chosen: str | None, token: str | None = None) -> Folder:
    """Return the folder of this run, which every rank of this host computes alike.

    Args:
        chosen: the folder that was typed, if any.
        token: what the ranks have agreed on, if they could; else their common parent serves.

    Raises:
        OSError: the folder cannot be made.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if chosen:
        # The same folder may be given to the next run.
        root = Path(chosen).absolute() / f"attempt{attempt}-{token or 'run'}"
    else:
        known = [os.environ.get(name, "") for name in _SAME_RUN] + [token or _parent()]
        key = hashlib.sha256("\0".join(known).encode()).hexdigest()[:16]
        root = Path(tempfile.gettempdir()) / f"crossrank-{_user()}" / f"watch-{key}"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Folder(root)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _parent() -> str:
    """Identify the process that started the ranks; its number alone will be used again."""
    parent = os.getppid()
    return f"{parent} {process_began(parent)}"


def process_began(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks, or None if that cannot be told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in brackets may hold spaces and brackets itself.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]
