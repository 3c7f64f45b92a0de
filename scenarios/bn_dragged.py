"""Ten batches of shifted images drag a running mean along: 65 % of the way, however long it is.

An article has it that ten batches move running_mean by half a standard deviation and pollute it.
They move it by 1 - 0.9 ** 10 of any shift, so by half a deviation only if the shift is 0.77, and
always towards the data that evaluation will see. It also has it that a LayerNorm avoids the shift:
one that sees the shifted rows themselves does, one behind a frozen batch norm and a ReLU does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

MOMENTUM = 0.1
"""Of a batch norm that nobody has told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/bn_dragged.yaml."""

    batches: int = field(metadata=at_least(1))
    rows: int = field(metadata=at_least(8))
    channels: int = field(metadata=at_least(8))
    shifts: tuple[float, ...] = field(metadata=at_least(0.1))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Show shifted rows to a normalisation; which one, and in which mode, is what differs."""
    import torch
    from torch import nn

    x = torch.randn(p.rows, p.channels, generator=rank.generator("rows")).double()
    x = ((x - x.mean(dim=0)) / x.std(dim=0)).to(rank.device)
    for number, shift in enumerate(p.shifts):
        shifted = shift + (1.0 + shift) * x
        # Their eps of 1e-5 would show beside rounding, and is not what is asked here.
        norm = nn.BatchNorm1d(p.channels, eps=1e-30, dtype=torch.float64).to(rank.device)
        layer_norm = nn.LayerNorm(p.channels, eps=1e-30, elementwise_affine=False)
        if arm["norm"] == "frozen":
            norm.eval()
        for _ in range(p.batches):
            norm(shifted)
        assert norm.running_mean is not None
        rank.snapshot(step=number, running_mean=norm.running_mean)
        if arm["layer_norm"] == "on_the_rows":
            before, features = layer_norm(x), layer_norm(shifted)
        else:
            before, features = layer_norm(norm(x).relu()), layer_norm(norm(shifted).relu())
        rank.log(step=number, features_moved=(features - before).norm() / before.norm())


def moves(t: Tables, arm: str) -> list[tuple[float, float]]:
    """Return each shift with the distance that the running mean has gone, in deviations."""
    t.require(arm)
    shifts = list(t.root_params["shifts"])
    return [
        (shift, float(t.snapshot(arm, "running_mean", step=number).mean()))
        for number, shift in enumerate(shifts)
    ]


def rounding(t: Tables, off: float, reason: str) -> Finding:
    """Decide: a distance is no more than the rounding of as many updates and rows."""
    updates = t.root_params["batches"] * t.root_params["rows"]
    return is_rounding(off, dtype_floor(EPS["float64"] * updates), reason, "distance")


def features_stay(t: Tables, arm: str) -> Finding:
    """Decide: behind its LayerNorm the arm has the features of the rows that are not shifted."""
    t.require(arm)
    moved = max(t.series(arm, "features_moved").values())
    return rounding(t, moved, f"{arm}: the shift moves the features by {moved:.2g} of their norm")


@symptom(REFUTED, settles="A22")
def half_a_deviation(t: Tables) -> Finding:
    """Ten batches of shifted images drag running_mean off by half a standard deviation."""
    found = moves(t, "train")
    off = max(abs(moved - 0.5) for _, moved in found)
    said = ", ".join(f"{moved:.3g} for a shift of {shift:g}" for shift, moved in found)
    return rounding(t, off, f"running_mean moves by {said} deviations")


@mechanism(HOLDS)
def share_of_the_shift(t: Tables) -> Finding:
    """They move it by 1 - (1 - momentum) ** batches of any shift: 65 % for ten."""
    share = 1.0 - (1.0 - MOMENTUM) ** t.root_params["batches"]
    off = max(abs(moved / shift - share) for shift, moved in moves(t, "train"))
    return rounding(t, off, f"the share taken is {share:.3g} of every shift, to {off:.2g}")


@symptom(REFUTED, settles="A22")
def statistics_are_polluted(t: Tables) -> Finding:
    """That pollutes the statistics: they fit the data that will be evaluated less than before."""
    left = [abs(shift - moved) / shift for shift, moved in moves(t, "train")]
    reason = f"{max(left):.3g} of the distance to the shifted data is left"
    return (holds if max(left) > 1.0 else refuted)(reason, effect=max(left), unit="share left")


@remedy(HOLDS, settles="A25")
def layer_norm_on_the_rows(t: Tables) -> Finding:
    """A LayerNorm that sees the shifted rows gives the features of the rows as they were."""
    return features_stay(t, "layer_norm")


@remedy(REFUTED, settles="A25")
def layer_norm_anywhere(t: Tables) -> Finding:
    """So it avoids the shift wherever it stands, in the head behind a frozen batch norm too."""
    return features_stay(t, "frozen")


SCENARIO = Scenario(
    title="Ten shifted batches take a running mean 65 % of the way, however long it is",
    family="buffers",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        share_of_the_shift=("a running mean takes a share of any shift", "no fixed share"),
        layer_norm_anywhere=("a LayerNorm undoes it", "a LayerNorm behind a frozen norm does not"),
    ),
    arms=(
        reference("train", "in train mode", ranks=1, norm="train", layer_norm="in_the_head"),
        faulty("frozen", "frozen", ranks=1, norm="frozen", layer_norm="in_the_head"),
        fixed("layer_norm", "LayerNorm", ranks=1, norm="frozen", layer_norm="on_the_rows"),
    ),
    claims=(
        half_a_deviation,
        share_of_the_shift,
        statistics_are_polluted,
        layer_norm_on_the_rows,
        layer_norm_anywhere,
    ),
)
