"""Experts spread over ranks get N times their gradient: their tokens come from all ranks already.

An expert lives on one rank and is sent the tokens of all, so its backward sums the N mean losses.
Dense layers are averaged over N ranks; experts are divided by their own data-parallel group, which
expert parallelism has made smaller, here 1, and so learn N times as fast. Reported in
pytorch/pytorch#160285, databricks/megablocks#86, deepspeedai/DeepSpeed#5259.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import (
    all_of,
    is_rounding,
    like_one_process,
    matches,
    negated,
    ranks_agree,
    says,
)
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Scenario, at_least
from harness.tables import relative_l2

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables, Vector


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/expert_grad_scale.yaml."""

    steps: int = field(metadata=at_least(1))
    tokens: int = field(metadata=at_least(1))
    experts: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """Tokens and experts are dealt out equally."""
    return [
        f"scenario.{name}={value} cannot be split over {ranks} ranks; type "
        f"scenario.{name}={ranks * max(1, round(value / ranks))}"
        for name, value in (("tokens", p.tokens), ("experts", p.experts))
        if value % ranks
    ]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a dense layer, a router and experts; what the experts are divided by differs."""
    import torch
    from torch import nn
    from torch.distributed.nn.functional import all_gather, all_reduce
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import FEATURES, gradients, mlp, rows, weights

    width, draw = 8, rank.generator("net")
    layers = mlp((FEATURES, width + p.experts), generator=draw)
    dense = DistributedDataParallel(layers.to(rank.device))
    every = [mlp((width, 6, 1), generator=draw) for _ in range(p.experts)]
    mine = range(rank.rank, p.experts, rank.world_size)
    experts = nn.ModuleList(every[number] for number in mine).to(rank.device)
    optimizer = torch.optim.SGD([*dense.parameters(), *experts.parameters()], lr=p.lr)
    x, y = rows(rank, p.tokens)
    for step in range(p.steps):
        optimizer.zero_grad()
        hidden, logits = dense(x).split([width, p.experts], dim=1)
        best = nn.functional.one_hot(logits.argmax(1), p.experts)
        sent = torch.cat([hidden.tanh(), logits.softmax(1) * best], dim=1)
        tokens, gates = torch.cat(all_gather(sent)).split([width, p.experts], dim=1)
        parts = [gates[:, [n]] * expert(tokens) for n, expert in zip(mine, experts, strict=True)]
        output = all_reduce(torch.stack(parts).sum(0)).chunk(rank.world_size)[rank.rank]
        nn.functional.mse_loss(output, y).backward()
        if arm["divide_by"] == "world":
            for gradient in (q.grad for q in experts.parameters() if q.grad is not None):
                gradient /= rank.world_size
        rank.snapshot(step=step, dense_grad=gradients(dense), expert_grad=gradients(experts))
        optimizer.step()
        rank.snapshot(step=step, dense=weights(dense), experts=weights(experts))


def of_experts(t: Tables, arm: str, name: str, step: int) -> Vector:
    """Return the values of all experts, in their order, wherever they live."""
    import numpy as np

    held = [t.snapshot(arm, name, step=step, rank=rank) for rank in t.ranks(arm)]
    dealt = [values.reshape(t.root_params["experts"] // len(held), -1) for values in held]
    return np.stack(dealt, axis=1).reshape(-1)


def experts_match(t: Tables, arm: str, name: str, step: int, factor: int = 1) -> Finding:
    """Say whether all experts have what `factor` times one process has, up to rounding."""
    t.require(arm, "one_process")
    due = factor * of_experts(t, "one_process", name, step)
    gap = relative_l2(of_experts(t, arm, name, step), due)
    floor = rounding(t, "one_process", name, step=step)
    reason = f"{name} of {arm} after step {step} is {gap:.2g} from {factor} times one process"
    return is_rounding(gap, floor, reason, "relative L2 distance")


@symptom(HOLDS, source="pytorch/pytorch#160285")
def experts_off(t: Tables) -> Finding:
    """Divided by their own group the experts end with other weights than in one process."""
    return negated(experts_match(t, "by_own_group", "experts", t.root_params["steps"] - 1))


@mechanism(HOLDS, source="databricks/megablocks#86")
def n_times_the_gradient(t: Tables) -> Finding:
    """The first gradient of the experts is N times that of one process."""
    return experts_match(t, "by_own_group", "expert_grad", 0, len(t.ranks("by_own_group")))


@symptom(REFUTED)
def dense_shows_it(t: Tables) -> Finding:
    """The first gradient of the dense layers is off as well, or differs between ranks."""
    first = matches(t, "by_own_group", "one_process", "dense_grad", step=0)
    return negated(all_of(first, ranks_agree(t, "by_own_group", "dense_grad")))


@remedy(HOLDS, source="deepspeedai/DeepSpeed#5259")
def divide_by_world(t: Tables) -> Finding:
    """Divided by all ranks the experts, and everything else, are those of one process."""
    right = experts_match(t, "by_world", "experts", t.root_params["steps"] - 1)
    return all_of(right, like_one_process(t, "by_world", "dense"))


SCENARIO = Scenario(
    title="Experts spread over ranks: their gradient is N times that of the dense layers",
    family="parallel layouts",
    cause="expert_grad_scale",
    params=Params,
    run=run,
    check=check,
    headline=says(
        n_times_the_gradient=("experts get N times their gradient", "experts get another gradient"),
    ),
    arms=(
        one_process("one process, all experts", divide_by="own_group"),
        faulty("by_own_group", "divided by their own group, 1", divide_by="own_group"),
        fixed("by_world", "divided by the number of ranks", divide_by="world"),
    ),
    claims=(experts_off, n_times_the_gradient, dense_shows_it, divide_by_world),
)
