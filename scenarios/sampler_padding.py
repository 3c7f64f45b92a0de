"""Samples that do not divide by the ranks: DistributedSampler repeats some, or leaves some out.

Every rank has to have as many, so the sampler fills up with samples from the beginning of the
order, or with drop_last cuts the end off. Without shuffling it is the same ones in every epoch:
some weigh double for ever, or are never trained on at all. With set_epoch others are hit each time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/sampler_padding.yaml."""

    samples: int = field(metadata=at_least(3))
    epochs: int = field(metadata=at_least(8))
    batch: int = field(metadata=at_least(1))


def check(p: Params, ranks: int) -> list[str]:
    """Samples that do not divide, and no more ranks than samples."""
    if p.samples % ranks and p.samples > 2 * ranks:
        return []
    why = f"scenario.samples={p.samples} leaves {ranks} ranks nothing uneven, or too little"
    return [f"{why}; type scenario.samples={ranks * max(2, p.samples // ranks) + 1}"]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Walk through the epochs and record the samples; how they are shared out differs."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

    data = TensorDataset(torch.arange(p.samples))
    if arm["shares"] == "every N-th":
        mine = Subset(data, range(rank.rank, p.samples, rank.world_size))
        loader = DataLoader(mine, batch_size=p.batch, shuffle=True)
    else:
        sampler: DistributedSampler[int] = DistributedSampler(
            data,
            num_replicas=rank.world_size,
            rank=rank.rank,
            shuffle=arm["shares"].endswith("shuffled"),
            drop_last=arm["shares"].startswith("cut"),
        )
        loader = DataLoader(data, batch_size=p.batch, sampler=sampler)
    for epoch in range(p.epochs):
        if arm["shares"] != "every N-th":
            sampler.set_epoch(epoch)
        seen = torch.cat([batch for (batch,) in loader]).tolist()
        rank.log(step=epoch, count=len(seen), seen=" ".join(map(str, seen)))


def times(t: Tables, arm: str) -> list[list[int]]:
    """Return for each epoch how often each sample was handed out, over all ranks."""
    t.require(arm)
    shares = [t.series(arm, "seen", rank=rank) for rank in t.ranks(arm)]
    counts = [Counter(n for share in shares for n in share[epoch].split()) for epoch in shares[0]]
    return [[count[str(n)] for n in range(t.root_params["samples"])] for count in counts]


def each_once(t: Tables, arm: str) -> Finding:
    """Say whether in every epoch each sample is on one rank, once."""
    found = times(t, arm)
    twice, never = max(e.count(2) for e in found), max(e.count(0) for e in found)
    reason = f"{arm}: of {len(found[0])} samples {twice} are handed out twice and {never} never"
    right = all(set(epoch) == {1} for epoch in found)
    return (holds if right else refuted)(reason, effect=float(twice + never), unit="samples")


def unchanging(t: Tables, arm: str, handed_out: int, due: int) -> Finding:
    """Say whether the same samples, as many as are due, are handed out so often in every epoch."""
    hit = [[n for n, k in enumerate(epoch) if k == handed_out] for epoch in times(t, arm)]
    reason = f"{arm}: in {sum(e == hit[0] for e in hit)} of {len(hit)} epochs samples {hit[0]}"
    right = all(epoch == hit[0] for epoch in hit) and len(hit[0]) == due
    return (holds if right else refuted)(reason)


@symptom(REFUTED, settles="~A85")
def one_rank_each(t: Tables) -> Finding:
    """DistributedSampler hands each sample to one rank, and to one only."""
    return each_once(t, "filled_up")


@remedy(REFUTED, settles="~A85")
def drop_last(t: Tables) -> Finding:
    """With drop_last=True it does."""
    return each_once(t, "cut")


@symptom(HOLDS, settles="A85")
def always_the_same(t: Tables) -> Finding:
    """In a fixed order it is the same samples that are repeated, or left out, in every epoch."""
    samples, ranks = t.root_params["samples"], len(t.ranks("cut"))
    repeated = unchanging(t, "filled_up", 2, -samples % ranks)
    return all_of(repeated, unchanging(t, "cut", 0, samples % ranks))


@remedy(HOLDS)
def shuffle_spreads(t: Tables) -> Finding:
    """Shuffled, with set_epoch, drop_last leaves out others each time, and none in the long run."""
    found = times(t, "cut_shuffled")
    missing, short = sum(not any(n) for n in zip(*found, strict=True)), sum(0 in e for e in found)
    reason = f"{short} of {len(found)} epochs leave samples out, {missing} are never seen"
    return (holds if short == len(found) and not missing else refuted)(reason)


@remedy(HOLDS)
def every_nth(t: Tables) -> Finding:
    """Every N-th sample to a rank is each of them once, as in one process; shares are unequal."""
    shares = {t.last("every_nth", "count", rank=rank) for rank in t.ranks("every_nth")}
    unequal = holds if max(shares) - min(shares) == 1 else refuted
    once = each_once(t, "one_process"), each_once(t, "every_nth")
    return all_of(*once, unequal(f"shares of {sorted(shares)} samples"))


SCENARIO = Scenario(
    title="Samples that do not divide by the ranks: the sampler repeats some, or leaves some out",
    family="data",
    cause="",
    params=Params,
    run=run,
    check=check,
    headline=says(
        one_rank_each=("each sample is on one rank", "some samples are on two ranks"),
        drop_last=("drop_last cures it", "with drop_last some are on none"),
        always_the_same=("always the same ones", "other ones each epoch"),
        shuffle_spreads=("unless shuffled", "shuffled as well"),
    ),
    arms=(
        reference("one_process", "one process", ranks=1, shares="every N-th"),
        faulty("filled_up", "DistributedSampler(shuffle=False)", shares="filled up"),
        faulty("cut", "the same with drop_last=True", shares="cut"),
        fixed("cut_shuffled", "drop_last, shuffle, set_epoch", shares="cut, shuffled"),
        fixed("every_nth", "Subset of every N-th sample", shares="every N-th"),
    ),
    claims=(one_rank_each, drop_last, always_the_same, shuffle_spreads, every_nth),
)
