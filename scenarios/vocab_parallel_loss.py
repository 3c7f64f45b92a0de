"""Gathered logits, given to a cross-entropy that expects a share of them: log(N) too high.

With the output layer's classes split over ranks, the loss adds up exponentials of all ranks, and
takes the target's logit from whoever has it. If the logits were gathered before, as for a metric,
N ranks each add all classes: the loss is high by log(N). That is a constant, but not all: each rank
looks for targets behind the classes of the one before it, and all ranks but the first find none.
They only ever push their classes down. Reported in NVIDIA/Megatron-LM#7452.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, is_rounding, like_one_process, negated, ranks_agree, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted, unknown
from scenarios._models import split_equally

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/vocab_parallel_loss.yaml."""

    steps: int = field(metadata=at_least(1))
    tokens: int = field(metadata=at_least(2))
    vocabulary: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a split output layer; which logits are given to which loss differs."""
    import torch

    from scenarios import _tensor_parallel as split
    from scenarios._models import weights

    body, mine, x, targets = split.words(rank, p.tokens, p.vocabulary)
    bias = mine[:, 0].detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([*body.parameters(), mine, bias], lr=p.lr)
    for step in range(p.steps):
        optimizer.zero_grad()
        logits = split.copied(body(x).tanh()) @ mine.T + bias
        if arm["logits"] == "gathered":
            logits = split.gathered(logits)
        if arm["loss"] == "sharded":
            loss = (split.log_sum_exp(logits) - split.at_targets(logits, targets)).mean()
        else:
            loss = torch.nn.functional.cross_entropy(logits, targets)
        loss.backward()
        assert bias.grad is not None
        rank.log(step=step, reported=loss, raised=int((bias.grad < 0).sum()))
        optimizer.step()
        rank.snapshot(step=step, loss=loss[None], body=weights(body), table=split.everywhere(mine))


@symptom(HOLDS, source="NVIDIA/Megatron-LM#7452")
def high_by_log_n(t: Tables) -> Finding:
    """Given gathered logits the first loss is high by log(N)."""
    t.require("gathered", "one_process")
    right, due = t.value("one_process", "reported", step=0), math.log(len(t.ranks("gathered")))
    high = t.value("gathered", "reported", step=0) - right
    floor = rounding(t, "one_process", "loss", step=0)
    reason = f"the first loss is {high:.6g} too high; log(N) is {due:.6g}"
    return is_rounding(abs(high - due) / right, floor, reason, "relative to the loss")


@mechanism(REFUTED)
def only_a_constant(t: Tables) -> Finding:
    """A constant has no gradient: the weights are those of one process all the same."""
    found = (like_one_process(t, "gathered", name) for name in ("table", "body"))
    return negated(all_of(*map(negated, found)))


@mechanism(HOLDS)
def targets_lost(t: Tables) -> Finding:
    """All ranks but the first lose their targets: no class of theirs is ever raised."""
    t.require("gathered", "split")
    others = t.ranks("gathered")[1:]
    lost, due = (
        [sum(t.series(arm, "raised", rank=r).values()) for r in others]
        for arm in ("gathered", "split")
    )
    if not all(due):
        return unknown(f"given their own logits the other ranks raise {due} classes: too few")
    reason = f"the other ranks raise {lost} classes, given their own logits {due}"
    return (refuted if any(lost) else holds)(reason, effect=float(sum(lost)), unit="classes")


@symptom(REFUTED)
def ranks_show_it(t: Tables) -> Finding:
    """The ranks report different losses, or their replicas part."""
    return negated(all_of(ranks_agree(t, "gathered", "loss"), ranks_agree(t, "gathered", "body")))


@remedy(HOLDS)
def torch_of_gathered(t: Tables) -> Finding:
    """Gathered logits go with torch's own cross-entropy: the ranks train like one process."""
    return all_of(*(like_one_process(t, "plain", name) for name in ("table", "body")))


@remedy(HOLDS)
def each_its_share(t: Tables) -> Finding:
    """Given each rank's own logits they train like one process."""
    return all_of(*(like_one_process(t, "split", name) for name in ("table", "body")))


SCENARIO = Scenario(
    title="Gathered logits in a sharded cross-entropy: log(N) too high, most targets lost",
    family="parallel layouts",
    cause="vocab_parallel_loss",
    params=Params,
    run=run,
    check=split_equally("vocabulary"),
    headline=says(
        high_by_log_n=("gathered logits put the loss up by log(N)", "the loss is not up by log(N)"),
        only_a_constant=("and change nothing else", "and the weights are off"),
        targets_lost=("all ranks but one lose their targets", "no rank loses its targets"),
        ranks_show_it=("the ranks part", "the ranks agree"),
    ),
    arms=(
        one_process("one process, torch's loss", logits="own", loss="torch"),
        faulty("gathered", "sharded loss, all logits", logits="gathered", loss="sharded"),
        fixed("plain", "torch's loss, all logits", logits="gathered", loss="torch"),
        fixed("split", "sharded loss, own logits", logits="own", loss="sharded"),
    ),
    claims=(
        high_by_log_n,
        only_a_constant,
        targets_lost,
        ranks_show_it,
        torch_of_gathered,
        each_its_share,
    ),
    plots=(Plot(metric="reported", title="Loss"),),
)
