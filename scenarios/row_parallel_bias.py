"""The bias of a layer whose rows are split, added on every rank before the sum: it counts N times.

Each rank multiplies its share of the inputs, and an all-reduce adds up what they get. A rank that
uses a plain Linear for its share adds the whole bias, so that the sum has it N times: a model that
was loaded starts off wrong. With 1/N of it on each rank the start is right; but each rank's bias
gets 1/N of the gradient as well, and learns N times too slowly. All ranks agree in either case.
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
from harness.scenario import Arm, Finding, Plot, Scenario, at_least
from harness.tables import relative_l2
from scenarios._models import split_equally

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/row_parallel_bias.yaml."""

    steps: int = field(metadata=at_least(2))
    tokens: int = field(metadata=at_least(2))
    hidden: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a loaded model with a split layer; where its bias is added differs."""
    import torch

    from scenarios import _tensor_parallel as split
    from scenarios._models import FEATURES, rows

    norm, into, out = split.layers(rank, p.hidden)
    loaded = torch.randn(FEATURES, generator=rank.generator("bias"), dtype=torch.float64)
    bias = loaded.to(rank.device).requires_grad_()
    optimizer = torch.optim.SGD([into, out, *norm.parameters(), bias], lr=p.lr)
    x, y = rows(rank, p.tokens, whole=True)
    for step in range(p.steps):
        optimizer.zero_grad()
        share = torch.tanh(split.copied(norm(x)) @ into.T) @ out
        if arm["adds"] == "before the sum":
            output = split.summed(share + bias)
        elif arm["adds"] == "1/N before the sum":
            output = split.summed(share + bias / rank.world_size)
        else:
            output = split.summed(share) + bias
        loss = torch.nn.functional.mse_loss(output, y.expand_as(x))
        loss.backward()
        assert bias.grad is not None
        rank.log(step=step, loss=loss)
        rank.snapshot(step=step, start=bias, output=output.mean(dim=0), of_bias=bias.grad)
        optimizer.step()
        rank.snapshot(step=step, bias=bias)


@symptom(HOLDS)
def training_off(t: Tables) -> Finding:
    """Added on every rank, the bias becomes another than that of one process."""
    return negated(matches(t, "before", "one_process", "bias"))


@mechanism(HOLDS)
def n_biases(t: Tables) -> Finding:
    """What the loaded model returns has N biases instead of one."""
    t.require("before", "one_process")
    right, got = (t.snapshot(arm, "output", step=0) for arm in ("one_process", "before"))
    due = right + (len(t.ranks("before")) - 1) * t.snapshot("one_process", "start", step=0)
    gap = relative_l2(got, due)
    reason = f"the mean output is {gap:.2g} from the right one with N - 1 more biases"
    floor = rounding(t, "one_process", "output", step=0)
    return is_rounding(gap, floor, reason, "relative L2 distance")


@symptom(REFUTED)
def ranks_differ(t: Tables) -> Finding:
    """The ranks return different outputs, or their biases part."""
    found = (ranks_agree(t, arm, "bias") for arm in ("before", "over_n"))
    return negated(all_of(ranks_agree(t, "before", "output"), *found))


@symptom(HOLDS)
def starts_right(t: Tables) -> Finding:
    """With 1/N of the bias on each rank the loaded model returns what it should."""
    return matches(t, "over_n", "one_process", "output", step=0)


@mechanism(HOLDS)
def nth_of_gradient(t: Tables) -> Finding:
    """Each rank's bias then gets 1/N of its gradient."""
    part = 1 / len(t.ranks("over_n"))
    return matches(t, "over_n", "one_process", "of_bias", step=0, times=part)


@remedy(REFUTED)
def over_n(t: Tables) -> Finding:
    """Adding 1/N of the bias on each rank trains it like one process."""
    return like_one_process(t, "over_n", "bias")


@remedy(HOLDS)
def behind(t: Tables) -> Finding:
    """Added behind the sum, once, the bias is that of one process."""
    return like_one_process(t, "behind", "bias")


SCENARIO = Scenario(
    title="A split layer whose bias each rank adds before the sum: N biases",
    family="parallel layouts",
    cause="row_parallel_bias",
    params=Params,
    run=run,
    check=split_equally("hidden"),
    headline=says(
        n_biases=("a bias added on every rank counts N times", "a bias added on every rank is off"),
        starts_right=("1/N of it starts right", "1/N of it starts off"),
        over_n=("and trains right", "and learns 1/N as fast"),
    ),
    arms=(
        one_process("one process", adds="behind the sum"),
        faulty("before", "on every rank before the sum", adds="before the sum"),
        faulty("over_n", "1/N of it on every rank", adds="1/N before the sum"),
        fixed("behind", "once, behind the sum", adds="behind the sum"),
    ),
    claims=(training_off, n_biases, ranks_differ, starts_right, nth_of_gradient, over_n, behind),
    plots=(Plot(metric="loss", title="Loss", log=True),),
)
