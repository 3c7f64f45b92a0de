"""Reads back what all ranks of a run have written: the evidence for a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence

from harness.watch.divergence import Divergence, rank_local
from harness.watch.evidence import Evidence
from harness.watch.exchange import Exchange
from harness.watch.folder import Folder
from harness.watch.journal import read_journal


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
    ends = {rank: folder.read(folder.end(rank)) for rank in ranks}
    stalls = {rank: folder.read(folder.stall(rank)) for rank in ranks}
    return Evidence(
        world_size=world_size,
        ranks=tuple(rank for rank, events in journals.items() if events),
        journals={rank: events for rank, events in journals.items() if events},
        divergence=divergence,
        source=source,
        parts={number: names for number, names in parts.items() if names},
        ends={rank: end for rank, end in ends.items() if end is not None},
        stalls={rank: stall for rank, stall in stalls.items() if stall is not None},
    )
