"""A hand-written "stable" dropout brings in the very scale fault that it is to cure.

An article replaces nn.Dropout, whose scale it distrusts, by a module that computes 1/(1 - p) once,
in its constructor, and compares uniform numbers with 1 - p in the dtype of its input. Its gradient
is that of nn.Dropout, bit for bit of what it keeps. But once p is annealed the outputs are wrong by
(1 - later p) / (1 - first p), and in bfloat16 a small p rounds away: nothing is ever dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, is_rounding, mean_is, negated, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/stable_dropout.yaml."""

    trials: int = field(metadata=at_least(8))
    units: int = field(metadata=at_least(1024))
    p_first: float = field(metadata=between(0.3, 0.9))
    p_later: float = field(metadata=between(0.05, 0.2))
    p_small: float = field(metadata=between(0.0005, 0.0019))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Anneal the p of a dropout; when its scale is computed is what differs."""
    import torch
    from torch import nn

    class StableDropout(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p = p
            self.scale = 1.0 / (1.0 - p)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if arm["scale"] == "at_call":
                return x * (torch.rand(x.shape, device=x.device) < 1.0 - self.p) / (1.0 - self.p)
            keep = torch.tensor(1.0 - self.p, dtype=x.dtype, device=x.device)
            return x * (torch.rand_like(x) < keep) * self.scale

    small = arm["dtype"] == "bfloat16"
    dtype = torch.bfloat16 if small else torch.float64
    dropout: Any = (nn.Dropout if arm["scale"] == "torch" else StableDropout)(p.p_first)
    x = torch.ones(p.units, dtype=dtype, device=rank.device, requires_grad=True)
    y = dropout(x)
    y.sum().backward()
    assert x.grad is not None
    factor = (y != 0) / (1.0 - p.p_first)
    rank.log(step=0, phase="first", off=(x.grad - factor).abs().max() / factor.max())
    dropout.p = p.p_small if small else p.p_later
    for trial in range(p.trials):
        y = dropout(x).double()
        rank.log(step=trial, mean=y.mean(), dropped=int((y == 0).sum()))


def of_trials(t: Tables, arm: str, metric: str) -> list[float]:
    """Return what every call of an arm recorded after p was changed."""
    t.require(arm)
    return list(t.series(arm, metric, phase="").values())


@mechanism(REFUTED, settles="A45")
def gradients_are_purer(t: Tables) -> Finding:
    """Its gradient is purer than that of nn.Dropout, which is off by more than rounding."""
    t.require("torch", "at_build")
    off = t.value("torch", "off", step=0, phase="first")
    own = t.value("at_build", "off", step=0, phase="first")
    reason = f"off the mask over 1 - p: nn.Dropout by {off:.2g}, the hand-written one by {own:.2g}"
    floor = dtype_floor(EPS["float64"])
    return negated(is_rounding(max(off, own), floor, reason, "share of the gradient"))


@symptom(HOLDS, settles="~A45")
def scale_goes_stale(t: Tables) -> Finding:
    """Once p is annealed its output is too large by (1 - later p) / (1 - first p)."""
    due = (1.0 - t.root_params["p_later"]) / (1.0 - t.root_params["p_first"])
    return mean_is(of_trials(t, "at_build", "mean"), due, "mean of ones behind it")


@symptom(HOLDS)
def drops_nothing_in_bfloat16(t: Tables) -> Finding:
    """In bfloat16 it never drops anything at a small p."""
    return counts(t, "bfloat16", "dropped", 0, "units dropped")


@mechanism(HOLDS)
def module_drops_in_bfloat16(t: Tables) -> Finding:
    """nn.Dropout drops the share p of its units in bfloat16 as well."""
    due = t.root_params["p_small"] * t.root_params["units"]
    return mean_is(of_trials(t, "torch_bfloat16", "dropped"), due, "units dropped by nn.Dropout")


@remedy(HOLDS)
def scale_at_the_call(t: Tables) -> Finding:
    """Keep p alone, and compute at each call, in float32: the mean stays, small p or not."""
    due = t.root_params["p_small"] * t.root_params["units"]
    return all_of(
        mean_is(of_trials(t, "at_call", "mean"), 1.0, "mean of ones behind it"),
        mean_is(of_trials(t, "at_call_bfloat16", "dropped"), due, "units dropped in bfloat16"),
    )


SCENARIO = Scenario(
    title="A dropout whose scale is fixed when it is built: wrong as soon as p is changed",
    family="random numbers",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        scale_goes_stale=("an annealed p leaves the old scale", "the scale follows p"),
        drops_nothing_in_bfloat16=("bfloat16 drops nothing", "bfloat16 drops"),
        gradients_are_purer=("its gradients are purer", "its gradients are no purer"),
    ),
    arms=(
        reference("torch", "nn.Dropout", ranks=1, scale="torch", dtype="float64"),
        control("torch_bfloat16", "nn.Dropout", ranks=1, scale="torch", dtype="bfloat16"),
        faulty("at_build", "scale at build", ranks=1, scale="at_build", dtype="float64"),
        faulty("bfloat16", "1 - p in bfloat16", ranks=1, scale="at_build", dtype="bfloat16"),
        fixed("at_call", "scale at call", ranks=1, scale="at_call", dtype="float64"),
        fixed("at_call_bfloat16", "scale at call", ranks=1, scale="at_call", dtype="bfloat16"),
    ),
    claims=(
        gradients_are_purer,
        scale_goes_stale,
        drops_nothing_in_bfloat16,
        module_drops_in_bfloat16,
        scale_at_the_call,
    ),
)
