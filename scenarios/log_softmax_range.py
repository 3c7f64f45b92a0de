"""log(softmax(x)) fails by the range of its dtype, not by rounding: from a gap of 89 in float32.

The probability of a label that lies far below the largest logit underflows; its logarithm is then
-inf, and the gradient, which divides by it, is no number some logits earlier. log_softmax keeps the
logarithm throughout. Short of that gap the two agree to the last bits, which an article denies for
1000 classes and logits from 12.5 to -28.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, is_rounding, negated, says
from harness.floor import dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/log_softmax_range.yaml."""

    largest_gap: int = field(metadata=between(105, 1000))
    classes: int = field(metadata=at_least(100))
    top: float = field(metadata=between(0.0, 30.0))
    bottom: float = field(metadata=between(-50.0, 0.0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Take losses and gradients of hard labels; how the logarithm is taken is what differs."""
    import torch

    dtype = getattr(torch, arm["dtype"])

    def gradient(logits: torch.Tensor, label: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = logits.to(rank.device, dtype).requires_grad_()
        if arm["form"] == "log_of_softmax":
            loss = -x.softmax(dim=0).log()[label]
        else:
            loss = -x.log_softmax(dim=0)[label]
        loss.backward()
        assert x.grad is not None
        return loss, x.grad

    draw = rank.generator("order")
    x = torch.linspace(p.top, p.bottom, p.classes)[torch.randperm(p.classes, generator=draw)]
    rank.snapshot(step=0, of_classes=gradient(x, int(x.argmax()))[1])
    for gap in range(1, p.largest_gap + 1):
        loss, found = gradient(torch.tensor([float(gap), 0.0, 0.0, 0.0]), 1)
        rank.log(step=gap, loss=int(loss.isfinite()), gradient=int(found.isfinite().all()))


def first(t: Tables, arm: str, metric: str) -> int | None:
    """Return the smallest gap at which the arm's loss or gradient is no finite number."""
    t.require(arm)
    return next((gap for gap, fine in t.series(arm, metric, phase="").items() if not fine), None)


def ends_between(t: Tables, arm: str, low: int, high: int) -> Finding:
    """Decide: gradient and loss stop being finite within the range that the dtype's numbers set."""
    gradient, loss = first(t, arm, "gradient"), first(t, arm, "loss")
    said = f"{arm}: the gradient is no number from a gap of {gradient} on, the loss from {loss}"
    inside = gradient is not None and loss is not None and low <= gradient <= loss <= high
    return (holds if inside else refuted)(said, effect=gradient, unit="gap of logits")


def never_ends(t: Tables, arm: str) -> Finding:
    """Decide: gradient and loss are finite at every gap."""
    found = {metric: first(t, arm, metric) for metric in ("gradient", "loss")}
    fine = set(found.values()) == {None}
    return (holds if fine else refuted)(f"{arm}, first gap without a finite value: {found}")


@mechanism(HOLDS, settles="A49")
def log_softmax_is_needed(t: Tables) -> Finding:
    """Against underflow log_softmax is needed: log(softmax) ends at a gap near 100 in float32."""
    # ln of the largest number, and of the smallest that is not 0.
    return all_of(ends_between(t, "float32", 88, 104), never_ends(t, "log_softmax"))


@symptom(HOLDS)
def half_ends_sooner(t: Tables) -> Finding:
    """In float16 it ends at gaps of 11 to 18 already, in bfloat16 where float32 does."""
    sooner = ends_between(t, "float16", 11, 18)
    return all_of(sooner, ends_between(t, "bfloat16", 88, 104))


@symptom(REFUTED, settles="A50")
def notable_error(t: Tables) -> Finding:
    """With 1000 classes and logits from 12.5 to -28.3 log(softmax) has a notable error."""
    t.require("float32", "log_softmax", "in_float64")
    floor = dtype_floor(t.distance("log_softmax", "in_float64", "of_classes", step=0))
    off = t.distance("float32", "in_float64", "of_classes", step=0)
    said = f"the gradient is {off:.2g} from float64, that of log_softmax {floor}"
    return negated(is_rounding(off, floor, said, "relative L2 distance"))


@remedy(HOLDS)
def log_softmax_in_half(t: Tables) -> Finding:
    """With log_softmax loss and gradient are finite at every gap, in float16 too."""
    return never_ends(t, "log_softmax_float16")


SCENARIO = Scenario(
    title="log(softmax(x)) ends at a gap of 89 logits in float32, at 12 in float16",
    family="numerics",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        log_softmax_is_needed=("log(softmax) ends by its dtype's range", "log(softmax) is safe"),
        notable_error=("and is less exact before", "and is as exact before"),
    ),
    arms=(
        reference("log_softmax", "log_softmax", ranks=1, form="log_softmax", dtype="float32"),
        reference("in_float64", "log_softmax", ranks=1, form="log_softmax", dtype="float64"),
        faulty("float32", "log(softmax)", ranks=1, form="log_of_softmax", dtype="float32"),
        faulty("float16", "log(softmax)", ranks=1, form="log_of_softmax", dtype="float16"),
        faulty("bfloat16", "log(softmax)", ranks=1, form="log_of_softmax", dtype="bfloat16"),
        fixed("log_softmax_float16", "half", ranks=1, form="log_softmax", dtype="float16"),
    ),
    claims=(log_softmax_is_needed, half_ends_sooner, notable_error, log_softmax_in_half),
)
