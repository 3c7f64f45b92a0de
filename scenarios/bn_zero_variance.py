"""A dead channel takes running_var to 0: no NaN, a gain of 316, and an overflow in float16.

A batch norm divides by sqrt(running_var + eps), so that a variance of 0 gives 1 / sqrt(1e-5) and
not NaN. But a channel that was constant in training and wakes up in evaluation is multiplied by
316, which float16 bears up to 207. The average itself never gets to 0: it sticks at the smallest
numbers of its dtype. NaN takes a negative variance, or an eps of 0 by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, is_rounding, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/bn_zero_variance.yaml."""

    batches: int = field(metadata=at_least(1000))
    rows: int = field(metadata=at_least(2))
    later: float = field(metadata=between(210.0, 10000.0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a norm on one channel, evaluate; what its variance is and the dtype are what differ."""
    import torch
    from torch import nn

    norm = nn.BatchNorm1d(1, eps=arm.get("eps", 1e-5)).to(rank.device)
    assert norm.running_var is not None
    assert norm.running_mean is not None
    batches = p.batches if arm["channel"] == "dead" else 100
    for _ in range(batches):
        x = torch.zeros(p.rows, 1, device=rank.device)
        if arm["channel"] == "alive":
            x.normal_()
        norm(x)
    rank.log(step=batches, running_var=norm.running_var)
    if arm["channel"] == "zero":
        norm.running_var.zero_()
    if arm["channel"] == "negative":
        norm.running_var.fill_(-1.0)
    norm.eval()
    one = norm(norm.running_mean[None] + 1.0)
    half = norm.half()(torch.tensor([[p.later]], device=rank.device).half())
    rank.log(step=p.batches, gain=one, half=int(half.isfinite()), finite=int(one.isfinite()))


def gain_is(t: Tables, arm: str, due: float) -> Finding:
    """Decide: in evaluation the channel is multiplied by this, up to rounding in float32."""
    t.require(arm)
    gain = t.last(arm, "gain")
    said = f"{arm}: the gain is {gain:.6g}, 1 / sqrt(eps) is {due:.6g}"
    return is_rounding(abs(gain / due - 1.0), dtype_floor(EPS["float32"]), said, "share")


@symptom(REFUTED, settles="B51")
def zero_gives_nan(t: Tables) -> Finding:
    """A running_var of 0 gives NaN."""
    return counts(t, "zero", "finite", 0, "finite outputs")


@mechanism(HOLDS)
def zero_gives_a_gain(t: Tables) -> Finding:
    """A running_var of 0 gives a gain of 1 / sqrt(eps), 316."""
    return gain_is(t, "zero", 1e-5**-0.5)


@mechanism(HOLDS)
def negative_gives_nan(t: Tables) -> Finding:
    """What gives NaN is a negative variance."""
    return counts(t, "negative", "finite", 0, "finite outputs")


@mechanism(REFUTED)
def average_reaches_zero(t: Tables) -> Finding:
    """The running average of a constant channel ends at 0."""
    t.require("dead")
    last = t.last("dead", "running_var")
    said = f"after {t.root_params['batches']} batches running_var is {last:.3g}"
    return (holds if last == 0.0 else refuted)(said, effect=last, unit="variance")


@symptom(HOLDS)
def overflows_in_half(t: Tables) -> Finding:
    """A channel that wakes up again overflows float16 behind such a norm."""
    unit = "finite outputs in float16"
    return all_of(counts(t, "dead", "half", 0, unit), counts(t, "alive", "half", 1, unit))


@remedy(HOLDS)
def larger_eps(t: Tables) -> Finding:
    """With an eps of 1e-1 it does not: the gain is then 3."""
    return counts(t, "larger_eps", "half", 1, "finite outputs in float16")


SCENARIO = Scenario(
    title="A dead channel in a batch norm: no NaN, but a gain of 316 once it wakes up",
    family="numerics",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        zero_gives_nan=("a variance of 0 gives NaN", "a variance of 0 gives no NaN"),
        overflows_in_half=("its gain overflows float16", "its gain fits into float16"),
    ),
    arms=(
        reference("alive", "channel alive", ranks=1, channel="alive"),
        faulty("dead", "channel constant", ranks=1, channel="dead"),
        control("zero", "running_var = 0", ranks=1, channel="zero"),
        control("negative", "running_var = -1", ranks=1, channel="negative"),
        fixed("larger_eps", "constant, eps = 0.1", ranks=1, channel="dead", eps=0.1),
    ),
    claims=(
        zero_gives_nan,
        zero_gives_a_gain,
        negative_gives_nan,
        average_reaches_zero,
        overflows_in_half,
        larger_eps,
    ),
)
