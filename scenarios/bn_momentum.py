"""Batch norm's momentum is the weight of the new batch, not of the old average.

An article writes running <- m * old + (1 - m) * new with m = 0.1, which is TensorFlow's formula
with PyTorch's number. Whoever sets 0.9 to keep nine tenths of the past keeps one tenth, and the
running mean jitters like that of a single batch. It also takes the variance that normalises for the
one that is averaged: that one is unbiased, twice as large where a channel has two values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, reference
from harness.claims import HOLDS, REFUTED, mechanism, symptom
from harness.findings import all_of, is_rounding, mean_is, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/bn_momentum.yaml."""

    steps: int = field(metadata=at_least(40))
    rows: int = field(metadata=at_least(4))
    channels: int = field(metadata=at_least(64))
    momentum: float = field(metadata=between(0.08, 0.3))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Show batches to a batch norm; what momentum is taken to mean is what differs."""
    import torch
    from torch import nn

    draw = rank.generator("rows")
    m = 1.0 - p.momentum if arm["momentum"] == "of_the_old" else p.momentum
    norm = nn.BatchNorm1d(p.channels, momentum=m, dtype=torch.float64).to(rank.device)
    for step in range(p.steps):
        x = torch.randn(p.rows, p.channels, generator=draw, dtype=torch.float64).to(rank.device)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        mean, var = norm.running_mean.clone(), norm.running_var.clone()
        y = norm(x)
        biased = x.var(dim=0, correction=0)
        due = {
            "new": (1.0 - m) * mean + m * x.mean(dim=0) - norm.running_mean,
            "old": m * mean + (1.0 - m) * x.mean(dim=0) - norm.running_mean,
            "biased": (1.0 - m) * var + m * biased - norm.running_var,
            "unbiased": (1.0 - m) * var + m * x.var(dim=0) - norm.running_var,
            "normaliser": (x - x.mean(dim=0)) / (biased + norm.eps).sqrt() - y,
        }
        rank.log(step=step, **{name: gap.abs().max().item() for name, gap in due.items()})
        rank.snapshot(step=step, mean=norm.running_mean)


def formula(t: Tables, gap: str, what: str) -> Finding:
    """Decide: at every step the module did what the formula says, up to rounding."""
    t.require("of_the_new")
    off = max(t.series("of_the_new", gap).values())
    # A mean adds up as many values as the batch has rows.
    floor = dtype_floor(EPS["float64"] * t.root_params["rows"])
    return is_rounding(off, floor, f"{what} is off by {off:.2g} at most", "largest distance")


def jitter(t: Tables, arm: str, m: float, what: str) -> Finding:
    """Decide: running means vary as averages with weight m of the new batch do."""
    t.require(arm)
    means = t.snapshot(arm, "mean", step=t.root_params["steps"] - 1)
    due = m / (2.0 - m) / t.root_params["rows"]
    return mean_is([float(mean) ** 2 / due for mean in means], 1.0, what)


@mechanism(REFUTED, settles="A20")
def momentum_weighs_the_old(t: Tables) -> Finding:
    """A batch norm computes running = m * old + (1 - m) * new, with m = 0.1 by default."""
    return formula(t, "old", "m * old + (1 - m) * new")


@mechanism(HOLDS)
def momentum_weighs_the_new(t: Tables) -> Finding:
    """It computes running = (1 - m) * old + m * new."""
    return formula(t, "new", "(1 - m) * old + m * new")


@symptom(HOLDS)
def literal_formula_jitters(t: Tables) -> Finding:
    """Set to 0.9 in order to keep 0.9 of the past, the running mean is that of one batch or two."""
    m = 1.0 - t.root_params["momentum"]
    return jitter(t, "of_the_old", m, f"variance of the running mean over that due with {m:g}")


@mechanism(HOLDS)
def default_averages(t: Tables) -> Finding:
    """As PyTorch means it, 0.1 averages over nineteen batches."""
    m = t.root_params["momentum"]
    return jitter(t, "of_the_new", m, f"variance of the running mean over that due with {m:g}")


@mechanism(REFUTED, settles="A21")
def one_variance_for_both(t: Tables) -> Finding:
    """The variance that normalises a batch is the one that is averaged for evaluation."""
    return formula(t, "biased", "the average of the normalising variance")


@mechanism(HOLDS)
def unbiased_is_averaged(t: Tables) -> Finding:
    """Averaged is the unbiased variance, n / (n - 1) times the biased one, which normalises."""
    averaged = formula(t, "unbiased", "the average of the unbiased variance")
    return all_of(averaged, formula(t, "normaliser", "the output by the biased one"))


SCENARIO = Scenario(
    title="Momentum of a batch norm is the weight of the new batch, not of the old average",
    family="buffers",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        momentum_weighs_the_old=("momentum weighs the old", "momentum weighs the new batch"),
        literal_formula_jitters=("0.9 averages over hardly any", "0.9 averages as well"),
        one_variance_for_both=("one variance does both", "averaged is the unbiased variance"),
    ),
    arms=(
        reference("of_the_new", "momentum = 0.1", ranks=1, momentum="of_the_new"),
        faulty("of_the_old", "momentum = 0.9", ranks=1, momentum="of_the_old"),
    ),
    claims=(
        momentum_weighs_the_old,
        momentum_weighs_the_new,
        literal_formula_jitters,
        default_averages,
        one_variance_for_both,
        unbiased_is_averaged,
    ),
)
