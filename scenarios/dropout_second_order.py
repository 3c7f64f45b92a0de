"""Dropout's 1/(1 - p) is a constant factor: it does not pollute the second derivative.

An article says that the scale of dropout is not differentiable, spoils gradient penalties, and
should be replaced by a division at run time. Under one mask it is a multiplication by a constant:
the derivatives are exact, and the three ways to write it differ by rounding. What is real is that
every mask gives another penalty, and that their mean is larger than the penalty without dropout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, one_process, reference
from harness.claims import REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, matches, mean_is, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, between

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/dropout_second_order.yaml."""

    masks: int = field(metadata=at_least(16))
    rows: int = field(metadata=at_least(2))
    width: int = field(metadata=at_least(8))
    p: float = field(metadata=between(0.05, 0.9))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Backward through a gradient penalty; how dropout is written is what differs."""
    import torch
    from torch.nn.functional import dropout

    dtype = torch.float32 if arm["dtype"] == "float32" else torch.float64
    draw = rank.generator("net and rows")
    x, w1, w2 = (
        torch.randn(count, 8, generator=draw).to(rank.device, dtype)
        for count in (p.rows, p.width, p.width)
    )
    order = rank.permutation(p.width, name="units").to(rank.device)
    back = order.argsort()
    x, w1, w2 = (part.requires_grad_() for part in (x, w1[order], w2[order, 0]))

    def drop(hidden: torch.Tensor, mask: int) -> torch.Tensor:
        torch.manual_seed(mask)
        if arm["form"] == "module":
            return dropout(hidden[:, back], p.p)[:, order]
        kept = (dropout(torch.ones_like(hidden), p.p) > 0)[:, order]
        if arm["form"] == "constant":
            return hidden * kept * (1.0 / (1.0 - p.p))
        if arm["form"] == "division":
            return hidden * kept / torch.tensor(1.0 - p.p, dtype=dtype, device=rank.device)
        return hidden

    def output(rows: torch.Tensor, mask: int) -> torch.Tensor:
        return drop((rows @ w1.T).tanh(), mask) @ w2

    for mask in range(p.masks if rank.repeat == 0 else 1):
        w1.grad = w2.grad = None
        (slope,) = torch.autograd.grad(output(x, mask).sum(), x, create_graph=True)
        penalty = slope.square().sum(dim=1).mean()
        penalty.backward()
        rank.log(step=mask, penalty=penalty)
        if mask == 0:
            assert w1.grad is not None
            assert w2.grad is not None
            both = torch.cat([w1.grad[back].flatten(), w2.grad[back]])
            rank.snapshot(step=0, gradients=both)
    if arm["dtype"] == "float64":
        check = torch.autograd.gradcheck, torch.autograd.gradgradcheck
        few = x.detach()[:2].requires_grad_()
        passed = [one(lambda x: output(x, 0), (few,), raise_exception=False) for one in check]
        rank.log(step=0, first=int(passed[0]), second=int(passed[1]))


@mechanism(REFUTED, settles="A10")
def not_differentiable(t: Tables) -> Finding:
    """The scale of dropout is not differentiable: a numerical check of its derivatives fails."""
    unit = "checks passed"
    first = counts(t, "in_float64", "first", 1, f"first-derivative {unit}")
    return negated(all_of(first, counts(t, "in_float64", "second", 1, f"second-derivative {unit}")))


@symptom(REFUTED, settles="A11")
def penalty_is_polluted(t: Tables) -> Finding:
    """The scale pollutes second derivatives: a penalty's gradient is off by more than rounding."""
    return negated(matches(t, "in_float64", "one_process", "gradients"))


@remedy(REFUTED, settles="A11")
def other_forms_are_purer(t: Tables) -> Finding:
    """Multiplying by a constant, or dividing at run time, gives another, purer gradient."""
    forms = (matches(t, form, "one_process", "gradients") for form in ("constant", "division"))
    return negated(all_of(*forms))


@mechanism(REFUTED)
def mean_penalty_stays(t: Tables) -> Finding:
    """On average over masks the penalty with dropout is the penalty without."""
    t.require("one_process", "off")
    without = t.value("off", "penalty", step=0)
    found = [value / without for value in t.series("one_process", "penalty").values()]
    return mean_is(found, 1.0, "penalty with dropout over without")


SCENARIO = Scenario(
    title="The scale of dropout is a constant: second derivatives through it are exact",
    family="gradients",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        not_differentiable=("dropout fails gradcheck", "dropout's derivatives are exact"),
        other_forms_are_purer=("the form matters", "all forms of the scale are equal"),
        mean_penalty_stays=("the mean penalty stays", "what moves is the penalty's mean"),
    ),
    arms=(
        one_process("nn.Dropout's own form, float32", form="module", dtype="float32"),
        reference("in_float64", "the same in float64", ranks=1, form="module", dtype="float64"),
        control("off", "without dropout", ranks=1, form="off", dtype="float32"),
        control("constant", "x * mask * constant", ranks=1, form="constant", dtype="float32"),
        control("division", "x * mask / (1 - p)", ranks=1, form="division", dtype="float32"),
    ),
    claims=(not_differentiable, penalty_is_polluted, other_forms_are_purer, mean_penalty_stays),
)
