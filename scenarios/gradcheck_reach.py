"""gradcheck compares a function with its own derivative: a wrong formula passes, a kink does not.

It finds a backward that does not belong to its forward, in float64. An article has it find a
forgotten 1/sqrt(d) and fail on argmax: the first is another function with its own derivative, and
argmax and round are flat, with a slope of zero both ways. A ReLU at 0 fails, and so does dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, reference
from harness.claims import HOLDS, REFUTED, mechanism, symptom
from harness.findings import all_of, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/gradcheck_reach.yaml."""

    small: float = field(metadata=between(1e-6, 9.5e-4))
    large: float = field(metadata=between(1.2e-3, 1.0))
    rows: int = field(metadata=at_least(2))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Check the derivative of one function; which function it is is what differs."""
    import torch
    from torch.autograd.gradcheck import gradcheck

    def wrong(y: torch.Tensor, error: float) -> torch.Tensor:
        return y + error * (y - y.detach())  # The forward of y, and 1 + error times its backward.

    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "swish": lambda x: x * x.sigmoid(),
        "small_error": lambda x: wrong(x * x.sigmoid(), p.small),
        "large_error": lambda x: wrong(x * x.sigmoid(), p.large),
        "attention_unscaled": lambda x: (x @ x.T).softmax(dim=1) @ x,
        "argmax": lambda x: x * x.argmax(dim=1, keepdim=True),
        "round": torch.round,
        "relu_at_zero": torch.relu,
        "dropout": lambda x: torch.dropout(x, 0.5, train=True),
    }
    dtype = torch.float32 if arm["dtype"] == "float32" else torch.float64
    x = torch.randn(p.rows, 4, generator=rank.generator("x")).to(rank.device, dtype)
    x = (0.0 * x if arm["function"] == "relu_at_zero" else x).requires_grad_()
    raised = ""
    try:
        gradcheck(functions[arm["function"]], (x,))
    except Exception as failure:
        raised = type(failure).__name__
    rank.log(step=0, raised=raised)


def passes(t: Tables, arm: str) -> Finding:
    """Decide: gradcheck accepts the function of the arm."""
    t.require(arm)
    raised = t.value(arm, "raised", step=0)
    return (refuted if raised else holds)(f"{arm}: {raised or 'passes'}")


def fails(t: Tables, *arms: str) -> Finding:
    """Decide: gradcheck rejects the function of each of these arms."""
    return all_of(*(negated(passes(t, arm)) for arm in arms))


@mechanism(HOLDS, settles="B33")
def right_function_passes(t: Tables) -> Finding:
    """The gradient of x * sigmoid(x) passes the numerical check."""
    return passes(t, "swish")


@mechanism(HOLDS, settles="B34")
def tolerance_is_a_thousandth(t: Tables) -> Finding:
    """A backward is rejected from a relative error of about 1e-3 on."""
    return all_of(passes(t, "small_error"), fails(t, "large_error"))


@symptom(REFUTED, settles="B35")
def failure_returns_false(t: Tables) -> Finding:
    """On failure it prints False."""
    return negated(fails(t, "large_error"))


@symptom(REFUTED, settles="B36")
def finds_a_missing_scale(t: Tables) -> Finding:
    """Attention without its 1/sqrt(d) is rejected."""
    return fails(t, "attention_unscaled")


@mechanism(HOLDS, settles="B37")
def float64_is_required(t: Tables) -> Finding:
    """It needs float64: in float32 a right function is rejected."""
    return fails(t, "float32")


@symptom(REFUTED, settles="B38")
def argmax_fails(t: Tables) -> Finding:
    """What cannot be differentiated, argmax or round, is rejected."""
    return fails(t, "argmax", "round")


@symptom(HOLDS)
def kinks_and_chance_fail(t: Tables) -> Finding:
    """Rejected are a ReLU at 0, whose slope is another on each side, and dropout."""
    return fails(t, "relu_at_zero", "dropout")


def of(function: str, make: Callable[..., Arm], dtype: str = "float64", name: str = "") -> Arm:
    """Return the arm of one function."""
    return make(name or function, dtype, ranks=1, function=function, dtype=dtype)


SCENARIO = Scenario(
    title="gradcheck: a wrong formula with a right derivative passes, and so does argmax",
    family="gradients",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(finds_a_missing_scale=("finds a wrong formula", "a wrong formula passes")),
    arms=(
        of("swish", reference),
        of("swish", faulty, "float32", "float32"),
        of("small_error", control),
        of("large_error", faulty),
        of("attention_unscaled", control),
        of("argmax", control),
        of("round", control),
        of("relu_at_zero", faulty),
        of("dropout", faulty),
    ),
    claims=(
        right_function_passes,
        tolerance_is_a_thousandth,
        failure_returns_false,
        finds_a_missing_scale,
        float64_is_required,
        argmax_fails,
        kinks_and_chance_fail,
    ),
)
