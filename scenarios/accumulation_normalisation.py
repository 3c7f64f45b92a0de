"""A mean of means under gradient accumulation: tokens of a short micro-batch weigh more.

`cross_entropy` averages over the tokens that count (not -100), and dividing by the number of
micro-batches averages those averages. Unless all micro-batches hold equally many such tokens, that
is not the loss of the window, and splitting a batch changes the training. One process that
accumulates is just as wrong, and all ranks agree. Here answers of similar length are batched
together, so that ranks count alike and micro-batches do not. Reported in
huggingface/transformers#34191, meta-pytorch/torchtune#1875, OpenNMT/OpenNMT-py#2209.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

VOCABULARY = 11


@dataclass(frozen=True, kw_only=True)
class Params:
    """The values are in conf/scenario/accumulation_normalisation.yaml."""

    updates: int = field(metadata=at_least(1))
    micro: int = field(metadata=at_least(2))
    grows: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a next-token model on windows of micro-batches; what a loss is divided by differs."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import mlp, weights

    draw = rank.generator("net")
    table = torch.randn(VOCABULARY, 6, generator=draw, dtype=torch.float64)
    net = nn.Sequential(nn.Embedding.from_pretrained(table, freeze=False))
    net.append(mlp((6, 12, VOCABULARY), generator=draw))
    model = DistributedDataParallel(net.to(rank.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    longest = p.micro * p.grows
    shape = (p.updates, p.micro, p.batch, longest + 1)
    text = torch.randint(VOCABULARY, shape, generator=rank.generator("text"))
    # The prompt before an answer is not learned.
    prompt = longest - p.grows * torch.arange(1, p.micro + 1)[:, None, None]
    not_learned = torch.arange(longest) < (0 if arm["equal"] else prompt)
    labels = text[..., 1:].masked_fill(not_learned, -100)
    mine = rank.shard(rank.permutation(p.batch))
    for update in range(p.updates):
        tokens = text[update][:, mine, :-1].to(rank.device)
        target = labels[update][:, mine].to(rank.device)
        if arm["over"] == "whole":
            tokens, target = tokens.flatten(0, 1)[None], target.flatten(0, 1)[None]
        optimizer.zero_grad()
        if arm["over"] == "tokens":
            counted = (target != -100).sum()
            dist.all_reduce(counted)
        for inputs, answers in zip(tokens, target, strict=True):
            logits = model(inputs).flatten(0, 1)
            if arm["over"] == "tokens":
                total = cross_entropy(logits, answers.flatten(), reduction="sum")
                loss = total * rank.world_size / counted
            else:
                loss = cross_entropy(logits, answers.flatten()) / len(tokens)
            loss.backward()
        optimizer.step()
        rank.snapshot(step=update, weights=weights(model))


@symptom(HOLDS, source="huggingface/transformers#34191")
def accumulation_changes_training(t: Tables) -> Finding:
    """Accumulating a window's mean losses gives other weights than the window as one batch."""
    return negated(matches(t, "mean_of_means", "one_process", "weights"))


@mechanism(REFUTED)
def needs_several_ranks(t: Tables) -> Finding:
    """It takes several ranks: one process that accumulates the same losses is right."""
    return matches(t, "accumulates_alone", "one_process", "weights")


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "mean_of_means", "weights"))


@mechanism(HOLDS)
def equal_counts_are_right(t: Tables) -> Finding:
    """Where every micro-batch counts as many tokens the same code is right."""
    right = matches(t, "equal_counts", "equal_one_process", "weights")
    return all_of(right, ranks_agree(t, "equal_counts", "weights"))


@remedy(HOLDS, source="meta-pytorch/torchtune#1875")
def divide_by_tokens(t: Tables) -> Finding:
    """Sum losses, divide by the tokens of the window on all ranks: the weights of one batch."""
    return like_one_process(t, "over_tokens")


SCENARIO = Scenario(
    title="Accumulating mean losses: micro-batches with few tokens weigh as much as full ones",
    family="normalisation",
    cause="accumulation_normalisation",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        accumulation_changes_training=(
            "accumulating mean losses trains something else",
            "accumulating mean losses is right",
        ),
        needs_several_ranks=("on several ranks only", "on one process as well"),
        equal_counts_are_right=("unless all token counts are equal", "equal counts do not help"),
        divide_by_tokens=("the window's token count cures it", "token counts do not cure it"),
    ),
    arms=(
        one_process("the window as one batch", over="whole", equal=False),
        one_process("the same, equal counts", name="equal_one_process", over="whole", equal=True),
        faulty("mean_of_means", "mean loss / micro-batches", over="micro", equal=False),
        faulty("accumulates_alone", "the same on one process", ranks=1, over="micro", equal=False),
        control("equal_counts", "the same, equal token counts", over="micro", equal=True),
        fixed("over_tokens", "summed loss / tokens of the window", over="tokens", equal=False),
    ),
    claims=(
        accumulation_changes_training,
        needs_several_ranks,
        ranks_part,
        equal_counts_are_right,
        divide_by_tokens,
    ),
)
