"""Where the ranks of a run are, as its watcher needs it: its peers, and what to say about the rest.

The launcher's word is taken at first, so that nobody waits; what the ranks tell each other over the
store comes a little later and is what counts.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence

import torch

from harness.watch.divergence import Divergence
from harness.watch.meeting.bridge import Bridge
from harness.watch.meeting.presence import Presence


class Whereabouts:
    """Of the ranks of one presence."""

    def __init__(
        self,
        presence: Presence,
        on_peers: Callable[[Sequence[int]], None],
        on_found: Callable[[Divergence, str], None],
    ) -> None:
        """Begin to ask.

        Args:
            presence: this rank among the others; it has a folder by now.
            on_peers: called with the ranks that share the folder, if they are not those it knew.
            on_found: called with what differs between this place and others, and with its source.
        """
        self._presence = presence
        self._on_peers = on_peers
        self._settled = False
        self._handed_over = False
        self._remarks: list[str] = []
        self._failed: str | None = None
        self._bridge: Bridge | None = None
        default_store = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
        assert presence.folder is not None
        if default_store is None or not torch.distributed.is_initialized():
            self._failed = "the process group had no store"
            return
        self._bridge = Bridge(
            default_store(),
            presence.folder,
            # Several watchers of one process meet in folders of their own.
            name=hashlib.sha256((presence.chosen or "").encode()).hexdigest()[:8],
            rank=presence.rank,
            world_size=presence.world_size,
            host=socket.gethostname(),
            on_found=on_found,
        )

    @property
    def why_not(self) -> str | None:
        """Why ranks of other places could not be asked, or None."""
        return self._failed or (None if self._bridge is None else self._bridge.failed)

    def posted(self, stream: str, index: int, source: str) -> None:
        """Say that this rank has written; its peers may be known better by now."""
        self._settle()
        if self._bridge is not None:
            self._bridge.offer(stream, index, source)

    def close(self) -> None:
        """Stop comparing with other places, and settle who writes to this one."""
        if self._bridge is not None:
            self._bridge.close()
        self._settle(at_end=True)

    def hand_over(self, *, failed: bool) -> bool:
        """Say whether this place has to answer; if for all ranks, what they wrote is here now.

        Args:
            failed: the script has failed on this rank.
        """
        presence = self._presence
        assert presence.folder is not None
        given = None if self._bridge is None else self._bridge.hand_over(alone=failed)
        if given:
            folder = presence.folder
            here = [r for r in range(presence.world_size) if folder.read(folder.start(r))]
            presence.peers = sorted({*here, *presence.peers})
        self._handed_over = given is False
        if given is None:
            alone = len(presence.peers) == 1
            presence.note(
                f"{_named(presence.peers)} of {presence.world_size} {'was' if alone else 'were'} "
                f"compared with {'no other' if alone else 'each other only'}, and causes were "
                f"judged from this host ({self.why_not or 'others are not known'}); type --folder "
                "with a folder that all hosts share to compare all"
            )
        over_store = "; compared over the store of the run, after each update" if given else ""
        for remark in self._remarks:
            presence.note(remark + over_store)
        if given and self._bridge is not None and not self._bridge.is_alone:
            if presence.evaluates:
                presence.note("buffers at evaluations were compared among ranks of each host only")
            for limit in self._bridge.limits():
                presence.note(limit)
        return given is not False

    def tell(self, code: int) -> None:
        """Tell the other places with which exit code the answer ends."""
        if self._bridge is not None:
            self._bridge.tell(code)

    def answered(self) -> int:
        """Return the exit code of the answer, if another host gives it, else 0."""
        if self._bridge is None or not (self._handed_over or self._bridge.spans_hosts):
            return 0
        return self._bridge.answered() or 0

    def serve(self) -> None:
        """Where this process serves the store of the run: let the others end first."""
        if self._bridge is not None and self._bridge.serves:
            self._bridge.answered()

    def _settle(self, *, at_end: bool = False) -> None:
        presence, bridge = self._presence, self._bridge
        places = None if bridge is None else bridge.places
        if self._settled or (places is None and not at_end and self.why_not is None):
            return
        self._settled = True
        folder = presence.folder
        assert folder is not None
        if places is not None:
            peers = places.of(presence.rank)
        elif presence.told is not None:
            peers = tuple(presence.told)
        else:
            peers = tuple(r for r in range(presence.world_size) if folder.start(r).exists())
        if list(peers) != presence.peers:
            self._on_peers(peers)
        if places is None or len(places.ranks) == 1:
            return
        if presence.chosen is not None:
            self._remarks.append(f"--folder {presence.chosen} is not one folder for all ranks")
        apart = places.apart()
        if apart:
            groups = " | ".join(", ".join(map(str, group)) for group in apart)
            self._remarks.append(
                f"ranks of one host have temp directories of their own, as in containers: {groups}"
            )


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
