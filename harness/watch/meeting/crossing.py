"""One optimizer compared between places: a digest for each place, the tensors only on a difference.

For each update a place puts up one digest of all that is due to be equal. The first one to come
stays on the board, and every other place finds it there in place of its own, so one swap compares.
A place that finds another digest than its own raises a flag. On a flag every place uploads what its
ranks wrote there, and the last one to upload says what differs, or that nothing is due to be equal.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.watch.divergence import (
    Divergence,
    Seen,
    divergence,
    from_json,
    not_alike,
    rank_local,
    to_json,
)
from harness.watch.layout import GRADIENTS, PARAMETERS, Entry, index_of, place_of, read_entries
from harness.watch.meeting.board import Board
from harness.watch.meeting.exchange import Exchange

KEYS = 16
"""Digests of an optimizer that are on the board at a time; they take each other's places."""
_AGAIN = 4
_VERDICTS = 6
"""Flags of an optimizer that are followed; more come only where replicas differ on purpose."""
_STARTS = (0, index_of(0, GRADIENTS))


@dataclass
class Progress:
    """How far one optimizer has been compared; another rank of the place may go on from here."""

    due: int = 0
    """The first index that was not compared yet."""
    verdicts: int = 0
    uploaded: bool = False
    left_out: list[str] = field(default_factory=list)
    """Names of tensors that are no replicas."""
    over: bool = False
    apart: bool = False
    """Whether digests of the places are not made alike, so that they cannot be compared."""
    skipped: int = 0
    """Indices that came too late to be compared."""


class Crossing:
    """One optimizer, of the ranks of this place, on a board that all places share."""

    def __init__(
        self,
        board: Board,
        exchange: Exchange,
        stream: str,
        ranks: Sequence[int],
        places: Sequence[str],
        place: str,
        progress: Progress,
    ) -> None:
        """Go on from some progress; `places` are all of them, `place` is this one."""
        self.found: Divergence | None = None
        self.progress = progress
        self._board = board
        self._exchange = exchange
        self._stream = stream
        self._ranks = set(ranks)
        self._places = places
        self._place = place
        self._last: dict[str, str] = {}
        self._columns: dict[tuple[Any, ...], list[tuple[str, bytes, list[int]]]] = {}

    def catch_up(self, last: int) -> None:
        """Compare what all ranks of this place have written by now, up to `last`."""
        now = self.progress
        while now.due <= last and not now.over:
            seen = self._exchange.look(now.due)
            if set(seen) != self._ranks:
                # Not written yet; or written over, as nobody is so far behind.
                if last - now.due < KEYS:
                    break
                now.skipped += 1
            else:
                self._compare(now.due, seen)
            now.due += 1

    def look_out(self) -> None:
        """Take part in what another place, or this one, has raised a flag for."""
        now, name = self.progress, f"{self._stream}/{self.progress.verdicts}"
        flag = None if now.over else self._board.read(f"{name}/flag")
        if flag is None:
            return
        index = int(flag)
        if not now.uploaded and now.due > index:
            now.uploaded = True
            self._board.put_large(f"{name}/of/{self._place}", pack(self._exchange, near(index)))
            if self._board.count(f"{name}/uploads") == len(self._places):
                self._board.put(f"{name}/verdict", json.dumps(self._judge(name, index)))
        verdict = self._board.read(f"{name}/verdict")
        if verdict is not None:
            self._accept(json.loads(verdict))

    def _accept(self, verdict: dict[str, Any]) -> None:
        now = self.progress
        now.verdicts, now.uploaded = now.verdicts + 1, False
        now.left_out = sorted({*now.left_out, *verdict["local"]})
        if verdict["found"] is not None:
            self.found = from_json(verdict["found"])
        now.apart = verdict["apart"]
        now.over = now.apart or self.found is not None or now.verdicts == _VERDICTS

    def _judge(self, name: str, index: int) -> dict[str, Any]:
        parcels = [self._board.read_large(f"{name}/of/{place}") for place in self._places]
        slots = unpack([parcel for parcel in parcels if parcel is not None])
        for place in self._places:
            self._board.remove(f"{name}/of/{place}")

        def look(at: int) -> Seen:
            return slots.get(at, {})

        found = next(filter(None, (divergence(look, at) for at in sorted({*_STARTS, index}))), None)
        return {
            "found": None if found is None else to_json(found),
            "local": sorted(rank_local(look)),
            "apart": bool(not_alike(look(0))),
        }

    def _compare(self, index: int, seen: Seen) -> None:
        for cohort, digest in self._digests(place_of(index)[1], seen).items():
            key = f"{self._stream}/{cohort}/{index % KEYS}"
            mine = f"{index} {self.progress.verdicts} {digest}"
            there = self._put_up(key, index, mine)
            if there != mine and there.split()[:2] == mine.split()[:2]:
                # What differs to begin with is judged with the gradients of the first update.
                flag = str(max(index, _STARTS[-1]))
                name = f"{self._stream}/{self.progress.verdicts}/flag"
                self._board.swap(name, "", flag)
            elif int(there.split()[0]) > index:
                self.progress.skipped += 1

    def _put_up(self, key: str, index: int, mine: str) -> str:
        """Put up a digest unless there is one for this index; return the one that is there."""
        expected = self._last.get(key, "")
        if expected and int(expected.split()[0]) > index:
            # The others are ahead: a later digest must not make way for an earlier one.
            expected = ""
        for _ in range(_AGAIN):
            there = self._board.swap(key, expected, mine)
            if there == expected:
                # That is also said where there is nothing.
                expected = ""
            elif there == mine or int(there.split()[0]) >= index:
                self._last[key] = there
                return there
            else:
                expected = there
        return mine

    def _digests(self, phase: str, seen: Seen) -> dict[str, str]:
        """Return cohort -> one digest of all that its ranks at this place hold."""
        of_ranks: dict[str, set[bytes]] = defaultdict(set)
        for entries, digests in seen.values():
            for cohort, meaning, columns in self._due(phase, entries):
                packed = struct.pack(f"<{len(columns)}q", *(digests[c] for c in columns))
                of_ranks[cohort].add(hashlib.blake2b(meaning + packed, digest_size=16).digest())
        return {
            cohort: hashlib.blake2b(b"".join(sorted(found)), digest_size=12).hexdigest()
            for cohort, found in of_ranks.items()
        }

    def _due(self, phase: str, entries: tuple[Entry, ...]) -> list[tuple[str, bytes, list[int]]]:
        """Return cohort, what its columns mean, and the columns that are due to be equal."""
        key = (id(entries), self.progress.verdicts)
        if key not in self._columns:
            columns: dict[str, list[int]] = defaultdict(list)
            for column, entry in enumerate(entries):
                # Some optimizers do the reduction themselves: gradients may differ.
                if entry.kind != "gradient" and entry.name not in self.progress.left_out:
                    columns[entry.cohort].append(column)
            self._columns[key] = [
                (
                    hashlib.blake2b(cohort.encode(), digest_size=6).hexdigest(),
                    repr([_meaning(entries[c]) for c in of]).encode(),
                    of,
                )
                for cohort, of in columns.items()
            ]
        return self._columns[key]


