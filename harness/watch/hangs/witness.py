"""A process that outlives the ranks: it gives the answer when none of them has lived to give it.

A rank that is killed says nothing, and torchrun ends the others within a tenth of a second. So the
first rank of a host leaves a child behind, before torch is imported, that sleeps until a rank is
gone. It has no part in the run, and ends with its last rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.watch.meeting.folder import Folder, process_began
from harness.watch.stderr import say

if TYPE_CHECKING:
    from harness.watch.answers.outputs import Outputs

APART = 0.02
"""Seconds between the first death and the next from which on it was not a death of all together."""
_POLL = 0.25
_told: list[int] = []
"""The pipe to the witness of this process."""


def leave_witness() -> None:
    """Leave a witness behind, on the first rank of a host; the caller has no other threads yet."""
    several = int(os.environ.get("WORLD_SIZE", "1") or 1) > 1
    if not several or os.environ.get("LOCAL_RANK") != "0" or not hasattr(os, "pidfd_open"):
        return
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child:
        os.close(reading)
        os.waitpid(child, 0)
        _told.append(writing)
        return
    # A child of a child: nobody's wait() ever sees it.
    try:
        if os.fork() == 0:
            os.close(writing)
            _be_witness(reading, parent)
    finally:
        os._exit(0)


def tell_witness(folder: Folder, members: Sequence[int], world_size: int, outputs: Outputs) -> None:
    """Tell it where the ranks write, and where the answer is to go."""
    while _told:
        about = {
            "root": str(folder.root),
            "members": list(members),
            "world_size": world_size,
            "outputs": vars(outputs),
        }
        writing = _told.pop()
        with contextlib.suppress(OSError):
            os.write(writing, json.dumps(about).encode() + b"\n")
        os.close(writing)


def _be_witness(reading: int, parent: int) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    about = _listen(reading, parent)
    if about is None:
        return
    folder = _folder(about)
    members, world_size = about["members"], about["world_size"]
    seen = _deaths(folder, members)
    if not folder.root.exists():
        return
    killed = [rank for rank in members if rank in seen and not folder.end(rank).exists()]
    begun = (folder.root / "answered.claimed").exists()
    if not (killed or begun) or (folder.root / "said.claimed").exists():
        return
    order = sorted(seen.values())
    together = len(order) > 1 and order[1] - order[0] < APART
    if not begun and together and not _anybody_failed(folder, members):
        # They were ended from outside.
        return
    for rank in killed:
        pid = folder.read(folder.start(rank))["pid"]
        folder.write(folder.gone(rank), {"time": seen[rank], "pid": pid})
    # Not earlier: nobody needs it in a run that ends well.
    from harness.watch.answers.outputs import Outputs, publish
    from harness.watch.hangs.stopping import answer_to_stop

    answer = answer_to_stop(folder, members, world_size)
    say("\n".join([*answer.lines(), *publish(answer, Outputs(**about["outputs"]))]))


def _folder(about: dict[str, Any]) -> Folder:
    from pathlib import Path

    return Folder(Path(about["root"]))


def _anybody_failed(folder: Folder, members: Sequence[int]) -> bool:
    ends = [folder.read(folder.end(rank)) for rank in members]
    return any(end is not None and end["code"] for end in ends)


def _listen(reading: int, parent: int) -> dict[str, Any] | None:
    """Return what the ranks have to say, or None if they ended before they met."""
    try:
        life = os.pidfd_open(parent)
    except OSError:
        return None
    said = b""
    while not said.endswith(b"\n"):
        ready, _, _ = select.select([reading, life], [], [])
        if reading in ready:
            more = os.read(reading, 65536)
            if not more:
                return None
            said += more
        elif life in ready:
            return None
    os.close(reading)
    os.close(life)
    return dict(json.loads(said))


def _deaths(folder: Folder, members: Sequence[int]) -> dict[int, float]:
    """Wait until all ranks of this host are gone; return when each of them went."""
    lives: dict[int, int] = {}
    seen: dict[int, float] = {}
    here = socket.gethostname()
    while len(seen) < len(members):
        for rank in members:
            if rank in lives or rank in seen:
                continue
            about = folder.read(folder.start(rank))
            if about is None:
                continue
            if about["host"] != here or process_began(about["pid"]) != about["began"]:
                seen[rank] = time.time()
                continue
            with contextlib.suppress(OSError):
                lives[rank] = os.pidfd_open(about["pid"])
        if not lives and (seen or not folder.root.exists()):
            # Ranks that never came; the launcher has gone before them.
            break
        waits = None if len(lives) + len(seen) == len(members) else _POLL
        ready, _, _ = select.select(list(lives.values()), [], [], waits)
        now = time.time()
        for rank in [rank for rank, life in lives.items() if life in ready]:
            os.close(lives.pop(rank))
            seen[rank] = now
    return seen
