"""Sequences cut into chunks over the ranks: whose tokens is the loss divided by?

Padding stands at the end of documents, so the ranks with the last chunks have fewer tokens that
count. Dividing by one's own, and averaging over ranks as data parallelism does, makes a token
weigh more the later it stands; a rank without any reports NaN and counts as one all the same.
Divided by all tokens, the gradients are to be added up; averaging them divides by N again.
Without padding the first is right: a test on full documents passes. NVIDIA/Megatron-LM#673.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted
from scenarios._models import split_equally

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/context_parallel_loss.yaml."""

    steps: int = field(metadata=at_least(2))
    documents: int = field(metadata=at_least(2))
    length: int = field(metadata=at_least(4))
    vocabulary: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


FULL: dict[str, Any] = {"shortest": 1.0, "longest": 1.0}
SOME: dict[str, Any] = {"shortest": 0.1, "longest": 1.0}
HALF: dict[str, Any] = {"shortest": 0.1, "longest": 0.5}


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train attention on chunks of documents; what the loss is divided by differs."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._context_parallel import Attention
    from scenarios._models import gradients, weights

    draw = rank.generator("documents")
    model = Attention(p.vocabulary, generator=rank.generator("net")).to(rank.device)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    text = torch.randint(p.vocabulary, (p.documents, p.length + 1), generator=draw)
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    ends = p.length * torch.linspace(arm["shortest"], arm["longest"], p.documents)
    labels[torch.arange(p.length) >= ends[:, None]] = -100
    both = torch.stack([tokens, labels])[:, rank.permutation(p.documents)].to(rank.device)
    tokens, labels = both.chunk(rank.world_size, dim=2)[rank.rank]
    for step in range(p.steps):
        optimizer.zero_grad()
        logits = wrapped(tokens).flatten(0, 1)
        if arm["divides_by"] == "own":
            loss = F.cross_entropy(logits, labels.flatten())
        else:
            count = (labels >= 0).sum()
            dist.all_reduce(count)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / count
            if arm["divides_by"] == "all over N":
                loss = loss * rank.world_size
        loss.backward()
        rank.log(step=step, loss=loss)
        rank.snapshot(step=step, grad=gradients(model))
        optimizer.step()
        rank.snapshot(step=step, weights=weights(model))


@symptom(HOLDS, source="NVIDIA/Megatron-LM#673")
def off_one_process(t: Tables) -> Finding:
    """Divided by each rank's own tokens, the weights are not those of one process."""
    return negated(matches(t, "own_tokens", "one_process", "weights"))


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "own_tokens", "weights"))


@symptom(HOLDS)
def full_documents(t: Tables) -> Finding:
    """On documents without padding it is one process all the same: a test on them passes."""
    return matches(t, "full", "full_alone", "weights")


@symptom(HOLDS)
def nothing_left(t: Tables) -> Finding:
    """A rank all of whose tokens are padding reports NaN, and the weights stay finite."""
    t.require("all_padding")
    ranks = t.ranks("all_padding")
    odd = [r for r in ranks if math.isnan(t.value("all_padding", "loss", step=0, rank=r))]
    bad = max(t.last("all_padding", "weights.nonfinite", rank=r) for r in ranks)
    reason = f"ranks {odd or 'none'} report NaN, and {bad} weights are not finite in the end"
    return (holds if odd and not bad else refuted)(reason)


@mechanism(HOLDS)
def divided_twice(t: Tables) -> Finding:
    """Divided by all tokens, then averaged over ranks, the gradient is 1/N of what is due."""
    part = 1 / len(t.ranks("all_tokens"))
    return matches(t, "all_tokens", "one_process", "grad", step=0, times=part)


@remedy(HOLDS, source="NVIDIA/Megatron-LM#673")
def over_n(t: Tables) -> Finding:
    """Divided by all tokens over N, the chunks train like one process."""
    return like_one_process(t, "all_over_n")


SCENARIO = Scenario(
    title="Chunks of padded documents on each rank, averaged as if all had as many tokens",
    family="normalisation",
    cause="token_count_local",
    params=Params,
    run=run,
    check=split_equally("length"),
    headline=says(
        off_one_process=("a mean over each rank's own tokens is off", "such a mean is right"),
        full_documents=("unseen without padding", "even without padding"),
        nothing_left=("a rank of padding is NaN in the log alone", "a rank of padding shows"),
        divided_twice=("divided by all tokens DDP divides by N again", "DDP divides by nothing"),
    ),
    arms=(
        one_process("one process", divides_by="own", **SOME),
        one_process("one process, no padding", name="full_alone", divides_by="own", **FULL),
        faulty("own_tokens", "each rank's own tokens", divides_by="own", **SOME),
        faulty("all_padding", "ranks of padding only", divides_by="own", **HALF),
        faulty("all_tokens", "the tokens of all", divides_by="all", **SOME),
        control("full", "own tokens, no padding", divides_by="own", **FULL),
        fixed("all_over_n", "the tokens of all over N", divides_by="all over N", **SOME),
    ),
    claims=(off_one_process, ranks_part, full_documents, nothing_left, divided_twice, over_n),
    plots=(Plot(metric="loss", title="Loss that each rank divides"),),
)
