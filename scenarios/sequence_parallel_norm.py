"""A norm that sees a part of the sequence: its gradient is a share, and has to be summed.

Under sequence parallelism each rank normalises its own tokens with replicated weights, then the
tokens are gathered for a layer whose columns are split over the ranks. Data parallelism reduces
over other groups, so nobody reduces the norm's gradient: its replicas part in the first update.
Averaging instead of summing makes the replicas equal again, and wrong. Reported in
NVIDIA/Megatron-LM#474 and NVIDIA/TransformerEngine#435; in EleutherAI/gpt-neox#1257 first the
reduction was missing, then it was a mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, like_one_process, matches, negated, ranks_agree, says
from harness.floor import Size
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Scenario, at_least, unknown
from harness.tables import relative_l2

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/sequence_parallel_norm.yaml."""

    steps: int = field(metadata=at_least(1))
    tokens: int = field(metadata=at_least(2))
    hidden: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """Tokens and columns are dealt out equally."""
    return [
        f"scenario.{name}={value} cannot be split over {ranks} ranks; type "
        f"scenario.{name}={ranks * max(1, round(value / ranks))}"
        for name, value in (("tokens", p.tokens), ("hidden", p.hidden))
        if value % ranks
    ]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train norm -> split linear -> tanh -> split linear; arms differ in the norm's reduction."""
    import torch
    import torch.distributed as dist
    from torch.distributed.nn.functional import all_gather, all_reduce

    from scenarios._models import gradients, weights

    width = 8
    draw = rank.generator("parallel")
    order = rank.permutation(p.tokens)
    sequence = torch.randn(p.tokens, width, generator=draw, dtype=torch.float64)[order]
    target = torch.randn(p.tokens, width, generator=draw, dtype=torch.float64)[order]
    split = torch.randn(2, p.hidden, width, generator=draw, dtype=torch.float64) / width**0.5
    columns = split[:, rank.rank :: rank.world_size].to(rank.device)
    into, out = (part.clone().requires_grad_() for part in columns)
    sequence, target = sequence.to(rank.device), target.to(rank.device)
    norm = torch.nn.LayerNorm(width, dtype=torch.float64, device=rank.device)
    optimizer = torch.optim.SGD([into, out, *norm.parameters()], lr=p.lr)
    mine = sequence.chunk(rank.world_size)[rank.rank]
    for step in range(p.steps):
        optimizer.zero_grad()
        tokens = torch.cat(all_gather(norm(mine)))
        output = all_reduce(torch.tanh(tokens @ into.T) @ out)
        # Every rank computes this loss, and backward of the all-reduce adds up what they send.
        loss = torch.nn.functional.mse_loss(output, target) / rank.world_size
        loss.backward()
        share = gradients(norm)
        for gradient in (norm.weight.grad, norm.bias.grad):
            assert gradient is not None
            if arm["reduce"] != "none":
                dist.all_reduce(gradient)
            if arm["reduce"] == "mean":
                gradient /= rank.world_size
        optimizer.step()
        rank.snapshot(step=step, share=share, norm=weights(norm))


@symptom(HOLDS, source="NVIDIA/Megatron-LM#474")
def replicas_part(t: Tables) -> Finding:
    """The norm's replicas part in the first update."""
    return negated(ranks_agree(t, "not_reduced", "norm"))


@mechanism(HOLDS)
def shares_sum_up(t: Tables) -> Finding:
    """Each rank holds its own tokens' share; the shares sum to one process's gradient."""
    t.require("not_reduced", "one_process")
    whole = t.snapshot("one_process", "share", step=0)
    shares = [t.snapshot("not_reduced", "share", step=0, rank=r) for r in t.ranks("not_reduced")]
    floor = rounding(t, "one_process", "share", step=0)
    alone, gap = relative_l2(shares[0], whole), relative_l2(sum(shares[1:], shares[0]), whole)
    if floor.size(alone) is not Size.FAULT:
        return unknown(f"one rank's share is {alone:.2g} from the whole: there is nothing to add")
    reason = f"the sum is {gap:.2g} from the gradient of one process, one share {alone:.2g}"
    return is_rounding(gap, floor, reason, "relative L2 distance")


@symptom(HOLDS, source="EleutherAI/gpt-neox#1257")
def mean_agrees(t: Tables) -> Finding:
    """Averaged, the replicas agree bit for bit: a comparison of ranks is satisfied."""
    return ranks_agree(t, "averaged", "norm")


@remedy(REFUTED, source="EleutherAI/gpt-neox#1257")
def mean_is_right(t: Tables) -> Finding:
    """Averaging the norm's gradient over the ranks is enough."""
    return matches(t, "averaged", "one_process", "norm")


@remedy(HOLDS, source="NVIDIA/TransformerEngine#435")
def sum_is_right(t: Tables) -> Finding:
    """Summing it gives the weights of one process."""
    return like_one_process(t, "summed", "norm")


SCENARIO = Scenario(
    title="A sequence-parallel norm whose gradient nobody sums: replicas part in update one",
    family="parallel layouts",
    cause="replicated_grad_not_reduced",
    params=Params,
    run=run,
    check=check,
    headline=says(
        replicas_part=("without a reduction the norm's replicas part", "the replicas stay equal"),
        shares_sum_up=("the ranks hold shares of its gradient", "they do not hold shares of it"),
        mean_agrees=("averaging makes replicas equal", "averaging does not make them equal"),
        mean_is_right=("and right", "and wrong"),
        sum_is_right=("the sum is one process's gradient", "the sum is wrong, too"),
    ),
    arms=(
        one_process("one process, the whole sequence", reduce="none"),
        faulty("not_reduced", "nobody reduces the norm's gradient", reduce="none"),
        faulty("averaged", "it is averaged over the ranks", reduce="mean"),
        fixed("summed", "it is summed over the ranks", reduce="sum"),
    ),
    claims=(replicas_part, shares_sum_up, mean_agrees, mean_is_right, sum_is_right),
)
