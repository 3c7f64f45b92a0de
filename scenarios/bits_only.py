"""Other bits with another bucket size or number of ranks: rounding, and no fault.

Where DDP cuts gradients into buckets, and among how many ranks it adds them up, decides in which
order summands are added. Weights then end with other bits, at the distance at which one process
ends whose rows come in another order. Within a run all ranks hold the same bits, and the same run
gives them again. With 2 ranks the buckets change nothing: a sum of two has but one order. Reported
as a fault in pytorch/pytorch#30509.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, one_process
from harness.claims import HOLDS, REFUTED, mechanism, symptom
from harness.findings import (
    all_of,
    like_one_process,
    matches,
    negated,
    ranks_agree,
    repeats_records,
    says,
)
from harness.scenario import Arm, Finding, Scenario, at_least
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/bits_only.yaml."""

    steps: int = field(metadata=at_least(2))
    width: int = field(metadata=at_least(8))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a net; the size of DDP's buckets is all that differs."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import FEATURES, mlp, rows, weights

    layers = mlp((FEATURES, p.width, p.width, 1), generator=rank.generator("net")).to(rank.device)
    model = DistributedDataParallel(layers, bucket_cap_mb=arm["bucket_mb"])
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr * (1.0 + arm.get("off", 0.0)))
    for step in range(p.steps):
        x, y = rows(rank, p.batch, name=f"batch/{step}")
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        rank.snapshot(step=step, weights=weights(model))


@symptom(HOLDS, source="pytorch/pytorch#30509")
def other_bits(t: Tables) -> Finding:
    """N ranks do not end with the bits of one process."""
    return negated(repeats_records(t, "default", "one_process", "weights"))


@symptom(REFUTED)
def other_training(t: Tables) -> Finding:
    """They train something else, or with other buckets they do."""
    return negated(all_of(*(like_one_process(t, arm) for arm in ("default", "small_buckets"))))


@mechanism(HOLDS)
def one_set_of_bits(t: Tables) -> Finding:
    """All ranks of a run hold the same bits, and the same run gives them again."""
    again = repeats_records(t, "again", "default", "weights")
    return all_of(again, ranks_agree(t, "again", "weights"), ranks_agree(t, "default", "weights"))


@mechanism(REFUTED)
def hides_faults(t: Tables) -> Finding:
    """Where bits differ anyway a fault of a millionth of the learning rate cannot be told."""
    return matches(t, "rate_off", "one_process", "weights")


SCENARIO = Scenario(
    title="Other bits with other buckets or another number of ranks: rounding, and no fault",
    family="precision",
    cause="",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        other_bits=("N ranks end with other bits", "N ranks end with the same bits"),
        other_training=("and train something else", "and train the same to rounding"),
        one_set_of_bits=("between ranks no bit differs", "ranks differ in bits"),
        hides_faults=("a small fault is hidden", "a fault of a millionth stands out"),
    ),
    arms=(
        one_process("one process", bucket_mb=25),
        control("default", "bucket_cap_mb=25", bucket_mb=25),
        control("again", "the same once more", bucket_mb=25),
        control("small_buckets", "bucket_cap_mb=0.001", bucket_mb=0.001),
        faulty("rate_off", "learning rate off by 1e-6", bucket_mb=25, off=1e-6),
    ),
    claims=(other_bits, other_training, one_set_of_bits, hides_faults),
)
