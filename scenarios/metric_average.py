"""The mean of the ranks' Dice is not the Dice of the data set, not even with equal shares.

A ratio of sums is not the mean of the ratios: its denominator, the marked pixels, differs between
shards however many images each has. Averaging over ranks, or over batches with a short last one,
reports another number for the same predictions, and one that depends on the number of GPUs.
Reported in Lightning-AI/pytorch-lightning#4493, PrimeIntellect-ai/prime-rl#1850; "4-GPU Dice 0.3 %
below one GPU" needs no error in the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, is_rounding, negated, repeats_records, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Outcome, Scenario, at_least, between, one_of, unknown
from scenarios._digits import digits, prerequisite
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/metric_average.yaml."""

    scale: str = field(metadata=one_of("toy", "real"))
    sets: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(1))
    pixels: int = field(metadata=at_least(2))
    wrong: float = field(metadata=between(0.01, 0.5))
    part: int = field(metadata=at_least(1))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Score each data set of masks; what is averaged is all that differs."""
    import torch
    import torch.distributed as dist

    def dice(truth: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        return 2.0 * (truth & found).sum().double() / (truth.sum() + found.sum())

    def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(value)
        return value / rank.world_size

    for number in range(p.sets):
        draw = rank.generator(f"set/{number}")
        marked = torch.rand(p.batch, p.pixels, generator=draw)
        marked = marked < torch.rand(p.batch, 1, generator=draw) ** 2
        if p.scale == "real":  # The ink of as many digits.
            ink = digits().train_x > 0
            marked = ink[torch.randint(len(ink), (p.batch,), generator=draw)]
        missed = torch.rand(marked.shape, generator=draw) < p.wrong
        truth, found = (rank.shard(part).to(rank.device) for part in (marked, marked ^ missed))
        if arm["averages"] == "ranks":
            score = mean_over_ranks(dice(truth, found))
        elif arm["averages"] == "batches":
            parts = zip(truth.split(p.part), found.split(p.part), strict=True)
            score = mean_over_ranks(torch.stack([dice(*part) for part in parts]).mean())
        else:
            counts = torch.stack([2 * (truth & found).sum(), truth.sum() + found.sum()])
            dist.all_reduce(counts)
            score = counts[0].double() / counts[1]
        accuracy = mean_over_ranks((truth == found).double().mean())
        rank.log(step=number, dice=score, accuracy=accuracy)


def right(t: Tables, arm: str, metric: str = "dice") -> Finding:
    """Say whether an arm reports what counting in one process gives, up to the last bits."""
    t.require(arm, "one_process")
    gaps = [
        abs(t.value(arm, metric, step=number, rank=rank) - value)
        for number, value in t.series("one_process", metric).items()
        for rank in t.ranks(arm)
    ]
    reason = f"{metric} of {arm} is off by {100 * min(gaps):.2g} to {100 * max(gaps):.2g} points"
    # A mean of N numbers below 1 is rounded N times.
    floor = dtype_floor(EPS["float64"] * len(t.ranks(arm)))
    judged = [is_rounding(gap, floor, reason, metric) for gap in gaps]
    off = [finding for finding in judged if finding.outcome is Outcome.REFUTED]
    # Two shards may have as many marked pixels by chance: then their mean is right.
    if off and 2 * len(off) < len(judged):
        return unknown(f"{reason}: right in {len(judged) - len(off)} of {len(judged)} values")
    return max(judged, key=lambda finding: finding.effect or 0.0)


@symptom(HOLDS, source="PrimeIntellect-ai/prime-rl#1850")
def mean_over_ranks_off(t: Tables) -> Finding:
    """The mean of the ranks' Dice is not the Dice of the data set."""
    return negated(right(t, "over_ranks"))


@symptom(HOLDS, source="Lightning-AI/pytorch-lightning#4493", settles="~B31")
def mean_over_batches_off(t: Tables) -> Finding:
    """Neither is the mean over batches, averaged over ranks."""
    return negated(right(t, "over_batches"))


@mechanism(REFUTED)
def equal_shares_help(t: Tables) -> Finding:
    """With as many images on every rank the mean over ranks is right, for Dice as for accuracy."""
    return all_of(right(t, "over_ranks", "accuracy"), right(t, "over_ranks"))


@mechanism(HOLDS)
def fixed_denominator(t: Tables) -> Finding:
    """Accuracy, whose denominator is the same on all ranks, survives the mean."""
    return right(t, "over_ranks", "accuracy")


@remedy(HOLDS)
def reduce_counts(t: Tables) -> Finding:
    """All-reduce numerator and denominator, divide once: one process's Dice to the last bit."""
    return repeats_records(t, "counts", "one_process", "dice")


SCENARIO = Scenario(
    title="The mean of the ranks' Dice is not the Dice of the data set, even with equal shares",
    family="metrics",
    cause="mean_of_means",
    params=Params,
    run=run,
    check=lambda p, ranks: [*prerequisite(p.scale), *equal_shares(p, ranks)],
    headline=says(
        mean_over_ranks_off=("averaging Dice over ranks is off", "averaging over ranks is right"),
        equal_shares_help=("equal shares cure it", "equal shares do not cure it"),
        reduce_counts=("all-reduced counts are exact", "all-reduced counts are off, too"),
    ),
    arms=(
        reference("one_process", "one process counts all pixels", ranks=1, averages="counts"),
        faulty("over_ranks", "mean of the ranks' Dice", averages="ranks"),
        faulty("over_batches", "mean of the batches' Dice", averages="batches"),
        fixed("counts", "counts all-reduced, divided once", averages="counts"),
    ),
    claims=(
        mean_over_ranks_off,
        mean_over_batches_off,
        equal_shares_help,
        fixed_denominator,
        reduce_counts,
    ),
)