def _meaning(entry: Entry) -> tuple[Any, ...]:
    return entry.kind, entry.name, entry.shape, entry.dtype


def near(index: int) -> list[int]:
    """Return the indices that a verdict on one of them needs."""
    step, phase = place_of(index)
    before = [index_of(step, GRADIENTS)] if phase == PARAMETERS else []
    return sorted({*_STARTS, *before, index})


def pack(exchange: Exchange, indices: Sequence[int]) -> bytes:
    """Return what the ranks of a place wrote at some indices, with its meaning."""
    layouts: list[tuple[Entry, ...]] = []
    slots = []
    for index in indices:
        alike: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        for rank, (entries, digests) in exchange.look(index).items():
            if entries not in layouts:
                layouts.append(entries)
            alike[layouts.index(entries), digests].append(rank)
        slots += [[index, ranks, layout, digests] for (layout, digests), ranks in alike.items()]
    content = {"layouts": [[asdict(e) for e in entries] for entries in layouts], "slots": slots}
    return json.dumps(content).encode()


def unpack(parcels: Sequence[bytes]) -> Mapping[int, Seen]:
    """Return index -> what all ranks wrote there, from what places have packed."""
    seen: dict[int, dict[int, tuple[tuple[Entry, ...], tuple[int, ...]]]] = defaultdict(dict)
    for parcel in parcels:
        content = json.loads(parcel)
        layouts = [read_entries(rows) for rows in content["layouts"]]
        for index, ranks, layout, digests in content["slots"]:
            seen[index] |= dict.fromkeys(ranks, (layouts[layout], tuple(digests)))
    return {index: dict(sorted(ranks.items())) for index, ranks in seen.items()}
