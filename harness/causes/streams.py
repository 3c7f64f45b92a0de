"""Streams of samples that are not divided: by rank, or by the workers of a loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.causes.across import averages
from harness.causes.cause import Diagnosis, Strength, cause
from harness.watch.evidence import Evidence
from harness.watch.journal import Event

_FEWEST = 24
"""Samples of a rank from which on what they have in common is no chance."""
_SHARE = 0.25
"""Of the samples of a rank that were looked at, those that make a stream another one's."""


def _first_passes(evidence: Evidence) -> dict[int, Event]:
    """Return rank -> its first pass over a stream that it trains on, if all have one."""
    found = {}
    for rank in evidence.ranks:
        events = evidence.events("pass", rank)
        streams = [e for e in events if e["updates"] and e["style"] == "iterable"]
        if not streams:
            return {}
        found[rank] = streams[0]
    return found


def _looks(evidence: Evidence, first: Mapping[int, Event]) -> dict[int, dict[int, list[int]]]:
    """Return rank -> update -> the samples that were looked at, within its first pass."""
    end = min((event["step"] for event in first.values()), default=0)
    return {
        rank: {
            event["update"]: list(event["rows"])
            for event in evidence.events("inputs", rank)
            if began["began"] <= event["update"] < end
            if event.get("rows") and averages(event, evidence)
        }
        for rank, began in first.items()
    }


def common_stream(evidence: Evidence) -> Diagnosis | None:
    """Recognise ranks whose streams hold the same samples, each in an order of its own."""
    first = _first_passes(evidence)
    rows = {rank: _distinct(looks.values()) for rank, looks in _looks(evidence, first).items()}
    if len(rows) < 2 or any(own is None for own in rows.values()):
        return None
    seen = {rank: own for rank, own in rows.items() if own is not None}
    shares = [
        len(one & other) / min(len(one), len(other))
        for rank, one in seen.items()
        for peer, other in seen.items()
        if rank < peer
    ]
    if min(shares) < _SHARE:
        return None
    event = first[evidence.ranks[0]]
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(
            f"of the samples that were looked at in the first pass, {min(shares):.0%} and more are "
            f"the same on any two ranks: the stream of {event['class']} is not divided by rank",
        ),
        where=event["at"],
        explains=False,
    )


def _distinct(looks: Iterable[Sequence[int]]) -> set[int] | None:
    """Return the samples of a rank, None where they are few or like each other anyway."""
    rows = [row for look in looks for row in look]
    distinct = set(rows)
    return distinct if len(distinct) >= max(_FEWEST, 0.9 * len(rows)) else None


@cause(
    family="data",
    sees="An epoch of a stream is as many times as long as there are workers; nothing fails.",
    why="Each worker of a DataLoader has the whole IterableDataset, and yields all of it. "
    "Dividing by rank does not divide by worker.",
    confirm="Count the samples of an epoch with num_workers=0 and with 2.",
    change="divide the stream by get_worker_info() as well",
    fix="""
info = get_worker_info()
workers, worker = (info.num_workers, info.id) if info else (1, 0)
mine = shards[rank * workers + worker :: world_size * workers]
""",
)
def stream_repeated_by_workers(evidence: Evidence) -> Diagnosis | None:
    """Recognise batches that come as often as there are workers, one right after the other."""
    first = _first_passes(evidence)
    for rank, looks in _looks(evidence, first).items():
        if not _in_rounds(looks, int(first[rank]["workers"])):
            return None
    if not first:
        return None
    event = first[evidence.ranks[0]]
    return Diagnosis(
        strength=Strength.LIKELY,
        because=(
            f"the {event['workers']} workers of the loader of {event['class']} yielded the same "
            "batch one after the other, twice in a row",
        ),
        where=event["at"],
        explains=False,
    )


def _in_rounds(looks: Mapping[int, Sequence[int]], workers: int) -> bool:
    """Say whether the first two batches of each worker come one right after the other."""
    updates = range(min(looks, default=0), min(looks, default=0) + 2 * workers)
    if workers < 2 or any(update not in looks for update in updates):
        return False
    batches = [tuple(looks[update]) for update in updates]
    rounds = [set(batches[:workers]), set(batches[workers:])]
    return all(len(one) == 1 for one in rounds) and rounds[0] != rounds[1]
