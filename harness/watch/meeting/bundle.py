"""What the ranks of one place wrote, as one piece that another place can lay beside its own files.

Small enough for the store of the run: files are cut in the middle, and of the digests those remain
on which the answer rests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.watch.divergence import from_json
from harness.watch.layout import GRADIENTS, Layout, index_of, place_of
from harness.watch.meeting.crossing import pack, unpack
from harness.watch.meeting.exchange import Exchange
from harness.watch.meeting.folder import Folder
from harness.watch.meeting.ring import Writer

LARGEST = 256 << 10
"""Bytes of a file that are taken along."""
LAST = 64
"""Indices at the end of each optimizer, which may not have been compared yet."""
BEFORE, AFTER = 4, 20
"""Indices around a difference."""


def bundle(folder: Folder, ranks: Sequence[int], streams: dict[str, int]) -> bytes:
    """Return what the ranks of this place wrote.

    Args:
        folder: the folder of this place.
        ranks: its ranks.
        streams: optimizer -> the index that was written last.
    """
    files = {
        path.name: _cut(path.read_bytes()).decode("utf-8", "replace")
        for rank in ranks
        for path in _files(folder, rank)
        if path.exists()
    }
    found = [
        from_json(content["found"])
        for path in (folder.found_across, *map(folder.finding, ranks))
        if (content := folder.read(path)) is not None
    ]
    places = {int(one.order) for one in found}
    packed = {}
    for stream, last in streams.items():
        wanted = {0, index_of(0, GRADIENTS), *range(max(0, last - LAST), last + 1)}
        for place in places:
            wanted |= set(range(max(0, place - BEFORE), min(last, place + AFTER) + 1))
        exchange = Exchange(folder, stream, ranks)
        packed[stream] = pack(exchange, sorted(wanted)).decode()
    return json.dumps({"files": files, "streams": packed}).encode()


def lay_out(folder: Folder, bundles: Iterable[bytes]) -> None:
    """Write what other places have sent as if their ranks had written it into this folder.

    Raises:
        OSError: the folder cannot be written.
    """
    streams: dict[str, list[bytes]] = {}
    for content in map(json.loads, bundles):
        for name, text in content["files"].items():
            # Whatever the name says, it is that of a file of this folder.
            (folder.root / Path(name).name).write_text(text, encoding="utf-8")
        for stream, packed in content["streams"].items():
            streams.setdefault(Path(stream).name, []).append(packed.encode())
    for stream, parcels in streams.items():
        _write_rings(folder, stream, parcels)


def _write_rings(folder: Folder, stream: str, parcels: list[bytes]) -> None:
    seen = unpack(parcels)
    for rank in sorted({rank for ranks in seen.values() for rank in ranks}):
        mine = {index: ranks[rank] for index, ranks in seen.items() if rank in ranks}
        writer = Writer(folder.ring(stream, rank), max(len(d) for _, d in mine.values()))
        # A layout for each index: what the columns of other phases meant is not needed again.
        for version, (index, (entries, digests)) in enumerate(sorted(mine.items())):
            layout = Layout({place_of(index)[1]: entries})
            folder.write(folder.layout(stream, rank, version), layout.to_json())
            writer.write(index, version, digests)
        writer.close()


def _files(folder: Folder, rank: int) -> tuple[Path, ...]:
    return (
        folder.start(rank),
        folder.end(rank),
        folder.finding(rank),
        folder.journal(rank),
        folder.calls(rank),
        folder.last_call(rank),
        folder.stall(rank),
        folder.gone(rank),
    )


def _cut(content: bytes) -> bytes:
    """Leave out whole lines in the middle, if there are too many."""
    if len(content) <= LARGEST:
        return content
    half = LARGEST // 2
    head = content[:half].rpartition(b"\n")[0]
    return head + b"\n" + content[-half:].partition(b"\n")[2]
