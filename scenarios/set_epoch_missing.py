"""DistributedSampler without set_epoch: every epoch repeats the first, batch for batch.

The sampler shuffles with a generator of its own, seeded with `seed + epoch`, and nobody but the
training loop tells it the epoch. Each rank then sees the same 1/N of the samples for ever, in the
same order. Nothing is lost, all counts are right, the ranks agree. Seeding torch anew at each epoch
does not reach the sampler. Reported in pytorch/pytorch#31771, kan-bayashi/ParallelWaveGAN#177,
NVIDIA/tacotron2#241.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/set_epoch_missing.yaml."""

    epochs: int = field(metadata=at_least(3))
    batches: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(8))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train over epochs of shuffled batches; what is done at the start of an epoch differs."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from scenarios._models import net, rows, weights

    samples = p.batches * p.batch
    x, y = rows(rank, samples, whole=True)
    # A repeat of the reference permutes the rows of a batch, not those of the data set.
    back = rank.permutation(samples, name="rows").argsort()
    data = TensorDataset(x[back], y[back], torch.arange(samples))
    sampler: DistributedSampler[int] = DistributedSampler(
        data, num_replicas=rank.world_size, rank=rank.rank, shuffle=True, seed=rank.seed
    )
    loader = DataLoader(data, batch_size=p.batch // rank.world_size, sampler=sampler)
    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    for epoch in range(p.epochs):
        if arm["at_start"] == "set_epoch":
            sampler.set_epoch(epoch)
        elif arm["at_start"] == "seeds_torch":
            torch.manual_seed(rank.seed + epoch)
        seen: list[int] = []
        for batch in loader:
            order = rank.permutation(len(batch[0]), step=epoch)
            inputs, targets, numbers = (part[order] for part in batch)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            seen += numbers.tolist()
        rank.log(step=epoch, seen=" ".join(map(str, seen)))
        rank.snapshot(step=epoch, weights=weights(model))


def shuffles(t: Tables, arm: str) -> Finding:
    """Say whether every rank has each epoch in an order that no earlier epoch had."""
    t.require(arm)
    orders = {rank: list(t.series(arm, "seen", rank=rank).values()) for rank in t.ranks(arm)}
    repeated = {rank: len(seen) - len(set(seen)) for rank, seen in orders.items()}
    worst = max(repeated.values())
    reason = f"{arm}: {worst} of {t.root_params['epochs']} epochs repeat the order of another"
    return (refuted if worst else holds)(reason, effect=float(worst), unit="repeated epochs")


@symptom(HOLDS, source="pytorch/pytorch#31771", settles="A85")
def epochs_repeat(t: Tables) -> Finding:
    """Without set_epoch epochs repeat: DistributedSampler(shuffle=True) shuffles once."""
    return negated(shuffles(t, "not_called"))


@symptom(HOLDS)
def other_weights(t: Tables) -> Finding:
    """N ranks end with other weights than one process that shuffles in each epoch."""
    return negated(matches(t, "not_called", "one_process", "weights"))


@symptom(REFUTED)
def samples_are_missing(t: Tables) -> Finding:
    """Some samples are on no rank in an epoch."""
    t.require("not_called")
    shares = [t.series("not_called", "seen", rank=rank) for rank in t.ranks("not_called")]
    samples = t.root_params["batches"] * t.root_params["batch"]
    lost = [
        samples - len({number for share in shares for number in share[epoch].split()})
        for epoch in shares[0]
    ]
    reason = f"up to {max(lost)} of {samples} samples are on no rank in an epoch"
    return (holds if any(lost) else refuted)(reason, effect=float(max(lost)), unit="samples")


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "not_called", "weights"))


@remedy(REFUTED)
def seed_torch(t: Tables) -> Finding:
    """torch.manual_seed(seed + epoch) at the start of an epoch shuffles it anew."""
    return shuffles(t, "seeds_torch")


@remedy(HOLDS, source="NVIDIA/tacotron2#241")
def set_epoch(t: Tables) -> Finding:
    """sampler.set_epoch(epoch) shuffles each epoch anew: N ranks train like one process."""
    return all_of(shuffles(t, "set_epoch"), like_one_process(t, "set_epoch"))


SCENARIO = Scenario(
    title="DistributedSampler without set_epoch: every epoch has the order of the first",
    family="data",
    cause="set_epoch_missing",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        epochs_repeat=("without set_epoch every epoch is the first", "every epoch is shuffled"),
        samples_are_missing=("samples are missing", "no sample is missing"),
        seed_torch=("seeding torch shuffles", "seeding torch does not reach the sampler"),
        set_epoch=("set_epoch makes it one process", "set_epoch does not help"),
    ),
    arms=(
        one_process("one process, set_epoch", at_start="set_epoch"),
        faulty("not_called", "no set_epoch", at_start="nothing"),
        faulty("seeds_torch", "torch.manual_seed(seed + epoch)", at_start="seeds_torch"),
        fixed("set_epoch", "sampler.set_epoch(epoch)", at_start="set_epoch"),
    ),
    claims=(epochs_repeat, other_weights, samples_are_missing, ranks_part, seed_torch, set_epoch),
)
