"""Dropout at p = 0 is not 11 % smaller: the mean stays, and what is non-linear behind it moves.

What is kept is divided by 1 - p, so the mean of a layer's output stays; an article takes the factor
of the kept units, 1.11 at p = 0.1, for that of the output. What grows is the mean square: a batch
norm behind dropout learns a variance that evaluation never shows it; a ReLU makes it a larger mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import counts, is_rounding, mean_is, negated, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/dropout_scale.yaml."""

    trials: int = field(metadata=at_least(16))
    rows: int = field(metadata=at_least(16))
    width: int = field(metadata=at_least(4))
    p: float = field(metadata=between(0.05, 0.9))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Drop units of many batches; where dropout stands, and whether it acts, is what differs."""
    import torch
    from torch import nn

    for trial in range(p.trials):
        draw = rank.generator(f"trial/{trial}")
        both = torch.randn(p.rows + p.width, p.width, generator=draw, dtype=torch.float64)
        x, weight = both.to(rank.device).split((p.rows, p.width))
        x = 1 + x
        dropout = nn.Dropout(p.p)
        if arm["p"] == "zero":
            dropout.p = 0.0
        norm = nn.BatchNorm1d(p.width, eps=1e-30, momentum=1.0, device=rank.device).double()
        before = arm["norm"] == "before"
        block = nn.Sequential(norm, dropout) if before else nn.Sequential(dropout, norm)
        y = dropout(x)
        rank.log(
            step=trial,
            changed=int(not torch.equal(x, y)),
            factor=(y / x).max(),
            mean=y.mean() / x.mean(),
            square=y.norm() ** 2 / x.norm() ** 2,
            behind_relu=(y @ weight).relu().mean() / (x @ weight).relu().mean(),
        )
        block(x)
        rank.log(step=trial, phase="eval", variance=block.eval()(x).var(dim=0).mean())


def of_trials(t: Tables, arm: str, metric: str) -> list[float]:
    """Return what every trial of an arm recorded."""
    t.require(arm)
    return list(t.series(arm, metric).values())


def variance_is_one(t: Tables, arm: str) -> Finding:
    """Decide: in evaluation the variance behind the norm, a sum over rows, is 1 in every trial."""
    off = max(abs(value - 1) for value in of_trials(t, arm, "variance"))
    reason = f"the variance of {arm} in evaluation is {off:.2g} off 1 in the worst trial"
    floor = dtype_floor(EPS["float64"] * t.root_params["rows"])
    return is_rounding(off, floor, reason, "distance of the variance to 1")


@mechanism(HOLDS, settles="A09")
def survivors_are_scaled(t: Tables) -> Finding:
    """In training dropout multiplies what it keeps by 1 / (1 - p)."""
    due = 1 / (1 - t.root_params["p"])
    off = max(abs(value / due - 1.0) for value in of_trials(t, "before_norm", "factor"))
    reason = f"every kept unit is multiplied by {due:.6g}, to {off:.2g}"
    return is_rounding(off, dtype_floor(EPS["float64"]), reason, "share of the factor")


@mechanism(HOLDS, settles="A40")
def zero_takes_effect(t: Tables) -> Finding:
    """Setting p = 0 on a module in the middle of training takes effect at the next call."""
    return counts(t, "set_to_zero", "changed", 0, "outputs that are not the input")


@symptom(REFUTED, settles="A42")
def zero_is_smaller(t: Tables) -> Finding:
    """With dropout the output is larger by 1 / (1 - p), 11 % at p = 0.1, than with p = 0."""
    due = 1.0 / (1.0 - t.root_params["p"])
    return mean_is(of_trials(t, "before_norm", "mean"), due, "mean with dropout over mean without")


@mechanism(HOLDS)
def square_grows(t: Tables) -> Finding:
    """The mean square of the output grows by 1 / (1 - p)."""
    due = 1.0 / (1.0 - t.root_params["p"])
    return mean_is(of_trials(t, "before_norm", "square"), due, "mean square over that at p = 0")


@symptom(HOLDS)
def relu_turns_spread_into_mean(t: Tables) -> Finding:
    """Behind the next layer and its ReLU the mean is another one than without dropout."""
    found = of_trials(t, "before_norm", "behind_relu")
    return negated(mean_is(found, 1.0, "mean behind a ReLU over that at p = 0"))


@symptom(HOLDS)
def norm_behind_dropout_is_off(t: Tables) -> Finding:
    """A batch norm behind dropout has no unit variance in evaluation."""
    return negated(variance_is_one(t, "before_norm"))


@remedy(HOLDS)
def drop_behind_the_norm(t: Tables) -> Finding:
    """Put dropout behind the batch norm: in evaluation its variance is 1 exactly."""
    return variance_is_one(t, "after_norm")


SCENARIO = Scenario(
    title="Dropout keeps the mean of its layer, and shifts what a norm or a ReLU behind it sees",
    family="normalisation",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        zero_is_smaller=("p = 0 makes outputs smaller", "dropout leaves the mean as it is"),
        norm_behind_dropout_is_off=("a norm behind it is off", "a norm behind it is right"),
    ),
    arms=(
        reference("set_to_zero", "dropout.p = 0, training", ranks=1, p="zero", norm="behind"),
        faulty("before_norm", "dropout, then batch norm", ranks=1, p="built", norm="behind"),
        fixed("after_norm", "batch norm, then dropout", ranks=1, p="built", norm="before"),
    ),
    claims=(
        survivors_are_scaled,
        zero_takes_effect,
        zero_is_smaller,
        square_grows,
        relu_turns_spread_into_mean,
        norm_behind_dropout_is_off,
        drop_behind_the_norm,
    ),
)
