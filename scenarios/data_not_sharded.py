"""A loader without a sampler under DDP: every rank reads the whole data set, and the same batches.

Ranks are seeded alike, so `shuffle=True` gives all of them one order; so does a stream that nobody
splits. Gradients are equal before they are averaged: N GPUs train like one, for as long as one.
Reported in Shark-NLP/DiffuSeq#37, PatrickHua/SimSiam#16, huggingface/datasets#5360 (streams).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, counts, like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/data_not_sharded.yaml."""

    batches: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(8))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train for an epoch; the loader is all that differs."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

    from scenarios._models import net, rows, weights

    x, y = rows(rank, p.batches * p.batch, whole=True)
    # Repeats of the reference permute the rows of each batch, not the data set.
    back = rank.permutation(len(x), name="rows").argsort()
    data = TensorDataset(x[back], y[back], torch.arange(len(x)))
    size = p.batch // rank.world_size

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            start, every = (rank.rank, rank.world_size) if arm["loader"] == "split" else (0, 1)
            return islice(zip(*data.tensors, strict=True), start, None, every)

    if arm["loader"] in ("stream", "split"):
        loader = DataLoader[Any](Stream(), batch_size=size)
    elif arm["loader"] == "sampler":
        share = DistributedSampler[Any](data, rank.world_size, rank.rank)
        loader = DataLoader(data, batch_size=size, sampler=share)
    else:
        torch.manual_seed(rank.seed + (rank.rank if arm["loader"] == "rank_seed" else 0))
        loader = DataLoader(data, batch_size=size, shuffle=True)
    model = DistributedDataParallel(net(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    seen: list[int] = []
    for step, batch in enumerate(loader):
        order = rank.permutation(len(batch[0]), step=step)
        inputs, targets, numbers = (part[order] for part in batch)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        seen += numbers.tolist()
        rank.log(step=step, loss=loss)
        rank.snapshot(step=step, weights=weights(model))
    rank.log(step=0, phase="epoch", updates=step + 1, seen=" ".join(map(str, seen)))


def each_once(t: Tables, arm: str) -> Finding:
    """Say whether an epoch of all ranks together has each sample once."""
    t.require(arm)
    seen = [n for rank in t.ranks(arm) for n in t.last(arm, "seen", rank=rank).split()]
    samples = t.root_params["batches"] * t.root_params["batch"]
    times, met = len(seen) / samples, len(set(seen))
    reason = f"{arm}: an epoch has {met} of {samples} samples, {times:g} times each"
    return (holds if times == met / samples == 1 else refuted)(reason, effect=times, unit="epochs")


@symptom(HOLDS, source="Shark-NLP/DiffuSeq#37", settles="B63")
def same_batches(t: Tables) -> Finding:
    """Without a sampler, or with a stream that nobody splits, ranks train on the same batches."""
    arms = ("no_sampler", "stream")
    return all_of(*(ranks_agree(t, arm, sign) for arm in arms for sign in ("seen", "loss")))


@symptom(HOLDS)
def n_times(t: Tables) -> Finding:
    """An epoch takes N times the updates of one process that has batches of the same size."""
    due = t.root_params["batches"] * len(t.ranks("no_sampler"))
    arms = ("no_sampler", "stream", "rank_seed")
    return all_of(*(counts(t, arm, "updates", due, "updates an epoch") for arm in arms))


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "no_sampler", "weights"))


@remedy(REFUTED)
def seed_by_rank(t: Tables) -> Finding:
    """Seeding the ranks apart gives each of them its own part of the data."""
    return each_once(t, "rank_seed")


@remedy(HOLDS, source="PatrickHua/SimSiam#16", settles="B63")
def sampler(t: Tables) -> Finding:
    """DistributedSampler: each sample once an epoch, and the weights of one process."""
    return all_of(each_once(t, "sampler"), like_one_process(t, "sampler"))


@remedy(HOLDS, source="huggingface/datasets#5360")
def split(t: Tables) -> Finding:
    """A stream of which each rank takes every N-th line: the same."""
    right = matches(t, "split", "stream_one_process", "weights")
    return all_of(each_once(t, "split"), right, ranks_agree(t, "split", "weights"))


SCENARIO = Scenario(
    title="No sampler under DDP: every rank reads the whole data set, and N GPUs train like one",
    family="data",
    cause="data_not_sharded",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        same_batches=("without a sampler all ranks have the same batches", "batches differ"),
        seed_by_rank=("seeds per rank split the data", "seeds per rank do not split the data"),
    ),
    arms=(
        one_process("one process", loader="sampler"),
        one_process("a stream", name="stream_one_process", loader="stream"),
        faulty("no_sampler", "shuffle=True on every rank", loader="shuffle"),
        faulty("stream", "IterableDataset, not split", loader="stream"),
        faulty("rank_seed", "shuffle=True, seeded by rank", loader="rank_seed"),
        fixed("sampler", "DistributedSampler", loader="sampler"),
        fixed("split", "every N-th line of the stream", loader="split"),
    ),
    claims=(same_batches, n_times, ranks_part, seed_by_rank, sampler, split),
)
