"""Where NaN comes from: the logarithm of 0, also in the branch that where() has not taken.

0 * log(0) is none. where(p > 0, log(p), 0) has a finite value and a NaN gradient: the branch that
was not taken is differentiated too. clamp(p, 1e-8, 1 - 1e-8), an article's fix, has a bound that is
1 in float32; one that is not cuts the gradient of the rows most wrong. A loss of logits needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import all_of, counts, is_rounding, negated, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/nan_sources.yaml."""

    logit: float = field(metadata=between(120.0, 1000.0))
    bound: float = field(metadata=between(1e-12, 2e-8))
    wide: float = field(metadata=between(1e-6, 0.1))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Take a binary cross entropy and its gradient; how the logarithm is written differs."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    dtype = getattr(torch, arm["dtype"])
    x = torch.tensor([-p.logit, -p.logit, -1.0, 1.0, p.logit, p.logit], dtype=dtype)
    x = x.to(rank.device).requires_grad_()
    y = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0], dtype=dtype, device=rank.device)

    def log(q: torch.Tensor) -> torch.Tensor:
        return torch.where(q > 0, q.log(), 0.0) if arm["log"] == "where" else q.log()

    def loss() -> torch.Tensor:
        if arm["log"] == "with_logits":
            return binary_cross_entropy_with_logits(x, y, reduction="sum")
        q = x.sigmoid()
        if bound := {"clamp": p.bound, "clamp_wide": p.wide}.get(arm["log"]):
            q = q.clamp(bound, 1.0 - bound)
        return -(y * log(q) + (1.0 - y) * log(1.0 - q)).sum()

    named = ""
    try:
        with torch.autograd.detect_anomaly():
            loss().backward()
    except RuntimeError as error:
        named = str(error)
    x.grad = None
    value = loss()
    value.backward()
    assert x.grad is not None
    rank.log(step=0, finite=int(value.isfinite()), named=named)
    rank.snapshot(step=0, gradient=x.grad)


def is_finite(t: Tables, arm: str) -> Finding:
    """Decide: the loss is a finite number."""
    return counts(t, arm, "finite", 1, "finite losses")


def gradient_is_right(t: Tables, arm: str) -> Finding:
    """Decide: the gradient is that of float64 from logits, up to the rounding of float32."""
    t.require(arm, "in_float64")
    off = t.distance(arm, "in_float64", "gradient", step=0)
    if math.isnan(off):
        return refuted(f"{arm}: the gradient is not finite")
    said = f"{arm}: the gradient is {off:.2g} from that of float64"
    return is_rounding(off, dtype_floor(EPS["float32"]), said, "relative L2 distance")


@symptom(HOLDS, settles="B50")
def log_of_zero(t: Tables) -> Finding:
    """A logarithm of probabilities without a guard gives NaN, since 0 * log(0) is none."""
    return negated(is_finite(t, "plain"))


@remedy(REFUTED)
def where_guards(t: Tables) -> Finding:
    """Guarded by where(p > 0, log(p), 0) the gradient is right."""
    return all_of(is_finite(t, "where"), gradient_is_right(t, "where"))


@remedy(REFUTED, settles="B52")
def clamp_mends_it(t: Tables) -> Finding:
    """Clamped to 1e-8 and 1 - 1e-8 the probabilities give a finite loss."""
    return is_finite(t, "clamp")


@symptom(HOLDS)
def wide_clamp_has_no_gradient(t: Tables) -> Finding:
    """A bound that the dtype has gives a finite loss, and no gradient to the rows most wrong."""
    return all_of(is_finite(t, "clamp_wide"), negated(gradient_is_right(t, "clamp_wide")))


@remedy(HOLDS, settles="B55")
def anomaly_mode_names_it(t: Tables) -> Finding:
    """Anomaly mode finds the operation: LogBackward0."""
    t.require("plain")
    said = t.value("plain", "named", step=0)
    return (holds if "'LogBackward0' returned nan" in said else refuted)(said or "it says nothing")


@remedy(HOLDS)
def loss_of_logits(t: Tables) -> Finding:
    """Taken from logits the loss has the right gradient, without any guard."""
    return gradient_is_right(t, "with_logits")


SCENARIO = Scenario(
    title="NaN from a log of 0: where() and clamp(1e-8) do not help, the loss of logits does",
    family="numerics",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        where_guards=("where() guards", "where() leaves a NaN gradient"),
        clamp_mends_it=("a clamp at 1e-8 helps", "float32 has no clamp at 1e-8"),
    ),
    arms=(
        reference("in_float64", "of logits", ranks=1, log="with_logits", dtype="float64"),
        fixed("with_logits", "of logits", ranks=1, log="with_logits", dtype="float32"),
        faulty("plain", "log(p)", ranks=1, log="plain", dtype="float32"),
        faulty("where", "where(p > 0, ...)", ranks=1, log="where", dtype="float32"),
        faulty("clamp", "clamp(1e-8, 1 - 1e-8)", ranks=1, log="clamp", dtype="float32"),
        faulty("clamp_wide", "clamp(1e-4, 1 - 1e-4)", ranks=1, log="clamp_wide", dtype="float32"),
    ),
    claims=(
        log_of_zero,
        where_guards,
        clamp_mends_it,
        wide_clamp_has_no_gradient,
        anomaly_mode_names_it,
        loss_of_logits,
    ),
)
