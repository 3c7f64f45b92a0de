"""Clipping logits to [-15, 15] for float16 kills gradient and ranking, and mends nothing.

Softmax subtracts the largest logit, so that float16 needs no bound: at logits of 20 its gradient is
that of float64, and its sum is accumulated in float32 by its own kernel. What is past 65504 is
infinite before softmax sees it. An article finds zero gradients above 15, and inserts a clip: then
they are zero, and classes at 20 and 18 get the same probability.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, is_rounding, negated, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/half_softmax.yaml."""

    classes: int = field(metadata=at_least(256))
    bound: float = field(metadata=between(1.0, 15.5))
    above: tuple[float, ...] = field(metadata=between(15.6, 64.0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Take softmax and gradient of a few rows; dtype and clip are what differ."""
    import torch

    dtype = torch.float16 if arm["dtype"] == "float16" else torch.float64
    logits = torch.tensor(p.above, dtype=dtype, device=rank.device, requires_grad=True)
    x = logits.clamp(-p.bound, p.bound) if arm["clip"] else logits
    (-x.log_softmax(dim=0)[1]).backward()
    assert logits.grad is not None
    rank.snapshot(step=0, gradient=logits.grad, probabilities=x.softmax(dim=0))
    rank.log(step=0, different=x.softmax(dim=0).unique().numel())
    extreme = torch.tensor([6e4, -6e4, 0.0], dtype=dtype, device=rank.device)
    past = torch.tensor([1e5, 0.0], dtype=dtype, device=rank.device)
    rank.log(
        step=0,
        extreme=int(extreme.softmax(dim=0).isfinite().all()),
        past_range=int(past.log_softmax(dim=0).isfinite().all()),
    )
    # The same numbers in both dtypes: only what softmax does to them is compared.
    many = torch.randn(p.classes, generator=rank.generator("many")).half().to(rank.device, dtype)
    rank.snapshot(step=0, many=many.softmax(dim=0) * p.classes)
    lists = [torch._C._dispatch_dump(f"aten::{op}") for op in ("softmax.int", "log_softmax.int")]
    rank.log(step=0, listed=sum("AutocastCUDA" in found for found in lists))


def like_float64(t: Tables, arm: str, name: str) -> Finding:
    """Decide: the arm has the tensor of float64, up to the rounding of one operation in float16."""
    t.require(arm, "in_float64")
    off = t.distance(arm, "in_float64", name, step=0)
    said = f"{arm}: {name} is {off:.2g} from float64"
    return is_rounding(off, dtype_floor(EPS["float16"]), said, "relative L2 distance")


@symptom(REFUTED, settles="A51")
def float16_is_nan(t: Tables) -> Finding:
    """Softmax in float16 turns into NaN at extreme logits."""
    return negated(counts(t, "float16", "extreme", 1, "finite softmax of 60000, -60000 and 0"))


@remedy(REFUTED, settles="A51")
def log_softmax_survives(t: Tables) -> Finding:
    """Where a logit is past the range of float16, log_softmax still gives numbers."""
    return counts(t, "float16", "past_range", 1, "finite log_softmax of 1e5 and 0")


@mechanism(REFUTED, settles="A55")
def softmax_accumulates_in_half(t: Tables) -> Finding:
    """Under AMP log_softmax is accumulated in float32, softmax in float16."""
    listed = counts(t, "float16", "listed", 2, "of both on the list that CUDA autocast upcasts")
    return negated(all_of(like_float64(t, "float16", "many"), listed))


@symptom(REFUTED, settles="A58")
def no_gradient_above_the_bound(t: Tables) -> Finding:
    """In float16 logits above 15 have a gradient of zero."""
    return negated(like_float64(t, "float16", "gradient"))


@symptom(HOLDS)
def clip_has_no_gradient(t: Tables) -> Finding:
    """With the clip they have: what is above the bound gets no gradient at all."""
    t.require("clipped")
    left = max(abs(t.snapshot("clipped", "gradient", step=0)))
    return (holds if left == 0.0 else refuted)(f"largest gradient {left:.2g}", effect=float(left))


@remedy(REFUTED, settles="A58")
def clip_helps(t: Tables) -> Finding:
    """Clipped to [-15, 15] the logits give the probabilities that float16 would have lost."""
    return like_float64(t, "clipped", "probabilities")


@symptom(HOLDS)
def clip_loses_the_ranking(t: Tables) -> Finding:
    """All classes above the bound get one probability."""
    return counts(t, "clipped", "different", 1, "different probabilities")


SCENARIO = Scenario(
    title="Logits clipped to [-15, 15] for float16: no gradient, no ranking, and no need",
    family="numerics",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        no_gradient_above_the_bound=("float16 loses gradients above 15", "float16 loses nothing"),
        clip_helps=("a clip helps", "a clip at 15 loses gradient and ranking"),
    ),
    arms=(
        reference("in_float64", "float64", ranks=1, dtype="float64", clip=False),
        control("float16", "float16", ranks=1, dtype="float16", clip=False),
        faulty("clipped", "float16, clipped", ranks=1, dtype="float16", clip=True),
    ),
    claims=(
        float16_is_nan,
        log_softmax_survives,
        softmax_accumulates_in_half,
        no_gradient_above_the_bound,
        clip_has_no_gradient,
        clip_helps,
        clip_loses_the_ranking,
    ),
)
