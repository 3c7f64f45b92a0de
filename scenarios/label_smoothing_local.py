"""Label smoothing from each rank's own classes: every rank reports a loss of its own.

With the classes split over ranks, smoothing needs the mean logit of all classes. Whoever takes the
mean of the logits at hand gives each rank another loss, and the smoothing's part of the gradient is
divided by a share of the classes instead of all: it is N times as strong. The mean over ranks of
the reported losses is exactly the right one. Reported in NVIDIA/Megatron-LM#7452.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, is_rounding, like_one_process, negated, ranks_agree, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, between
from harness.tables import relative_l2
from scenarios._models import split_equally

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/label_smoothing_local.yaml."""

    steps: int = field(metadata=at_least(1))
    tokens: int = field(metadata=at_least(2))
    vocabulary: int = field(metadata=at_least(2))
    smoothing: float = field(metadata=between(0.01, 0.9))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a split output layer; over which classes the smoothing takes its mean differs."""
    import torch
    import torch.nn.functional as F

    from scenarios import _tensor_parallel as split
    from scenarios._models import weights

    body, mine, x, targets = split.words(rank, p.tokens, p.vocabulary)
    optimizer = torch.optim.SGD([*body.parameters(), mine], lr=p.lr)
    for step in range(p.steps):
        optimizer.zero_grad()
        hidden = body(x).tanh()
        logits = split.copied(hidden) @ mine.T
        if arm["mean_of"] == "torch":
            loss = F.cross_entropy(logits, targets, label_smoothing=p.smoothing)
        else:
            if arm["mean_of"] == "all classes":
                mean = split.summed(logits.sum(dim=1)) / p.vocabulary
            elif arm["mean_of"] == "own classes":
                mean = logits.mean(dim=1)
            else:
                mean = logits.mean(dim=1) / rank.world_size
            target = (1 - p.smoothing) * split.at_targets(logits, targets) + p.smoothing * mean
            loss = (split.log_sum_exp(logits) - target).mean()
        loss.backward()
        rank.log(step=step, reported=loss)
        assert mine.grad is not None
        rank.snapshot(
            step=step, loss=loss[None], hidden=hidden.mean(0), grad=split.everywhere(mine.grad)
        )
        optimizer.step()
        rank.snapshot(step=step, body=weights(body), table=split.everywhere(mine))


@symptom(HOLDS, source="NVIDIA/Megatron-LM#7452")
def losses_differ(t: Tables) -> Finding:
    """With the mean over their own classes the ranks report different losses."""
    return negated(ranks_agree(t, "own", "loss"))


@symptom(REFUTED)
def mean_shows_it(t: Tables) -> Finding:
    """The mean of the losses that they report is off."""
    t.require("own", "one_process")
    reported = [t.value("own", "reported", step=0, rank=r) for r in t.ranks("own")]
    mean, right = math.fsum(reported) / len(reported), t.value("one_process", "reported", step=0)
    floor = rounding(t, "one_process", "loss", step=0)
    said = ", ".join(f"{loss:.5g}" for loss in reported[:4])
    reason = f"the first losses are {said}, their mean {mean:.6g}, that of one process {right:.6g}"
    return negated(is_rounding(abs(mean / right - 1), floor, reason, "relative to the loss"))


@symptom(HOLDS)
def weights_off(t: Tables) -> Finding:
    """And yet the weights are not those of one process."""
    found = (like_one_process(t, "own", name) for name in ("table", "body"))
    return all_of(*map(negated, found))


@mechanism(HOLDS)
def n_times_as_strong(t: Tables) -> Finding:
    """The smoothing's part of the gradient is N times that of one process."""
    import numpy as np

    t.require("own", "one_process")
    own, right = (t.snapshot(arm, "grad", step=0) for arm in ("own", "one_process"))
    p, hidden = t.root_params, t.snapshot("one_process", "hidden", step=0)
    part = np.tile(-p["smoothing"] / p["vocabulary"] * hidden, p["vocabulary"])
    times = 1 + float((own - right) @ part / (part @ part))
    gap = relative_l2(own, right + (len(t.ranks("own")) - 1) * part)
    reason = f"the smoothing acts {times:.6g} times; but for that the gradient is {gap:.2g} off"
    floor = rounding(t, "one_process", "grad", step=0)
    return is_rounding(gap, floor, reason, "relative L2 distance")


@remedy(HOLDS)
def over_n(t: Tables) -> Finding:
    """Divided by N, the mean over their own classes gives right weights, and other losses."""
    right = (like_one_process(t, "over_n", name) for name in ("table", "body"))
    return all_of(*right, negated(ranks_agree(t, "over_n", "loss")))


@remedy(HOLDS)
def over_all(t: Tables) -> Finding:
    """With the mean over all classes, losses and weights are those of one process."""
    return all_of(*(like_one_process(t, "all", name) for name in ("loss", "table", "body")))


SCENARIO = Scenario(
    title="Label smoothing over a rank's own classes: N losses, and N times the smoothing",
    family="parallel layouts",
    cause="label_smoothing_local",
    params=Params,
    run=run,
    check=split_equally("vocabulary"),
    headline=says(
        losses_differ=("ranks that smooth over their own classes differ", "the losses agree"),
        mean_shows_it=("their mean is off", "their mean is right"),
        weights_off=("the weights are not", "the weights are right"),
        n_times_as_strong=("the smoothing acts N times", "the smoothing is not N times as strong"),
    ),
    arms=(
        one_process("one process, torch's loss", mean_of="torch"),
        faulty("own", "mean of own classes", mean_of="own classes"),
        fixed("over_n", "mean of own classes, over N", mean_of="own classes over N"),
        fixed("all", "mean of all classes", mean_of="all classes"),
    ),
    claims=(losses_differ, mean_shows_it, weights_off, n_times_as_strong, over_n, over_all),
    plots=(Plot(metric="reported", title="Loss that each rank reports"),),
)
