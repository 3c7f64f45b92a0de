"""A gradient self-test that never clears the gradient: its right answer can never come out.

The test runs backward with dropout, then without, and divides the two gradient norms: "about 1 is
right, 0.5 or 2 is the scale trap". Without zero_grad in between the second backward adds to the
first, and the ratio is sqrt(2 + width / (4 * kept)), 1.5 or more, whatever dropout does. With
zero_grad it is 1/sqrt(2) for p = 0.5, not 1 either: half of the units had no gradient the first
time. From an article's self-assessment, whose pass rate therefore means nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, mean_is, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/gradient_self_test.yaml."""

    trials: int = field(metadata=at_least(8))
    width: int = field(metadata=at_least(4))
    p: float = field(metadata=between(0.05, 0.9))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Take the test many times; whether it clears the gradient is what differs."""
    import torch
    from torch import nn

    for trial in range(p.trials):
        layer = nn.Linear(8, p.width, bias=False, dtype=torch.float64, device=rank.device)
        dropout = nn.Dropout(p.p if arm["dropout"] else 0.0)
        x = torch.randn(8, dtype=torch.float64, device=rank.device)
        dropout(layer(x)).sum().backward()
        assert layer.weight.grad is not None
        first = layer.weight.grad.clone()
        if arm["clears"]:
            layer.zero_grad()
        dropout.eval()
        dropout(layer(x)).sum().backward()
        second = layer.weight.grad
        # Without dropout every row of the gradient is x: what the second backward alone gives.
        rank.log(
            step=trial,
            kept=int(first.any(dim=1).sum()),
            ratio=second.norm() / first.norm() if first.any() else None,
            not_added=(second - first - x).norm() / second.norm(),
        )


def ratios(t: Tables, arm: str) -> list[float]:
    """Return the ratio of every trial in which dropout left a unit."""
    t.require(arm)
    return [ratio for ratio in t.series(arm, "ratio").values() if ratio is not None]


def near_one(t: Tables, arm: str) -> Finding:
    """Say whether any trial comes within 5 % of the answer that counts as right."""
    found = ratios(t, arm)
    near = sum(0.95 <= ratio <= 1.05 for ratio in found)
    evidence = {"smallest": min(found), "median": sorted(found)[len(found) // 2], "near_1": near}
    reason = f"{near} of {len(found)} ratios are near 1; the smallest is {min(found):.4g}"
    return (holds if near else refuted)(reason, effect=min(found), unit="ratio", evidence=evidence)


@symptom(REFUTED, settles="A70")
def right_answer_occurs(t: Tables) -> Finding:
    """The test as printed can give its right answer, a ratio near 1."""
    return near_one(t, "as_printed")


@mechanism(HOLDS)
def second_adds_to_first(t: Tables) -> Finding:
    """The second backward adds to the gradient of the first."""
    t.require("as_printed")
    off = max(t.series("as_printed", "not_added").values())
    reason = f"the second gradient is the first plus the clean one, to {off:.2g}"
    return is_rounding(off, dtype_floor(EPS["float64"]), reason, "share of the gradient")


@remedy(REFUTED)
def zero_grad_gives_one(t: Tables) -> Finding:
    """With zero_grad in between a sound dropout gives a ratio of 1 on average."""
    return mean_is(ratios(t, "cleared"), 1.0, "ratio with zero_grad")


@mechanism(HOLDS)
def kept_units_decide(t: Tables) -> Finding:
    """Cleared, the ratio is (1 - p) times the root of all units over the kept ones."""
    kept = t.series("cleared", "kept")
    width, p = t.root_params["width"], t.root_params["p"]
    pairs = [
        (ratio, (1 - p) * math.sqrt(width / kept[trial]))
        for trial, ratio in t.series("cleared", "ratio").items()
        if ratio is not None
    ]
    off = max(abs(ratio / due - 1) for ratio, due in pairs)
    reason = f"the ratios of {len(pairs)} trials follow from the kept units, to {off:.2g}"
    # A norm adds up as many squares as the gradient has entries, and each addition is rounded.
    return is_rounding(off, dtype_floor(EPS["float64"] * width), reason, "share of the ratio")


@mechanism(HOLDS)
def one_without_dropout(t: Tables) -> Finding:
    """Without dropout the cleared test gives exactly 1."""
    found = set(ratios(t, "no_dropout"))
    return (holds if found == {1.0} else refuted)(f"ratios: {sorted(found)[:3]}")


SCENARIO = Scenario(
    title="A gradient self-test without zero_grad can never give its own right answer",
    family="gradients",
    cause="gradients_not_cleared",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        right_answer_occurs=("the test can pass", "the test can never pass"),
        second_adds_to_first=("its second backward adds to the first", "nothing is added up"),
        zero_grad_gives_one=("zero_grad makes it right", "zero_grad makes it another wrong number"),
    ),
    arms=(
        reference("no_dropout", "cleared, p = 0", ranks=1, dropout=False, clears=True),
        faulty("as_printed", "two backwards, no zero_grad", ranks=1, dropout=True, clears=False),
        fixed("cleared", "zero_grad in between", ranks=1, dropout=True, clears=True),
    ),
    claims=(
        right_answer_occurs,
        second_adds_to_first,
        zero_grad_gives_one,
        kept_units_decide,
        one_without_dropout,
    ),
)
