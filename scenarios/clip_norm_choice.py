"""L1 or L2 norm for clipping: either only shortens the gradient, none turns it.

A clip by norm multiplies the whole gradient by one number: the ratio of a spike to the rest and
the direction stay as they are, whatever the norm. The L1 norm is never below the L2 norm, so that
at one bound L1 never leaves more of a spike than L2. Only a clip by value turns the gradient. From
an article that computes the sizes rightly and concludes the opposite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism, symptom
from harness.findings import is_rounding, negated, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/clip_norm_choice.yaml."""

    spike: float = field(metadata=at_least(1e4))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Clip gradients that have one spike; what is bounded differs."""
    import torch
    from torch.nn.functional import cosine_similarity
    from torch.nn.utils import clip_grad_norm_, clip_grad_value_

    cases = (
        ("article", 1.0, 1000.0, 500.0, torch.float64),
        ("single", 1.0, 1000.0, 500.0, torch.float32),
        ("great", 1e-3, p.spike, 1e3, torch.float64),
        ("below", 1.0, 1000.0, 1e4, torch.float64),
        ("tiny", 0.0, 5e-7, 5.1e-7, torch.float64),
    )
    for case, rest, spike, bound, dtype in cases:
        weight = torch.zeros(1000, dtype=dtype, device=rank.device, requires_grad=True)
        before = torch.full_like(weight, rest, requires_grad=False)
        before[-1] = spike
        weight.grad = before.clone()
        if arm["norm_type"]:
            clip_grad_norm_([weight], bound, norm_type=arm["norm_type"])
        else:
            clip_grad_value_([weight], bound)
        after, turned = weight.grad, 1 - cosine_similarity(before, weight.grad, dim=0)
        left = after[-1] / before[-1]
        rank.log(step=0, phase=case, spike=after[-1], rest=after[0], left=left, turned=turned)


def seen(t: Tables, arm: str, metric: str, case: str = "article") -> float:
    """Return what an arm recorded of one gradient after the clip."""
    t.require(arm)
    return float(t.value(arm, metric, step=0, phase=case))


def direction_kept(t: Tables, arm: str) -> Finding:
    """Decide: the gradient points where it did before the clip."""
    turned = abs(seen(t, arm, "turned"))
    reason = f"{arm}: 1 - cosine to the gradient before the clip is {turned:.2g}"
    # The cosine sums up 1,000 products, and each addition is rounded.
    return is_rounding(turned, dtype_floor(EPS["float64"] * 1000**0.5), reason, "1 - cosine")


@symptom(REFUTED, settles="A14")
def l1_leaves_more(t: Tables) -> Finding:
    """A bound of 1e3 cuts a spike of 1e6 to 1e3 in the L2 norm, and in the L1 norm to 1e5."""
    l1, l2 = seen(t, "l1", "spike", "great"), seen(t, "l2", "spike", "great")
    reason = f"of a spike of {t.root_params['spike']:g} L1 leaves {l1:.6g}, L2 {l2:.6g}"
    return (holds if l1 > l2 else refuted)(reason, effect=l1 / l2, unit="L1 over L2")


@symptom(HOLDS, settles="A60")
def sizes(t: Tables) -> Finding:
    """Of 999 ones and 1000, a bound of 500 leaves a spike of 499.7 under L2, of 250 under L1."""
    l2, l1 = seen(t, "l2", "spike"), seen(t, "l1", "spike")
    right = int(l2 * 10) == 4997 and round(l1) == 250  # The article cuts digits of the first off.
    return (holds if right else refuted)(f"L2 leaves {l2:.6g}, L1 {l1:.6g}")


@mechanism(REFUTED, settles="A61")
def l1_averages(t: Tables) -> Finding:
    """L2 keeps the relative strength of the spike, L1 averages the dimensions."""
    l2, l1 = (seen(t, arm, "spike") / seen(t, arm, "rest") for arm in ("l2", "l1"))
    reason = f"the spike is {l2:.6g} times the rest under L2, {l1:.6g} times under L1"
    return negated(is_rounding(abs(l1 / l2 - 1), dtype_floor(EPS["float64"]), reason, "share"))


@mechanism(REFUTED, settles="A62")
def l2_turns(t: Tables) -> Finding:
    """L2 clipping erases the direction of a shock in one dimension."""
    return negated(direction_kept(t, "l2"))


@mechanism(HOLDS)
def value_turns(t: Tables) -> Finding:
    """A clip by value does turn the gradient."""
    return negated(direction_kept(t, "value"))


@mechanism(HOLDS, settles="A59")
def formula(t: Tables) -> Finding:
    """Above the bound a gradient is multiplied by bound / norm, below it is left alone."""
    below, left = seen(t, "l2", "left", "below"), seen(t, "l2", "left", "single")
    due = 500 / math.sqrt(999 + 1000**2)
    reason = f"above the bound {left:.8g} is left, {due:.8g} by the formula; below it {below}"
    return is_rounding(
        abs(left / due - 1) + abs(below - 1), dtype_floor(EPS["float32"]), reason, "share"
    )


@mechanism(REFUTED, settles="A59")
def tiny_spared(t: Tables) -> Finding:
    """A gradient below the bound is left alone however small it is."""
    left = seen(t, "l2", "left", "tiny")
    reason = f"of a norm of 5e-7 under a bound of 5.1e-7 {left:.3g} is left: 1e-6 is added to norms"
    return (holds if left == 1.0 else refuted)(reason, effect=left, unit="share left")


SCENARIO = Scenario(
    title="L1 or L2: a clip by norm shortens the gradient and never turns it",
    family="clipping",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        l2_turns=("a clip by norm turns the gradient", "a clip by norm never turns the gradient"),
        l1_leaves_more=("L1 leaves more than L2", "at one bound L1 never leaves more than L2"),
        value_turns=("a clip by value does turn it", "neither does a clip by value"),
    ),
    arms=(
        reference("l2", "clip_grad_norm_", ranks=1, norm_type=2.0),
        control("l1", "norm_type=1", ranks=1, norm_type=1.0),
        control("value", "clip_grad_value_", ranks=1, norm_type=None),
    ),
    claims=(l1_leaves_more, sizes, l1_averages, l2_turns, value_turns, formula, tiny_spared),
)
