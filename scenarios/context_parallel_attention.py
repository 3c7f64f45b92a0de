"""Ring attention whose backward normalises with each chunk's own log-sum-exp.

Queries stay, keys and values of all ranks pass by, chunk by chunk. Forward keeps a log-sum-exp for
each chunk and merges them; backward has to build its probabilities with the merged one. With the
chunk's own they sum to 1 in each of N chunks, to N in all. The output is right, and so is the
gradient of all that stands above the last attention; its values get N times what is due, and all
below is off. Data parallelism then makes it the same on all ranks. NVIDIA/Megatron-LM#1464.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import (
    all_of,
    like_one_process,
    matches,
    negated,
    ranks_agree,
    same_by_rank,
    says,
)
from harness.scenario import Arm, Finding, Plot, Scenario, at_least
from scenarios._models import split_equally

if TYPE_CHECKING:
    from torch import Tensor

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values, explained: conf/scenario/context_parallel_attention.yaml."""

    steps: int = field(metadata=at_least(2))
    tokens: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train two layers of attention on a sequence of which each rank holds a chunk."""
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._context_parallel import Block, ring_attention
    from scenarios._models import FEATURES, gradients, mlp, rows, weights

    def probability(scores: Tensor, of_chunk: Tensor, of_all: Tensor) -> Tensor:
        """Say how much a query attends to the keys of a chunk, in backward."""
        if arm["log_sum_exp"] == "chunk":
            return (scores - of_chunk).exp()
        return (scores - of_all).exp()

    draw, attend = rank.generator("net"), ring_attention(probability)
    if arm["log_sum_exp"] == "torch":
        attend = partial(F.scaled_dot_product_attention, scale=1.0)
    lower, upper = (Block(FEATURES, attend, generator=draw) for _ in range(2))
    head = mlp((FEATURES, 1), generator=draw)
    net = torch.nn.Sequential(lower, upper, head).to(rank.device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=p.lr)
    x, y = rows(rank, p.tokens, whole=True)
    x, y = (whole.chunk(rank.world_size)[rank.rank] for whole in (x, y))
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        value = gradients(upper)[-FEATURES:]
        rank.log(step=step, loss=loss)
        rank.snapshot(step=step, head=gradients(head), value=value, lower=gradients(lower))
        optimizer.step()
        rank.snapshot(step=step, weights=weights(net))


@symptom(HOLDS, source="NVIDIA/Megatron-LM#1464")
def off_one_process(t: Tables) -> Finding:
    """With each chunk's own log-sum-exp the weights are not those of one process."""
    return negated(matches(t, "chunk", "one_process", "weights"))


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "chunk", "weights"))


@symptom(REFUTED)
def loss_shows_it(t: Tables) -> Finding:
    """The first loss is another one than with the right backward."""
    return negated(same_by_rank(t, "chunk", "merged", "loss"))


@mechanism(HOLDS, source="NVIDIA/Megatron-LM#1464")
def above_is_right(t: Tables) -> Finding:
    """What stands above the last attention has the right gradient, what is below has not."""
    above = matches(t, "chunk", "one_process", "head", step=0)
    return all_of(above, negated(matches(t, "chunk", "one_process", "lower", step=0)))


@mechanism(HOLDS)
def values_n_times(t: Tables) -> Finding:
    """Probabilities sum to N: the bias of the last values gets N times the gradient."""
    ranks = len(t.ranks("chunk"))
    return matches(t, "chunk", "one_process", "value", step=0, times=ranks)


@remedy(HOLDS)
def merged(t: Tables) -> Finding:
    """With the merged log-sum-exp the ranks train like one process."""
    return like_one_process(t, "merged")


SCENARIO = Scenario(
    title="Ring attention whose backward takes each chunk's own log-sum-exp: N times its values",
    family="parallel layouts",
    cause="context_parallel_attention",
    params=Params,
    run=run,
    check=split_equally("tokens"),
    headline=says(
        above_is_right=("gradients are off from the last attention on down", "elsewhere"),
        values_n_times=("its values get N times theirs", "by no simple factor"),
        ranks_part=("the ranks part", "the ranks agree"),
        loss_shows_it=("the loss shows it", "the first loss is right"),
    ),
    arms=(
        one_process("torch's attention", log_sum_exp="torch"),
        faulty("chunk", "backward with each chunk's own", log_sum_exp="chunk"),
        fixed("merged", "backward with the merged one", log_sum_exp="merged"),
    ),
    claims=(off_one_process, ranks_part, loss_shows_it, above_is_right, values_n_times, merged),
    plots=(Plot(metric="loss", title="Loss of each rank's tokens", log=True),),
)
