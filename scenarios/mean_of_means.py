"""The mean of batch means, with a short last batch: another loss on every number of GPUs.

`total += loss.item()` and `total / len(loader)` weigh each sample of a short last batch more than
the rest, on one GPU already. On N ranks every rank has a short batch of its own, and averaging the
ranks' means weighs them alike once more. The sum over samples and their number, each all-reduced,
give one number wherever it is computed. Reported in Lightning-AI/pytorch-lightning#4493 and
modelscope/ms-swift#10088.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import is_rounding, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Scenario, at_least
from harness.tables import relative_l2

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/mean_of_means.yaml."""

    sets: int = field(metadata=at_least(1))
    samples: int = field(metadata=at_least(3))
    batch: int = field(metadata=at_least(2))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """A last batch that is short, and shares that are not equal."""
    full = ranks * p.batch
    if p.samples > full and p.samples % full == 1:
        return []
    why = f"scenario.samples={p.samples} is not one more than batches of {p.batch} on each rank"
    return [f"{why}; type scenario.samples={full * max(1, p.samples // full) + 1}"]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Report the loss of a net on each of several data sets; what is divided by what differs."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    from scenarios._models import net, rows

    model = net(rank)
    reported = []
    for number in range(p.sets):
        data = TensorDataset(*rows(rank, p.samples, name=f"set/{number}"))
        loader = DataLoader(data, batch_size=p.batch)
        means, sums = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for x, y in loader:
                loss = torch.nn.functional.mse_loss(model(x), y).cpu()
                means += torch.stack([loss, torch.ones_like(loss)])
                sums += torch.stack([loss, torch.ones_like(loss)]) * len(x)
        total = sums if arm["weighs"] == "samples" else means
        if arm["reduces"] == "mean":
            average = total[0] / total[1]
            dist.all_reduce(average)
            average /= rank.world_size
        else:
            if arm["reduces"] == "both":
                dist.all_reduce(total)
            average = total[0] / total[1]
        reported.append(average)
        rank.log(step=number, reported=average)
    rank.snapshot(step=p.sets, losses=torch.stack(reported))


def mean_loss(t: Tables, arm: str) -> Finding:
    """Decide: every rank reports the mean loss of all samples, that of one process."""
    t.require(arm, "one_process")
    step = t.root_params["sets"]
    due = t.snapshot("one_process", "losses", step=step)
    gaps = [relative_l2(t.snapshot(arm, "losses", step=step, rank=r), due) for r in t.ranks(arm)]
    floor = rounding(t, "one_process", "losses", step=step)
    off = " ".join(f"{100 * gap:.2g}" for gap in gaps)
    return is_rounding(max(gaps), floor, f"{arm}: off by {off} %, by rank", "relative L2 distance")


@symptom(REFUTED, source="Lightning-AI/pytorch-lightning#4493", settles="B31")
def batches_on_one(t: Tables) -> Finding:
    """Adding up loss.item() and dividing by len(loader) gives the mean loss, on one process."""
    return mean_loss(t, "one_process_batches")


@symptom(REFUTED, settles="B31")
def each_rank(t: Tables) -> Finding:
    """What an epoch returns on a rank is the loss of the epoch."""
    return mean_loss(t, "own_share")


@remedy(REFUTED, source="modelscope/ms-swift#10088")
def average_over_ranks(t: Tables) -> Finding:
    """Averaged over the ranks it is."""
    return mean_loss(t, "mean_of_batches")


@remedy(REFUTED)
def weigh_then_average(t: Tables) -> Finding:
    """Weighing batches by their size on each rank, then averaging over the ranks, is right."""
    return mean_loss(t, "mean_of_samples")


@remedy(HOLDS)
def reduce_both(t: Tables) -> Finding:
    """All-reducing the sum and the number of samples, and dividing once, is right on every rank."""
    return mean_loss(t, "sums")


SCENARIO = Scenario(
    title="The mean of batch means: a short last batch weighs too much, and one on each rank more",
    family="metrics",
    cause="mean_of_means",
    params=Params,
    run=run,
    check=check,
    headline=says(
        batches_on_one=("the mean over batches is the loss", "the mean over batches is off"),
        average_over_ranks=("averaging ranks helps", "averaging ranks does not help"),
        reduce_both=("sums and counts are right", "sums and counts are off, too"),
    ),
    arms=(
        one_process("sum over samples, one process", weighs="samples", reduces="nothing"),
        faulty(
            "one_process_batches", "mean of batches", ranks=1, weighs="batches", reduces="nothing"
        ),
        faulty("own_share", "mean of a rank's batches", weighs="batches", reduces="nothing"),
        faulty("mean_of_batches", "the same, averaged", weighs="batches", reduces="mean"),
        faulty("mean_of_samples", "mean of a rank's samples", weighs="samples", reduces="mean"),
        fixed("sums", "sum and number all-reduced", weighs="samples", reduces="both"),
    ),
    claims=(batches_on_one, each_rank, average_over_ranks, weigh_then_average, reduce_both),
)
