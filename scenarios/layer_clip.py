"""Clipping an LSTM "by time step": its gradient has gate rows, and no time steps to clip by.

The gradient of a weight has the weight's shape: four gates of `hidden` rows each, whatever the
length of the sequence, whose steps are added up in it. A loop over grad.shape[0] that is meant to
hold back single moments scales the rows of gates instead, each to the bound, and turns the
gradient; one clip of all of it keeps the direction. From an article on clipping.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, is_rounding, negated, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/layer_clip.yaml."""

    hidden: int = field(metadata=between(2, 1024))
    length: int = field(metadata=at_least(2))
    max_norm: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Clip the gradients of an LSTM; by what, and the length of its sequences, differ."""
    import torch

    torch.manual_seed(rank.seed)
    lstm = torch.nn.LSTM(16, p.hidden).double()
    x = torch.randn(p.length * arm["times"], 4, 16, dtype=torch.float64)
    lstm(x)[0].square().mean().backward()
    grads = [weight.grad for weight in lstm.parameters() if weight.grad is not None]
    # An explosion: the bound is to act on every row.
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    for grad in grads:
        grad *= 1000 * p.max_norm / norm
    before = torch.cat([grad.flatten() for grad in grads])
    if arm["clips"] == "rows":
        for grad in grads:
            for row in range(grad.shape[0]):
                grad[row] *= (p.max_norm / grad[row].norm()).clamp(max=1.0)
    elif arm["clips"] == "all":
        torch.nn.utils.clip_grad_norm_(lstm.parameters(), p.max_norm)
    after = torch.cat([grad.flatten() for grad in grads])
    turned = 1 - torch.nn.functional.cosine_similarity(before, after, dim=0)
    rank.log(step=0, rows=grads[0].shape[0], turned=turned.abs(), steps=len(x))


def keeps_direction(t: Tables, arm: str) -> Finding:
    """Decide: the clipped gradient points where the gradient did."""
    t.require(arm)
    turned = t.value(arm, "turned", step=0)
    entries = 4 * t.root_params["hidden"] * (t.root_params["hidden"] + 18)
    reason = f"{arm}: 1 - cosine to the gradient before the clip is {turned:.2g}"
    # The cosine is a sum over all entries, and each addition is rounded.
    return is_rounding(turned, dtype_floor(EPS["float64"] * entries**0.5), reason, "1 - cosine")


@mechanism(REFUTED, settles="A65")
def rows_are_steps(t: Tables) -> Finding:
    """grad.shape[0] of an LSTM's weight is the number of time steps."""
    t.require("unclipped", "longer")
    rows, steps = (
        [t.value(arm, what, step=0) for arm in ("unclipped", "longer")]
        for what in ("rows", "steps")
    )
    reason = f"{rows} rows for sequences of {steps} steps"
    return (holds if rows == steps else refuted)(reason, effect=float(rows[0]), unit="rows")


@mechanism(HOLDS, settles="~A65")
def rows_are_gates(t: Tables) -> Finding:
    """It is four times the hidden size, however long the sequences are."""
    due = 4 * t.root_params["hidden"]
    return all_of(*(counts(t, arm, "rows", due, "rows") for arm in ("unclipped", "longer")))


@symptom(HOLDS)
def rows_turn(t: Tables) -> Finding:
    """Clipping row by row turns the gradient."""
    return negated(keeps_direction(t, "by_row"))


@remedy(HOLDS)
def whole_keeps(t: Tables) -> Finding:
    """One clip of the whole gradient keeps its direction."""
    return keeps_direction(t, "whole")


SCENARIO = Scenario(
    title="Clipping an LSTM by time step: the rows of its gradient are gates",
    family="clipping",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        rows_are_steps=("rows are time steps", "rows are not time steps"),
        rows_are_gates=("they are gates", "nor gates"),
        rows_turn=("clipping by row turns the gradient", "clipping by row keeps the direction"),
    ),
    arms=(
        reference("unclipped", "no clip", ranks=1, clips="nothing", times=1),
        control("longer", "sequences 3 times as long", ranks=1, clips="nothing", times=3),
        faulty("by_row", "each row by itself", ranks=1, clips="rows", times=1),
        fixed("whole", "clip_grad_norm_", ranks=1, clips="all", times=1),
    ),
    claims=(rows_are_steps, rows_are_gates, rows_turn, whole_keeps),
)
