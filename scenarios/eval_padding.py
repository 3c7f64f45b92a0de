"""Evaluation through DistributedSampler: some samples count twice, and accuracy depends on N.

So that all ranks get equally many samples the sampler repeats the first ones, up to N - 1 of them;
with `drop_last=True` it leaves the last ones out instead. Summed over the ranks, hits and samples
are then those of another test set, and of another one for each number of GPUs; all ranks agree on
them. Reported in pytorch/pytorch#25162, Lightning-AI/pytorch-lightning#2398, pytorch/vision#4559.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import counts, negated, repeats_records, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, one_of, refuted
from scenarios._digits import prerequisite
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/eval_padding.yaml."""

    scale: str = field(metadata=one_of("toy", "real"))
    epochs: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(1))
    tests: int = field(metadata=at_least(3))
    lr: float = field(metadata=at_least(1e-6))


def check(p: Params, ranks: int) -> list[str]:
    """The test samples cannot be shared equally, or nothing would be repeated."""
    typed = f"type scenario.tests={ranks * max(1, round(p.tests / ranks)) + 1}"
    said = f"scenario.tests={p.tests} is a multiple of {ranks} ranks, or too few; {typed}"
    wrong = [said] if p.tests % ranks == 0 or p.tests <= ranks else []
    return [*prerequisite(p.scale), *wrong, *equal_shares(p, ranks)]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train, and test after each epoch; which samples a rank tests is all that differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from scenarios._digits import held_out, net, right, rows

    data = TensorDataset(*held_out(rank, p.tests, p.scale))
    share: Any = range(rank.rank, p.tests, rank.world_size)
    if arm["samples"] != "all":
        share = DistributedSampler[Any](data, shuffle=False, drop_last=arm["samples"] == "short")
    loader = DataLoader(data, batch_size=8, sampler=share)
    x, y = rows(rank, p.batch, p.scale)
    model = DistributedDataParallel(net(rank, p.scale))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    for epoch in range(p.epochs):
        model.train()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            hits = torch.cat([right(model.module(u), v) for u, v in loader]).int()
        rank.log(step=epoch, hits=" ".join(map(str, hits.tolist())))
        if arm.get("gathers"):
            found = [torch.empty_like(hits) for _ in range(rank.world_size)]
            dist.all_gather(found, hits)
            # Sample i is the (i // N)-th of rank i % N; what is behind the last one is padding.
            hits = torch.stack(found, dim=1).flatten()[: p.tests]
        total = torch.tensor([int(hits.sum()), len(hits)], device=rank.device)
        if not arm.get("gathers"):
            dist.all_reduce(total)
        rank.log(step=epoch, accuracy=total[0].double() / total[1], samples=total[1])


@symptom(HOLDS, source="pytorch/pytorch#25162")
def accuracy_off(t: Tables) -> Finding:
    """Tested through DistributedSampler, the accuracy is not that of one process."""
    return negated(repeats_records(t, "padded", "one_process", "accuracy"))


@symptom(HOLDS, source="Lightning-AI/pytorch-lightning#2398")
def more_samples(t: Tables) -> Finding:
    """The ranks together have tested more samples than there are."""
    ranks = len(t.ranks("padded"))
    due = -(-t.root_params["tests"] // ranks) * ranks
    return counts(t, "padded", "samples", due, f"samples of {t.root_params['tests']}")


@mechanism(HOLDS)
def first_count_twice(t: Tables) -> Finding:
    """What is added are the first samples once more, and nothing else."""
    t.require("padded", "one_process")
    for epoch, hits in t.series("one_process", "hits").items():
        right = [int(hit) for hit in hits.split()]
        extra = t.value("padded", "samples", step=epoch) - len(right)
        due = sum(right + right[:extra]) / (len(right) + extra)
        for rank in t.ranks("padded"):
            found = t.value("padded", "accuracy", step=epoch, rank=rank)
            if extra < 1 or found != due:
                return refuted(f"accuracy {found:.4g} in epoch {epoch}, not {due:.4g}")
    return holds(f"every accuracy is that with the first {extra} samples counted twice")


@remedy(REFUTED)
def drop_last(t: Tables) -> Finding:
    """With drop_last=True nothing is repeated, and the accuracy is right."""
    return repeats_records(t, "dropped", "one_process", "accuracy")


@remedy(HOLDS, source="pytorch/vision#4559")
def no_padding(t: Tables) -> Finding:
    """Every N-th sample without padding: exactly the accuracy of one process."""
    return repeats_records(t, "not_padded", "one_process", "accuracy")


@remedy(HOLDS)
def cut(t: Tables) -> Finding:
    """Gather the results in the order of the test set and cut the padding off: the same."""
    return repeats_records(t, "cut", "one_process", "accuracy")


SCENARIO = Scenario(
    title="Testing through DistributedSampler: repeated samples make accuracy depend on N",
    family="metrics",
    cause="eval_padding",
    params=Params,
    run=run,
    check=check,
    headline=says(
        accuracy_off=("padded shards report another accuracy", "padding does no harm"),
        first_count_twice=("the first samples count twice", "something else is counted"),
        drop_last=("drop_last cures it", "drop_last is wrong, too"),
        no_padding=("without padding it is exact", "without padding it is off"),
    ),
    arms=(
        reference("one_process", "one process", ranks=1, samples="all"),
        faulty("padded", "DistributedSampler(shuffle=False)", samples="padded"),
        faulty("dropped", "the same, drop_last=True", samples="short"),
        fixed("not_padded", "range(rank, tests, N)", samples="all"),
        fixed("cut", "all_gather, first `tests` only", samples="padded", gathers=True),
    ),
    claims=(accuracy_off, more_samples, first_count_twice, drop_last, no_padding, cut),
)
