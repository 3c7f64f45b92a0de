"""A gradient norm over tensor-parallel ranks: parts are added up, replicas count once.

Of a split layer each rank has a part of the gradient, of a layer norm each has all of it. If the
squares of all ranks are added up, replicas count N times; if rank 0's are taken for all, the parts
of the others are missing. Either norm is the same on all ranks, so is what the clip makes of it,
and nothing shows. Reported in NVIDIA/Megatron-LM#5916 and #7452.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least
from scenarios._models import split_equally

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/clip_norm_counted_wrongly.yaml."""

    steps: int = field(metadata=at_least(2))
    tokens: int = field(metadata=at_least(2))
    hidden: int = field(metadata=at_least(2))
    bound: float = field(metadata=at_least(1e-6))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train norm -> split linear -> tanh -> split linear; what is counted and scaled differs."""
    import torch
    import torch.distributed as dist
    from torch.nn.utils import clip_grad_norm_

    from scenarios import _tensor_parallel as split
    from scenarios._models import rows, weights

    norm, into, out = split.layers(rank, p.hidden)
    optimizer = torch.optim.SGD([into, out, *norm.parameters()], lr=p.lr)
    x, y = rows(rank, p.tokens, whole=True)
    for step in range(p.steps):
        optimizer.zero_grad()
        hidden = torch.tanh(split.copied(norm(x)) @ into.T)
        torch.nn.functional.mse_loss(split.summed(hidden @ out), y.expand_as(x)).backward()
        shares = [q.grad for q in (into, out) if q.grad is not None]
        replicas = [q.grad for q in norm.parameters() if q.grad is not None]
        rank.snapshot(step=step, shares=split.square(shares), replicas=split.square(replicas))
        if arm["counts"] == "torch":
            total = clip_grad_norm_([into, out, *norm.parameters()], p.bound)
        else:
            total = split.square([*shares, *replicas])
            if arm["counts"] == "replicas once" and rank.rank:
                total = split.square(shares)
            if arm["counts"] == "rank 0":
                dist.broadcast(total, src=0)
            else:
                dist.all_reduce(total)
            if arm["counts"] == "all over N":
                total /= rank.world_size
            total = total.sqrt()
            for gradient in (*shares, *replicas):
                gradient *= (p.bound / (total + 1e-6)).clamp(max=1.0)
        optimizer.step()
        rank.snapshot(step=step, total=total[None], norm=weights(norm))


@symptom(HOLDS, source="NVIDIA/Megatron-LM#5916")
def training_off(t: Tables) -> Finding:
    """With either wrong norm the weights are not those of one process."""
    found = (matches(t, arm, "one_process", "norm") for arm in ("all", "rank_0"))
    return all_of(*map(negated, found))


@symptom(REFUTED)
def ranks_show_it(t: Tables) -> Finding:
    """The ranks see different norms, or part."""
    pairs = ((arm, name) for arm in ("all", "rank_0") for name in ("total", "norm"))
    found = (ranks_agree(t, arm, name) for arm, name in pairs)
    return negated(all_of(*found))


@mechanism(HOLDS, source="NVIDIA/Megatron-LM#7452")
def replicas_n_times(t: Tables) -> Finding:
    """If all squares are added up, those of the replicas are in it N times."""
    t.require("all", "one_process")
    names = ("shares", "replicas", "total")
    shares, replicas, total = (t.snapshot("one_process", name, step=0)[0] for name in names)
    due = (shares + len(t.ranks("all")) * replicas) ** 0.5
    return matches(t, "all", "one_process", "total", step=0, times=float(due / total))


@remedy(REFUTED)
def over_n(t: Tables) -> Finding:
    """Dividing the sum of all squares by N makes up for it."""
    return matches(t, "all_over_n", "one_process", "total", step=0)


@remedy(HOLDS)
def count_once_scale_all(t: Tables) -> Finding:
    """Count replicas once, and scale everything: norms and weights are those of one process."""
    return all_of(*(like_one_process(t, "once", name) for name in ("total", "norm")))


SCENARIO = Scenario(
    title="A gradient norm over tensor-parallel ranks that counts replicas N times, or parts once",
    family="clipping",
    cause="clip_norm_counted_wrongly",
    params=Params,
    run=run,
    check=split_equally("hidden"),
    headline=says(
        training_off=("replicas counted N times, or one rank's parts, train otherwise", "alike"),
        ranks_show_it=("and ranks differ", "and ranks agree"),
        replicas_n_times=(
            "replicas are in it N times",
            "replicas are in it another number of times",
        ),
        over_n=("dividing by N helps", "dividing by N does not help"),
    ),
    arms=(
        one_process("one process", counts="torch"),
        faulty("all", "all squares of all ranks", counts="all"),
        faulty("rank_0", "all squares of rank 0", counts="rank 0"),
        faulty("all_over_n", "all squares of all ranks, over N", counts="all over N"),
        fixed("once", "replicas of one rank, parts of all", counts="replicas once"),
    ),
    claims=(training_off, ranks_show_it, replicas_n_times, over_n, count_once_scale_all),
)
