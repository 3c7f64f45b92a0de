"""A softmax written by hand overflows at 89 and divides 0 by 0 at -104; F.softmax does neither.

exp(89) is past float32, and exp(-104) is below its smallest number. F.softmax subtracts the largest
logit first, which changes nothing on paper and puts a 1 into the denominator. An article describes
the formula on paper and blames F.softmax; it also takes e^-100 for 0, which it is not in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, is_rounding, negated, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between, refuted
from harness.tables import relative_l2

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

CASES = ("moderate", "overflow", "underflow")


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/softmax_by_hand.yaml."""

    classes: int = field(metadata=at_least(2))
    large: float = field(metadata=between(89.0, 700.0))
    below: float = field(metadata=between(-10000.0, -104.0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Take the softmax of three sets of logits; how it is written is what differs."""
    import torch

    dtype = torch.float64 if arm["dtype"] == "float64" else torch.float32
    cases = (
        torch.randn(p.classes, generator=rank.generator("logits")),
        torch.tensor([p.large, 0.0, -p.large]),
        torch.full((3,), p.below),
    )
    for case, logits in zip(CASES, cases, strict=True):
        x = logits.to(rank.device, dtype)
        if arm["softmax"] == "by_hand":
            log_sum = x.exp().sum().log()
            probabilities = x.exp() / x.exp().sum()
        elif arm["softmax"] == "shifted":
            log_sum = x.max() + (x - x.max()).exp().sum().log()
            probabilities = (x - x.max()).exp() / (x - x.max()).exp().sum()
        else:
            log_sum = x.logsumexp(dim=0)
            probabilities = x.softmax(dim=0)
        rank.snapshot(step=0, phase=case, probabilities=probabilities, log_sum=log_sum)
    rank.log(step=0, e_to_minus_100=torch.tensor(-100.0, dtype=dtype, device=rank.device).exp())


def right(t: Tables, arm: str, case: str, name: str = "probabilities") -> Finding:
    """Decide: what the arm computes is that of float64, up to the rounding of float32."""
    t.require(arm, "in_float64")
    found, due = (t.snapshot(one, name, step=0, phase=case) for one in (arm, "in_float64"))
    gap = relative_l2(found, due)
    if math.isnan(gap):
        return refuted(f"{arm}, {case}: {name} is not finite")
    floor = dtype_floor(EPS["float32"])
    reason = f"{arm}, {case}: {name} is {gap:.2g} from float64"
    return is_rounding(gap, floor, reason, "relative L2 distance")


@symptom(HOLDS, settles="A52")
def by_hand_overflows(t: Tables) -> Finding:
    """e^100 exceeds float32, and exp(x) / exp(x).sum() is not a number."""
    return negated(right(t, "by_hand", "overflow"))


@symptom(REFUTED, settles="A52")
def softmax_overflows(t: Tables) -> Finding:
    """So softmax overflows at such logits, F.softmax included."""
    return negated(right(t, "softmax", "overflow"))


@mechanism(REFUTED, settles="A53")
def minus_100_is_zero(t: Tables) -> Finding:
    """e^-100 underflows to 0 in float32."""
    t.require("softmax")
    return counts(t, "softmax", "e_to_minus_100", 0, "is e^-100 in float32")


@symptom(REFUTED, settles="A53")
def denominator_is_zero(t: Tables) -> Finding:
    """Where every exponential is 0 the denominator of F.softmax is 0."""
    return negated(right(t, "softmax", "underflow"))


@symptom(HOLDS)
def by_hand_divides_by_zero(t: Tables) -> Finding:
    """By hand it is: 0 / 0 is not a number."""
    return negated(right(t, "by_hand", "underflow"))


@mechanism(HOLDS, settles="A54")
def shift_is_an_identity(t: Tables) -> Finding:
    """On paper log sum e^x is c + log sum e^(x - c), and computed it is, up to rounding."""
    return all_of(*(right(t, "shifted", case, "log_sum") for case in CASES))


@remedy(HOLDS)
def subtract_the_largest(t: Tables) -> Finding:
    """Subtract the largest logit first: right at all logits."""
    return all_of(*(right(t, "shifted", case) for case in CASES))


SCENARIO = Scenario(
    title="A softmax by hand overflows at a logit of 89; F.softmax subtracts the largest first",
    family="numerics",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        by_hand_overflows=("exp(x) / exp(x).sum() overflows", "it does not overflow by hand"),
        softmax_overflows=("F.softmax does too", "F.softmax does not"),
    ),
    arms=(
        reference("softmax", "F.softmax, float32", ranks=1, softmax="torch", dtype="float32"),
        reference("in_float64", "F.softmax, float64", ranks=1, softmax="torch", dtype="float64"),
        faulty("by_hand", "exp(x) / sum", ranks=1, softmax="by_hand", dtype="float32"),
        fixed("shifted", "of x - x.max()", ranks=1, softmax="shifted", dtype="float32"),
    ),
    claims=(
        by_hand_overflows,
        softmax_overflows,
        minus_100_is_zero,
        denominator_is_zero,
        by_hand_divides_by_zero,
        shift_is_an_identity,
        subtract_the_largest,
    ),
)
