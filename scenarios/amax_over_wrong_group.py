"""A split weight quantised with each shard's own maximum: as many scales as ranks.

The scale of a quantised tensor follows from its largest absolute value. Of a weight that is split
over tensor-parallel ranks that is the largest over all of them; reduced over the data-parallel
group instead, or not at all, each shard gets a scale of its own. Outputs agree on all ranks, each
shard is quantised no worse, and the model is another one than with one rank, or two: its results
depend on the layout. In NVIDIA/Megatron-LM#442 the groups were mixed up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, between
from scenarios._models import split_equally

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/amax_over_wrong_group.yaml."""

    steps: int = field(metadata=at_least(2))
    tokens: int = field(metadata=at_least(2))
    hidden: int = field(metadata=at_least(2))
    bits: int = field(metadata=between(2, 8))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train through a quantised split weight; over which ranks its maximum is taken differs."""
    import torch
    import torch.distributed as dist

    from scenarios import _tensor_parallel as split
    from scenarios._models import rows, weights

    norm, into, out = split.layers(rank, p.hidden)
    optimizer = torch.optim.SGD([into, out, *norm.parameters()], lr=p.lr)
    x, y = rows(rank, p.tokens, whole=True)
    levels = 2 ** (p.bits - 1) - 1
    for step in range(p.steps):
        optimizer.zero_grad()
        largest = into.detach().abs().amax()
        if arm["maximum"] == "over the group":
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        elif arm["maximum"] == "mean":
            dist.all_reduce(largest)
            largest /= rank.world_size
        scale = largest / levels
        quantised = (into / scale).round().clamp(-levels, levels) * scale
        if arm["maximum"] == "not quantised":
            quantised = into
        # Backward takes the rounding for the identity.
        used = into + (quantised - into).detach()
        output = split.summed(torch.tanh(split.copied(norm(x)) @ used.T) @ out)
        torch.nn.functional.mse_loss(output, y.expand_as(x)).backward()
        rank.snapshot(step=step, scale=scale[None], output=output.mean(dim=0))
        optimizer.step()
        rank.snapshot(step=step, norm=weights(norm))


@symptom(HOLDS, source="NVIDIA/Megatron-LM#442")
def off_one_process(t: Tables) -> Finding:
    """With each shard's own maximum the first output is not that of one process."""
    return negated(matches(t, "own", "one_process", "output", step=0))


@mechanism(HOLDS, source="NVIDIA/Megatron-LM#442")
def scales_differ(t: Tables) -> Finding:
    """The shards of one weight have different scales."""
    return negated(ranks_agree(t, "own", "scale"))


@symptom(REFUTED)
def ranks_show_it(t: Tables) -> Finding:
    """The ranks' outputs differ, or replicas part."""
    return negated(all_of(*(ranks_agree(t, "own", name) for name in ("output", "norm"))))


@mechanism(HOLDS)
def quantising_does_it(t: Tables) -> Finding:
    """Not quantised, the same split layer is that of one process."""
    return matches(t, "plain", "plain_alone", "norm")


@remedy(REFUTED)
def mean(t: Tables) -> Finding:
    """With the mean of the maxima for all shards the first output is that of one process."""
    return matches(t, "mean", "one_process", "output", step=0)


@remedy(HOLDS, source="NVIDIA/Megatron-LM#442")
def over_the_group(t: Tables) -> Finding:
    """With the maximum over the tensor-parallel group the ranks train like one process."""
    return all_of(*(like_one_process(t, "group", name) for name in ("output", "norm")))


SCENARIO = Scenario(
    title="A split weight quantised with each shard's own maximum: a scale for each rank",
    family="parallel layouts",
    cause="amax_over_wrong_group",
    params=Params,
    run=run,
    check=split_equally("hidden"),
    headline=says(
        scales_differ=("each shard has a scale of its own", "all shards have one scale"),
        off_one_process=("the output is not one process's", "the output is right"),
        ranks_show_it=("the ranks differ", "the ranks agree"),
        mean=("a mean of the maxima helps", "a mean of the maxima is another scale"),
    ),
    arms=(
        one_process("one process", maximum="over the group"),
        one_process("one process, not quantised", name="plain_alone", maximum="not quantised"),
        faulty("own", "each shard's own maximum", maximum="own"),
        faulty("mean", "the mean of the maxima", maximum="mean"),
        control("plain", "not quantised", maximum="not quantised"),
        fixed("group", "the maximum of all shards", maximum="over the group"),
    ),
    claims=(
        off_one_process,
        scales_differ,
        ranks_show_it,
        quantising_does_it,
        mean,
        over_the_group,
    ),
)
