"""A synchronised norm that counts its own rows for every rank: wrong where batches are uneven.

The norm gathers each rank's mean and variance, and combines them as if every rank had as many rows
as it has itself. With equal batches that is right to the last bit, and so are all tests. With
batches of different size a row on the smallest rank counts most, and the factor n / (n - 1) of the
running variance is each rank's own: running means agree, running variances do not. torch's own
SyncBatchNorm once did so. Reported in pytorch/pytorch#22192.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, between
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/syncbn_count.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(4))
    momentum: float = field(metadata=between(0.01, 1.0))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """Every rank gets two rows of its own, and the same number where shares are to be equal."""
    if p.batch >= 2 * ranks**2 and not equal_shares(p, ranks):
        return []
    typed = ranks * max(2 * ranks, round(p.batch / ranks))
    return [f"scenario.batch={p.batch} is too small or uneven; type scenario.batch={typed}"]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a net with a synchronised norm; whose rows it counts is what differs."""
    import torch
    from torch import nn
    from torch.distributed.nn.functional import all_reduce
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import FEATURES, mlp, rows, weights

    class SyncNorm(nn.BatchNorm1d):
        def forward(self, input: Any) -> Any:
            if not self.training:
                return super().forward(input)
            own = input.new_tensor(float(len(input)))
            total = own * rank.world_size
            if arm["counts"] == "gathered":
                total = all_reduce(own)
            mean = all_reduce(input.mean(0) * own / total)
            var = all_reduce((input - mean).square().mean(0) * own / total)
            assert self.running_mean is not None
            assert self.running_var is not None
            self.running_mean.lerp_(mean.detach(), p.momentum)
            self.running_var.lerp_(var.detach() * total / (total - 1), p.momentum)
            return self.weight * (input - mean) / (var + self.eps).sqrt() + self.bias

    norm: Any = SyncNorm(12, momentum=p.momentum, dtype=torch.float64)
    first = mlp((FEATURES, 12), generator=rank.generator("first"))
    last = mlp((12, 1), generator=rank.generator("last"))
    model = DistributedDataParallel(nn.Sequential(first, norm, nn.Tanh(), last).to(rank.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch, whole=True)
    # The file of the last rank is the longest.
    power = 2 if arm["uneven"] else 1
    start, end = (p.batch * n**power // rank.world_size**power for n in (rank.rank, rank.rank + 1))
    for step in range(p.steps):
        optimizer.zero_grad()
        errors = (model(x[start:end]) - y[start:end]).square()
        (errors.sum() * rank.world_size / p.batch).backward()
        optimizer.step()
        rank.snapshot(step=step, mean=norm.running_mean, var=norm.running_var)
        rank.snapshot(step=step, weights=weights(model))
    model.eval()
    with torch.no_grad():
        rank.log(step=p.steps, validation=(model.module(x) - y).square().mean())


def like_all(t: Tables, arm: str) -> Finding:
    """Say whether all ranks end with the weights and running statistics of one process."""
    return all_of(*(like_one_process(t, arm, name) for name in ("weights", "mean", "var")))


@symptom(HOLDS, source="pytorch/pytorch#22192")
def variances_part(t: Tables) -> Finding:
    """With uneven batches the running variances differ between ranks."""
    return negated(ranks_agree(t, "own_count", "var"))


@symptom(REFUTED)
def all_part(t: Tables) -> Finding:
    """Running means or weights differ as well."""
    return negated(all_of(*(ranks_agree(t, "own_count", name) for name in ("mean", "weights"))))


@symptom(HOLDS)
def off_one_process(t: Tables) -> Finding:
    """With uneven batches the net ends with other weights than one process."""
    return negated(matches(t, "own_count", "one_process", "weights"))


@mechanism(HOLDS)
def right_if_even(t: Tables) -> Finding:
    """With equal batches the same norm is right: weights and statistics of one process."""
    return like_all(t, "own_count_even")


@remedy(HOLDS)
def gather_counts(t: Tables) -> Finding:
    """Add up the ranks' counts as well: weights and statistics are those of one process."""
    return like_all(t, "gathered")


SCENARIO = Scenario(
    title="A synchronised norm that counts its own rows for every rank: wrong if batches differ",
    family="normalisation",
    cause="sync_norm_local_count",
    params=Params,
    run=run,
    check=check,
    headline=says(
        variances_part=("running variances part", "running variances agree"),
        all_part=("means or weights too", "running means and weights agree"),
        off_one_process=("it trains something else than one process", "it trains the same"),
        right_if_even=("with equal batches all is right", "it is wrong with equal batches, too"),
    ),
    arms=(
        one_process("one process", counts="gathered", uneven=True),
        faulty("own_count", "counts its own rows", counts="own", uneven=True),
        control("own_count_even", "and batches are equal", counts="own", uneven=False),
        fixed("gathered", "adds up the ranks' counts", counts="gathered", uneven=True),
    ),
    claims=(variances_part, all_part, off_one_process, right_if_even, gather_counts),
)
