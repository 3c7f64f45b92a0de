"""Quantisation observers: MinMaxObserver or a moving average is a choice about outliers.

An article gives MinMaxObserver to static quantisation and the moving average to dynamic. Torch's
dynamic one collects no range, each call takes its input's own; static ranges of training with fake
quantisation are moving averages. An outlier tells the two apart: the one keeps it for good, the
other takes 1 % of it, unless it is in the first batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

MOVING = "MovingAverageMinMaxObserver"
TAKES = 0.01
"""averaging_constant: the share of a batch's extremes that a moving average takes, by default."""


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/observer_kinds.yaml."""

    batches: int = field(metadata=at_least(8))
    size: int = field(metadata=at_least(2))
    outlier: float = field(metadata=at_least(20.0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Show batches to an observer; which observer, and when the outlier comes, is what differs."""
    import torch

    from scenarios._quantization import quantization

    for kind in ("default_qconfig", "default_dynamic_qconfig", "default_qat_qconfig"):
        made = getattr(quantization(), kind).activation()
        made = getattr(made, "activation_post_process", made)  # Of a fake quantisation.
        rank.log(step=0, phase="defaults", **{kind: type(made).__name__})

    observer = getattr(quantization(), arm["observer"])().to(rank.device)
    draw = rank.generator("batches")
    for batch in range(p.batches):
        x = torch.randn(p.size, generator=draw).to(rank.device)
        if batch == arm["outlier_in"]:
            x[0] = p.outlier
        observer(x)
        rank.log(step=batch, seen=x.max(), end=observer.max_val)


def collects(t: Tables, configuration: str, expected: str) -> Finding:
    """Decide: in this configuration of torch activations are observed by that observer."""
    t.require("moving")
    found = t.value("moving", configuration, step=0, phase="defaults")
    return (holds if found == expected else refuted)(f"{configuration} has a {found}")


@mechanism(HOLDS, settles="B47")
def static_is_minmax(t: Tables) -> Finding:
    """For static quantisation torch's default is MinMaxObserver."""
    return collects(t, "default_qconfig", "MinMaxObserver")


@mechanism(REFUTED, settles="B47")
def dynamic_is_moving(t: Tables) -> Finding:
    """For dynamic quantisation it is the moving average."""
    return collects(t, "default_dynamic_qconfig", MOVING)


@mechanism(HOLDS)
def training_is_moving(t: Tables) -> Finding:
    """It is the moving average for training with fake quantisation, whose ranges are static."""
    return collects(t, "default_qat_qconfig", MOVING)


@symptom(HOLDS)
def minmax_keeps(t: Tables) -> Finding:
    """From the outlier on MinMaxObserver's range ends there, whatever comes after it."""
    t.require("minmax")
    outlier, ends = t.root_params["outlier"], list(t.series("minmax", "end").values())[1:]
    off = max(abs(end / outlier - 1) for end in ends)
    floor = dtype_floor(EPS["float32"])
    return is_rounding(off, floor, f"ranges end at {min(ends):.4g} or above", "share of it")


@mechanism(HOLDS)
def average_of_ends(t: Tables) -> Finding:
    """The moving average takes 1 % of each batch's extremes, and the first batch's whole."""
    t.require("moving", "moving_first")
    off = 0.0
    for arm in ("moving", "moving_first"):
        seen, ends = t.series(arm, "seen"), t.series(arm, "end")
        due = seen[0]
        for batch, end in ends.items():
            due += TAKES * (seen[batch] - due)
            off = max(off, abs(end / due - 1))
    floor = dtype_floor(EPS["float32"] * len(ends))  # Each batch rounds once more.
    return is_rounding(off, floor, f"{off:.2g} from such averages", "share of the range's end")


@remedy(REFUTED)
def average_is_safe(t: Tables) -> Finding:
    """With the moving average one outlier does not matter, wherever it comes."""
    t.require("moving", "moving_first")
    largest = max(list(t.series("moving_first", "seen").values())[1:])
    late, early = (t.last(arm, "end") for arm in ("moving", "moving_first"))
    reason = f"its range ends at {late:.4g}, after an outlier in the first batch at {early:.4g}"
    found = holds if max(late, early) <= largest else refuted
    return found(reason, effect=early, unit="last end of the range")


SCENARIO = Scenario(
    title="MinMaxObserver or moving average: a choice about outliers, not static or dynamic",
    family="numerics",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        dynamic_is_moving=("dynamic ranges are averages", "dynamic ranges are not collected"),
        minmax_keeps=("MinMaxObserver keeps an outlier", "MinMaxObserver forgets an outlier"),
        average_is_safe=("an average is safe", "an average keeps that of its first batch"),
    ),
    arms=(
        reference("moving", "outlier later", ranks=1, observer=MOVING, outlier_in=1),
        control("moving_first", "in the first batch", ranks=1, observer=MOVING, outlier_in=0),
        control("minmax", "MinMaxObserver", ranks=1, observer="MinMaxObserver", outlier_in=1),
    ),
    claims=(
        static_is_minmax,
        dynamic_is_moving,
        training_is_moving,
        minmax_keeps,
        average_of_ends,
        average_is_safe,
    ),
    plots=(Plot(metric="end", title="Upper end of the range", log=True),),
)
