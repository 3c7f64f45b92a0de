"""Which rank this process is, which others there are, and the folder where all of them write."""

from __future__ import annotations

import os
import secrets
import socket
import time

import torch

from harness.watch.meeting.folder import Folder, meeting_place, process_began
from harness.watch.meeting.hosts import ranks_here


class Presence:
    """This rank among the others, and what is to be said about it in the answer."""

    def __init__(self, chosen: str | None) -> None:
        """Know nothing yet but the folder that was typed, if any."""
        self.chosen = chosen
        self.folder: Folder | None = None
        self.rank = 0
        self.world_size = 1
        self.peers: list[int] = [0]
        """The ranks that write to the same folder, this one among them."""
        self.told: tuple[int, ...] | None = None
        """The ranks of this host, as the launcher tells it."""
        self.notes: list[str] = []
        self.evaluates = False
        """Whether a module was evaluated on this rank, and compared with the others' then."""

    def note(self, text: str) -> None:
        """Keep a sentence on what could not be observed."""
        if text not in self.notes:
            self.notes.append(text)

    def meet(self) -> bool:
        """Find out which rank this is, and where the others write; False if that is known."""
        if self.folder is not None:
            return False
        initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if initialised:
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.rank, self.world_size = rank, world_size
        alone = not initialised and "RANK" not in os.environ
        # Whoever has nobody to meet takes no place where an earlier run of the same shell has been.
        token = self._token() if initialised else _myself() if alone else None
        self.folder = meeting_place(self.chosen, token)
        self.told = ranks_here(os.environ, rank, world_size)
        self.peers = list(range(world_size) if self.chosen or self.told is None else self.told)
        about = {
            "pid": os.getpid(),
            "began": process_began(os.getpid()),
            "host": socket.gethostname(),
            "world_size": world_size,
        }
        self.folder.write(self.folder.start(rank), about)
        return True

    @property
    def may_be_apart(self) -> bool:
        """Whether some ranks may be elsewhere, so that they have to be asked."""
        # The ranks of one torchrun have one parent, and its temp directory.
        if self.told != tuple(range(self.world_size)):
            return True
        return self.world_size > 1 and "TORCHELASTIC_RUN_ID" not in os.environ

    def wait_for_peers(self, seconds: float) -> None:
        """Wait until the other ranks of this host have gone, at most so long.

        torchrun ends all ranks as soon as one exits with anything but 0, and a rank may still
        have to finish what it does at exit.
        """
        if self.folder is None:
            return
        deadline = time.monotonic() + seconds
        for peer in self.peers:
            about = self.folder.read(self.folder.start(peer))
            if peer == self.rank or not about or about["host"] != socket.gethostname():
                continue
            alive = about["began"]
            while alive and process_began(about["pid"]) == alive and time.monotonic() < deadline:
                time.sleep(0.02)

    def _token(self) -> str | None:
        """Agree on a word with the other ranks, without waiting for them.

        torchrun is the parent of one run only, so its ranks have no need of it for the folder
        that is theirs. Whoever starts ranks with mp.spawn may do so again.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ and self.chosen is None:
            return None
        default_store = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
        if default_store is None:
            return None
        # The first rank to ask sets it, the others get what is set.
        agreed = default_store().compare_set("crossrank/watch", "", secrets.token_hex(8))
        return str(agreed.decode())


def _myself() -> str:
    """Return a word that no other process has, nor has had."""
    return f"process {os.getpid()} {process_began(os.getpid())}"
