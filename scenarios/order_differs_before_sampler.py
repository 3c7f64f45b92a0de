"""A list that each process orders for itself: the sampler cuts its shares out of different lists.

DistributedSampler hands rank r every N-th position, and trusts that position 7 is the same file
everywhere. Where each process lists the directory or shuffles the list for itself, or seeds the
sampler with its rank, shares overlap: a quarter of the samples (2 ranks) to a third (8) is never
seen in an epoch, while every rank counts the right number. No error; weights stay equal. Reported
in QwenLM/Qwen3-VL#1971, ByteDance-Seed/VeOmni#330, pytorch/vision#192 (the directory's order).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, mean_is, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """The values are in conf/scenario/order_differs_before_sampler.yaml."""

    samples: int = field(metadata=at_least(1))
    epochs: int = field(metadata=at_least(8))
    batch: int = field(metadata=at_least(1))


def check(p: Params, ranks: int) -> list[str]:
    """Equal shares, since the sampler pads others; and too many for orders to agree by chance."""
    if p.samples % ranks == 0 and p.samples >= 8 * ranks:
        return []
    return [
        f"scenario.samples={p.samples} is not a multiple of {ranks} ranks, 8 each or more; "
        f"type scenario.samples={ranks * max(8, round(p.samples / ranks))}"
    ]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Walk through the epochs and record the samples; arms differ in who orders the list."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    # Each process lists the directory for itself, and gets the files in an order of its own.
    listed = torch.randperm(p.samples, generator=rank.generator(f"listing of rank {rank.rank}"))
    if arm["order"] != "as_listed":
        listed = listed.sort().values
    sampler: DistributedSampler[int] = DistributedSampler(
        TensorDataset(listed),
        num_replicas=rank.world_size,
        rank=rank.rank,
        seed=rank.seed + (rank.rank if arm["order"] == "own_seed" else 0),
    )
    loader = DataLoader(TensorDataset(listed), batch_size=p.batch, sampler=sampler)
    for epoch in range(p.epochs):
        sampler.set_epoch(epoch)
        seen = torch.cat([batch for (batch,) in loader]).tolist()
        rank.log(step=epoch, count=len(seen), seen=" ".join(map(str, seen)))


def never_seen(t: Tables, arm: str) -> list[int]:
    """Return for each epoch how many samples no rank has seen."""
    t.require(arm)
    shares = [t.series(arm, "seen", rank=rank) for rank in t.ranks(arm)]
    seen = [{sample for share in shares for sample in share[step].split()} for step in shares[0]]
    return [t.root_params["samples"] - len(samples) for samples in seen]


def nothing_lost(t: Tables, arm: str) -> Finding:
    """Say whether in every epoch each sample is on some rank."""
    lost, samples = never_seen(t, arm), t.root_params["samples"]
    reason = f"{arm}: {min(lost)} to {max(lost)} of {samples} samples are on no rank in an epoch"
    numbers = {"effect": max(lost) / samples, "unit": "share of the samples, never seen"}
    return (refuted if any(lost) else holds)(reason, **numbers)


@symptom(HOLDS, source="QwenLM/Qwen3-VL#1971")
def own_list_loses(t: Tables) -> Finding:
    """When each process orders the list for itself, some samples are never seen in an epoch."""
    return negated(nothing_lost(t, "own_list"))


@symptom(HOLDS, settles="A85")
def own_seed_loses(t: Tables) -> Finding:
    """The same when the sampler is seeded with the rank."""
    return negated(nothing_lost(t, "rank_seed"))


@symptom(REFUTED)
def counts_show_it(t: Tables) -> Finding:
    """One sees it in the number of samples that a rank or an epoch has."""
    share = t.root_params["samples"] // len(t.ranks("own_list"))
    arms = ("own_list", "rank_seed")
    return negated(all_of(*(counts(t, arm, "count", share, "samples a rank") for arm in arms)))


@mechanism(HOLDS)
def by_chance(t: Tables) -> Finding:
    """A sample is missed as if ranks drew their shares independently: by (1 - 1/N)^N of them."""
    ranks = len(t.ranks("rank_seed"))
    lost = [missed / t.root_params["samples"] for missed in never_seen(t, "rank_seed")]
    return mean_is(lost, (1 - 1 / ranks) ** ranks, "share of samples never seen")


@remedy(HOLDS, source="ByteDance-Seed/VeOmni#330")
def sort_the_list(t: Tables) -> Finding:
    """Sort the list, seed all samplers alike: every sample is on one rank, as in one process."""
    return all_of(nothing_lost(t, "sorted"), nothing_lost(t, "one_process"))


SCENARIO = Scenario(
    title="Lists ordered per process before the sampler: some samples are never seen",
    family="data",
    cause="order_differs_before_sampler",
    params=Params,
    run=run,
    check=check,
    headline=says(
        own_list_loses=("lists ordered per process lose samples", "no list loses samples"),
        own_seed_loses=("so do samplers seeded by rank", "samplers seeded by rank lose none"),
        counts_show_it=("the counts show it", "every count is right"),
        by_chance=("as many as by chance", "not as many as by chance"),
    ),
    arms=(
        reference("one_process", "one process, as it lists them", ranks=1, order="as_listed"),
        faulty("own_list", "files as each process lists them", order="as_listed"),
        faulty("rank_seed", "DistributedSampler(seed=rank)", order="own_seed"),
        fixed("sorted", "list sorted, one seed", order="sorted"),
    ),
    claims=(own_list_loses, own_seed_loses, counts_show_it, by_chance, sort_the_list),
)
