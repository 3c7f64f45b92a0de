"""Loader workers that augment alike on every rank, although each rank has samples of its own.

A worker seeds torch's and Python's generators with a base seed, which the loader has drawn from
torch's, plus its own number. Ranks that were seeded alike draw the same base seed: worker k crops
and flips its k-th sample just as worker k of every other rank does. Seeding Python's generator in
the script does not reach the workers, and a worker_init_fn that goes by the worker's number alone
makes it so on all ranks. Reported in facebookresearch/fastMRI#123.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted, unknown
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """The values are in conf/scenario/loader_workers_same_on_ranks.yaml."""

    batch: int = field(metadata=at_least(4))
    workers: int = field(metadata=at_least(1))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Read this rank's samples, each with a crop drawn by its worker; who seeds what differs."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Augmented(Dataset[Any]):
        def __init__(self, samples: list[int]) -> None:
            self.samples = samples

        def __len__(self) -> int:
            return len(self.samples)

        def __getitem__(self, position: int) -> tuple[int, int]:
            return self.samples[position], random.getrandbits(31)

    more: dict[str, Any] = {}
    torch.manual_seed(rank.seed)
    random.seed(rank.seed)
    if arm["seeds"] == "python":
        random.seed(rank.seed + rank.rank)
    elif arm["seeds"] == "worker":
        more["worker_init_fn"] = random.seed  # Called with the worker's number.
    elif arm["seeds"] == "torch":
        torch.manual_seed(rank.seed + rank.rank)
    elif arm["seeds"] == "generator":
        more["generator"] = torch.Generator().manual_seed(rank.seed + rank.rank)
    data = Augmented(rank.shard(torch.arange(p.batch)).tolist())
    # Forked, as is usual on Linux: a class within a function could not be sent to a new process.
    more |= {"num_workers": p.workers, "multiprocessing_context": "fork"}
    samples, crops = zip(*DataLoader(data, batch_size=None, **more), strict=True)
    rank.log(step=0, samples=" ".join(map(str, samples)), crops=" ".join(map(str, crops)))


def all_differ(t: Tables, arm: str) -> Finding:
    """Say whether every sample of all ranks has a crop of its own."""
    t.require(arm)
    crops = [crop for rank in t.ranks(arm) for crop in t.last(arm, "crops", rank=rank).split()]
    samples = {n for rank in t.ranks(arm) for n in t.last(arm, "samples", rank=rank).split()}
    if len(samples) != len(crops):
        return unknown(f"the ranks of {arm} have samples in common")
    reason = f"{arm}: {len(set(crops))} different crops for {len(crops)} samples"
    numbers = {"effect": len(set(crops)) / len(crops), "unit": "crops a sample"}
    return (holds if len(set(crops)) == len(crops) else refuted)(reason, **numbers)


def same_crops(t: Tables, arm: str) -> Finding:
    """Say whether all ranks have other samples, and draw the same crops for them."""
    others = negated(ranks_agree(t, arm, "samples", moving=False))
    return all_of(ranks_agree(t, arm, "crops", moving=False), others)


@symptom(HOLDS, source="facebookresearch/fastMRI#123")
def ranks_alike(t: Tables) -> Finding:
    """With one seed on all ranks their workers draw the same crops, for other samples."""
    return same_crops(t, "one_seed")


@remedy(REFUTED)
def seed_python(t: Tables) -> Finding:
    """random.seed(seed + rank) in the script gives each rank crops of its own."""
    return all_differ(t, "python_seed")


@remedy(REFUTED)
def seed_by_worker(t: Tables) -> Finding:
    """A worker_init_fn that seeds with the worker's number does."""
    return all_differ(t, "init_fn")


@remedy(HOLDS)
def seed_torch(t: Tables) -> Finding:
    """torch.manual_seed(seed + rank) does, as in one process, whose samples all differ."""
    return all_of(all_differ(t, "torch_seed"), all_differ(t, "one_process"))


@remedy(HOLDS)
def own_generator(t: Tables) -> Finding:
    """So does a generator for the loader that is seeded with the rank."""
    return all_differ(t, "generator")


SCENARIO = Scenario(
    title="Loader workers draw the same augmentation on every rank: they are seeded alike",
    family="random numbers",
    cause="rng_not_decorrelated",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        ranks_alike=("all ranks' workers augment alike", "each rank augments for itself"),
        seed_python=("seeding Python helps", "seeding Python does not reach the workers"),
        seed_torch=("seeding torch by rank helps", "seeding torch by rank does not help"),
    ),
    arms=(
        reference("one_process", "one process", ranks=1, seeds="alike"),
        faulty("one_seed", "one seed on all ranks", seeds="alike"),
        faulty("python_seed", "random.seed(seed + rank)", seeds="python"),
        faulty("init_fn", "worker_init_fn=random.seed", seeds="worker"),
        fixed("torch_seed", "torch.manual_seed(seed + rank)", seeds="torch"),
        fixed("generator", "DataLoader(generator=) by rank", seeds="generator"),
    ),
    claims=(ranks_alike, seed_python, seed_by_worker, seed_torch, own_generator),
)
