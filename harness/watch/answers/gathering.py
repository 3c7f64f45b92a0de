"""Reads back what all ranks of a run have written: the evidence for a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence

from harness.watch.divergence import Divergence, begins_equal, rank_local
from harness.watch.evidence import Evidence
from harness.watch.hangs.pairing import first_unpaired, from_json
from harness.watch.journal import read_journal, read_last_call
from harness.watch.meeting.exchange import Exchange
from harness.watch.meeting.folder import Folder


def gather(
    folder: Folder,
    ranks: Sequence[int],
    world_size: int,
    *,
    divergence: Divergence | None = None,
    source: str = "",
) -> Evidence:
    """Return all that is in a folder, as far as it was written by now.

    Args:
        folder: where the ranks of the run meet.
        ranks: the ranks that write there.
        world_size: number of ranks of the run.
        divergence: where replicas part, if they do.
        source: the optimizer or module in which they part.
    """
    journals = {rank: read_journal(folder.journal(rank)) for rank in ranks}
    optimizers = {
        event["optimizer"]
        for events in journals.values()
        for event in events
        if event["kind"] == "optimizer"
    }
    parts = {
        number: sorted(rank_local(Exchange(folder, f"optimizer{number}", ranks).look))
        for number in sorted(optimizers)
    }
    after = {
        event["optimizer"]: event["after"]
        for events in journals.values()
        for event in events
        if event["kind"] == "optimizer" and event.get("after") is not None
    }
    made_equal: dict[int, list[int]] = {}
    for number, first in sorted(after.items()) if divergence is not None else ():
        if begins_equal(Exchange(folder, f"optimizer{number}", ranks).look, ranks):
            made_equal.setdefault(first, []).append(number)
    ends = {rank: folder.read(folder.end(rank)) for rank in ranks}
    stalls = {rank: folder.read(folder.stall(rank)) for rank in ranks}
    gone = {rank: folder.read(folder.gone(rank)) for rank in ranks}
    written = {rank: folder.read(folder.calls(rank)) for rank in ranks}
    calls = {rank: from_json(content) for rank, content in written.items() if content is not None}
    last = {rank: read_last_call(folder.last_call(rank)) for rank in ranks}
    return Evidence(
        world_size=world_size,
        ranks=tuple(rank for rank, events in journals.items() if events),
        journals={rank: events for rank, events in journals.items() if events},
        divergence=divergence,
        source=source,
        parts={number: names for number, names in parts.items() if names},
        made_equal=made_equal,
        ends={rank: end for rank, end in ends.items() if end is not None},
        stalls={rank: stall for rank, stall in stalls.items() if stall is not None},
        gone={rank: when for rank, when in gone.items() if when is not None},
        calls=calls,
        last_calls={rank: call for rank, call in last.items() if call is not None},
        unpaired=first_unpaired(calls),
    )
