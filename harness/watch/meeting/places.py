"""Places: ranks that read each other's files are at one place, whatever their host is called.

Two containers of one host have temp directories of their own, and two hosts may share a folder. So
the ranks do not compare host names; each one tells the word that it found in its folder.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from harness.watch.meeting.folder import Folder


@dataclass(frozen=True)
class Places:
    """All ranks of the run, by place."""

    ranks: dict[str, tuple[int, ...]]
    """Word of the folder -> ranks that share it."""
    hosts: dict[int, str]
    """Rank -> name of its host."""

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks at the place of a rank."""
        return next(ranks for ranks in self.ranks.values() if rank in ranks)

    def apart(self) -> list[tuple[int, ...]]:
        """Return the groups of ranks that share a host, but no folder: one tuple for each place."""
        by_host: dict[str, list[tuple[int, ...]]] = {}
        for ranks in self.ranks.values():
            by_host.setdefault(self.hosts[ranks[0]], []).append(ranks)
        return sorted(one for places in by_host.values() if len(places) > 1 for one in places)


def word_of(folder: Folder) -> str | None:
    """Return the word in a folder, which its first rank writes; None until it has.

    Raises:
        OSError: the folder cannot be written.
    """
    if folder.claim("place"):
        folder.write(folder.place, secrets.token_hex(8))
    word = folder.read(folder.place)
    return None if word is None else str(word)


def line_of(rank: int, word: str, host: str) -> str:
    """Return what a rank tells the others about itself."""
    return f"{rank} {word} {host}"


def read_places(lines: Sequence[str], world_size: int) -> Places | None:
    """Read what the ranks have told; None until all of them have."""
    told: dict[int, tuple[str, str]] = {}
    for line in lines:
        rank, word, host = line.split(" ", 2)
        told[int(rank)] = (word, host)
    if sorted(told) != list(range(world_size)):
        return None
    ranks: dict[str, list[int]] = {}
    for number, (word, _) in sorted(told.items()):
        ranks.setdefault(word, []).append(number)
    shared = {word: tuple(of) for word, of in ranks.items()}
    return Places(shared, {number: host for number, (_, host) in told.items()})
