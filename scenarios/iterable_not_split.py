"""A stream split by rank alone, or by worker alone: each sample comes several times an epoch.

An IterableDataset is copied into every worker of every rank, and each copy yields all that it is
not told to leave out. Split by rank, every worker of a rank reads that rank's share, and each
sample comes as often as there are workers; split by worker, every rank reads everything. Which copy
one is takes both numbers. Reported in huggingface/datasets#5360.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, counts, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/iterable_not_split.yaml."""

    samples: int = field(metadata=at_least(2))
    workers: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))


def check(p: Params, ranks: int) -> list[str]:
    """Every worker of every rank has a sample of its own."""
    if p.samples >= p.workers * ranks:
        return []
    why = f"scenario.samples={p.samples} are fewer than {p.workers} workers of {ranks} ranks"
    return [f"{why}; type scenario.samples={p.workers * ranks}"]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Read one epoch of a stream with several workers; which part a copy yields differs."""
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            worker, workers = (info.id, info.num_workers) if info else (0, 1)
            start, every = 0, 1
            if arm["split_by"] == "rank":
                start, every = rank.rank, rank.world_size
            elif arm["split_by"] == "worker":
                start, every = worker, workers
            elif arm["split_by"] == "both":
                start, every = rank.rank * workers + worker, rank.world_size * workers
            return islice(range(p.samples), start, None, every)

    workers = 0 if arm["split_by"] == "nothing, no workers" else p.workers
    # Forked, as is usual on Linux: a class within a function could not be sent to a new process.
    context = "fork" if workers else None
    loader = DataLoader(Stream(), p.batch, num_workers=workers, multiprocessing_context=context)
    seen = torch.cat(list(loader)).tolist()
    rank.log(step=0, workers=workers, seen=" ".join(map(str, seen)))


def handed_out(t: Tables, arm: str) -> Counter[str]:
    """Return how often each sample of the stream came in the epoch, over all ranks."""
    t.require(arm)
    return Counter(n for rank in t.ranks(arm) for n in t.last(arm, "seen", rank=rank).split())


def each_comes(t: Tables, arm: str, times: int) -> Finding:
    """Decide: every sample comes so many times in the epoch."""
    found, samples = handed_out(t, arm), t.root_params["samples"]
    seen = Counter(found.values())
    reason = f"{arm}: {len(found)} of {samples} samples come, " + ", ".join(
        f"{count} of them {n} times" for n, count in sorted(seen.items())
    )
    right = seen == {times: samples}
    numbers = {"effect": sum(found.values()) / samples, "unit": "times a sample"}
    return (holds if right else refuted)(reason, **numbers)


@symptom(HOLDS, source="huggingface/datasets#5360")
def not_split(t: Tables) -> Finding:
    """Not split at all, each sample comes once for every worker of every rank."""
    return each_comes(t, "not_split", t.root_params["workers"] * len(t.ranks("not_split")))


@remedy(REFUTED)
def by_rank(t: Tables) -> Finding:
    """Splitting it by rank is enough."""
    return each_comes(t, "by_rank", 1)


@remedy(REFUTED)
def by_worker(t: Tables) -> Finding:
    """Splitting it by worker, as the documentation of IterableDataset shows, is enough."""
    return each_comes(t, "by_worker", 1)


@symptom(HOLDS)
def once_a_worker(t: Tables) -> Finding:
    """By rank alone each sample comes once for every worker of one rank."""
    workers = t.root_params["workers"]
    here = set(Counter(t.last("by_rank", "seen").split()).values())
    own = (holds if here == {workers} else refuted)(f"on rank 0 its samples come {here} times")
    return all_of(each_comes(t, "by_rank", workers), own)


@symptom(HOLDS)
def once_a_rank(t: Tables) -> Finding:
    """By worker alone it comes once on every rank, from one of its workers."""
    split = counts(t, "by_worker", "workers", t.root_params["workers"], "workers")
    return all_of(each_comes(t, "by_worker", len(t.ranks("by_worker"))), split)


@remedy(HOLDS)
def by_both(t: Tables) -> Finding:
    """By rank * workers + worker each sample comes once, as in one process without workers."""
    return all_of(each_comes(t, "one_process", 1), each_comes(t, "by_both", 1))


SCENARIO = Scenario(
    title="A stream split by rank but not by worker: each sample comes once a worker",
    family="data",
    cause="data_not_sharded",
    params=Params,
    run=run,
    check=check,
    headline=says(
        not_split=("a stream not split comes once a copy", "each sample comes once"),
        by_rank=("splitting by rank is enough", "splitting by rank leaves the workers"),
        by_worker=("splitting by worker is enough", "splitting by worker leaves the ranks"),
    ),
    arms=(
        reference("one_process", "no workers", ranks=1, split_by="nothing, no workers"),
        faulty("not_split", "each copy yields everything", split_by="nothing"),
        faulty("by_rank", "every N-th sample", split_by="rank"),
        faulty("by_worker", "every W-th sample", split_by="worker"),
        fixed("by_both", "every N*W-th sample", split_by="both"),
    ),
    claims=(not_split, by_rank, once_a_worker, by_worker, once_a_rank, by_both),
)
