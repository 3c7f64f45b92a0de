"""An embedding shared by the first and the last stage: each copy gets a part of the gradient.

With the embedding on the first pipeline stage and the tied output layer on the last there are two
copies of one weight, and its gradient is the sum of what both get. Each trained with its own, they
part in the first update; with the mean of both they agree, and are wrong. The sum keeps them one,
if both have the same optimizer as well. Reported in NVIDIA/Megatron-LM#656, #844 and #4641.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, is_rounding, like_one_process, negated, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from harness.tables import relative_l2

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/untied_embedding_pipeline.yaml."""

    steps: int = field(metadata=at_least(2))
    tokens: int = field(metadata=at_least(2))
    vocabulary: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    layers: int = field(metadata=at_least(1))
    permutations: int = field(metadata=at_least(0))


def check(p: Params, ranks: int) -> list[str]:
    """There has to be a layer for each stage."""
    said = f"{p.layers} layers are too few for {ranks} stages; type scenario.layers={ranks}"
    return [said] if p.layers < ranks else []


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train an embedding, a layer for each stage, and a tied output; what ties them differs."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from scenarios._models import FEATURES
    from scenarios._pipeline import Residual, of_ends, share, through_stages

    draw, stage, last = rank.generator("net"), rank.rank, rank.world_size - 1
    ends = dist.new_group([0, last]) if last else None
    mine = share(rank, [Residual(generator=draw) for _ in range(p.layers)])
    drawn = torch.randn(p.vocabulary, FEATURES, generator=draw, dtype=torch.float64)
    table = torch.nn.Parameter(drawn.to(rank.device))
    held = [*mine.parameters(), *[table][: stage in (0, last)]]
    plain = arm.get("other_optimizer") and stage == last
    optimizer = torch.optim.SGD(held, lr=p.lr, momentum=0.0 if plain else 0.9)
    pairs = torch.randint(p.vocabulary, (p.tokens, 2), generator=rank.generator("tokens"))
    tokens, targets = pairs[rank.permutation(p.tokens)].to(rank.device).unbind(dim=1)
    start = table.new_zeros(p.tokens, FEATURES)

    def through(hidden: torch.Tensor) -> torch.Tensor:
        hidden = mine(F.embedding(tokens, table) if stage == 0 else hidden)
        return hidden @ table.T if stage == last else hidden

    for step in range(p.steps):
        optimizer.zero_grad()
        through_stages(through, start, partial(F.cross_entropy, target=targets))
        first, second = of_ends(table.grad, table)
        rank.snapshot(step=step, part_first=first, part_last=second)
        if table.grad is not None and arm["ties"] != "nothing":
            dist.all_reduce(table.grad, group=ends)
            table.grad /= 2 if arm["ties"] == "mean" else 1
        optimizer.step()
        first, second = of_ends(table, table)
        rank.snapshot(step=step, copy_first=first, copy_last=second)


def copies_agree(t: Tables, arm: str) -> Finding:
    """Say whether the copies are equal bit for bit after every update."""
    t.require(arm)
    first, last = (t.series(arm, f"copy_{end}.digest") for end in ("first", "last"))
    apart = [step for step in first if first[step] != last[step]]
    return (refuted if apart else holds)(f"{arm}: copies differ after updates {apart or 'none'}")


@symptom(HOLDS, source="NVIDIA/Megatron-LM#656")
def copies_part(t: Tables) -> Finding:
    """Each trained with its own gradient, the copies part."""
    return negated(copies_agree(t, "own"))


@mechanism(HOLDS)
def parts_of_one(t: Tables) -> Finding:
    """The first gradients of both copies sum to that of one process."""
    t.require("own", "one_process")
    total = t.snapshot("own", "part_first", step=0) + t.snapshot("own", "part_last", step=0)
    gap = relative_l2(total, t.snapshot("one_process", "part_first", step=0))
    floor = rounding(t, "one_process", "part_first", step=0)
    return is_rounding(gap, floor, f"their sum is {gap:.2g} from it", "relative L2 distance")


@symptom(HOLDS)
def mean_agrees(t: Tables) -> Finding:
    """With the mean of both gradients the copies stay equal bit for bit."""
    return copies_agree(t, "mean")


@remedy(REFUTED)
def mean_is_right(t: Tables) -> Finding:
    """With the mean of both gradients they train like one process."""
    return like_one_process(t, "mean", "copy_first")


@symptom(HOLDS, source="NVIDIA/Megatron-LM#4641")
def optimizers_part(t: Tables) -> Finding:
    """With the sum in both, and another optimizer on the last stage, the copies part."""
    return negated(copies_agree(t, "other_optimizer"))


@remedy(HOLDS, source="NVIDIA/Megatron-LM#844")
def sum_is_right(t: Tables) -> Finding:
    """With the sum of both gradients in both copies they train like one process."""
    return all_of(copies_agree(t, "sum"), like_one_process(t, "sum", "copy_first"))


SCENARIO = Scenario(
    title="An embedding tied over two pipeline stages: each copy has a part of the gradient",
    family="parallel layouts",
    cause="untied_embedding_pipeline",
    params=Params,
    run=run,
    check=check,
    headline=says(
        copies_part=("tied over two stages, copies part", "copies stay equal by themselves"),
        mean_is_right=("their mean is right", "their mean is wrong"),
    ),
    arms=(
        one_process("one process, one weight", ties="nothing"),
        faulty("own", "each copy its own gradient", ties="nothing"),
        faulty("mean", "the mean of both", ties="mean"),
        faulty("other_optimizer", "the sum, no momentum", ties="sum", other_optimizer=True),
        fixed("sum", "the sum of both", ties="sum"),
    ),
    claims=(copies_part, parts_of_one, mean_agrees, mean_is_right, optimizers_part, sum_is_right),
)
