"""torch.max is not upcast under autocast, and need not be: it only picks one of its numbers.

An article blames max and min for NaN under mixed precision and casts their input with .float().
Picking an element cannot overflow: what float32 would pick from the same numbers is the same number
exactly. An infinity or a NaN was there before, and a cast behind it keeps both; the cast has to
stand in front of the product that overflowed. What float16 does do is to make ties, among which the
gradient is shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/max_autocast.yaml."""

    rows: int = field(metadata=at_least(8))
    columns: int = field(metadata=at_least(1024))
    large: float = field(metadata=between(256.0, 1e4))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Take the maximum of products; where they are cast to float32 is what differs."""
    import torch

    x = torch.rand(p.rows, p.columns, generator=rank.generator("rows")).to(rank.device)
    for case, top in enumerate((1.0, p.large)):
        x[0, 0] = top
        factor = x if arm["cast"] == "float32" else x.half()
        if arm["cast"] == "before_the_product":
            factor = factor.float()
        product = factor * factor
        if arm["cast"] == "before_max":
            product = product.float()
        product.requires_grad_()
        largest = product.amax(dim=1)
        largest.sum().backward()
        assert product.grad is not None
        shared = ((product.grad > 0) & (product.grad < 1)).any(dim=1).sum()
        rank.snapshot(step=case, largest=largest)
        rank.log(step=case, shared=int(shared), infinite=int(largest.isinf().sum()))
    ops = ("max.dim", "min.dim", "softmax.int")
    kernels = [torch._C._dispatch_dump(f"aten::{op}") for op in ops]
    rank.log(step=0, upcast=",".join(str("AutocastCUDA" in dump) for dump in kernels))


def no_infinity(t: Tables, arm: str) -> Finding:
    """Decide: the maxima are finite although one product is past the range of float16."""
    t.require(arm)
    found = t.value(arm, "infinite", step=1)
    return (refuted if found else holds)(f"{arm}: {found} infinite maxima", effect=found)


@mechanism(HOLDS, settles="A75")
def not_on_the_list(t: Tables) -> Finding:
    """CUDA autocast upcasts softmax, and not max and min."""
    t.require("half")
    found = t.value("half", "upcast", step=0)
    said = f"an autocast kernel for max, min, softmax: {found}"
    return (holds if found == "False,False,True" else refuted)(said)


@symptom(REFUTED, settles="A75")
def half_gives_another_maximum(t: Tables) -> Finding:
    """In float16 max gives NaN, or another number than it gives of the same ones in float32."""
    t.require("half", "cast_before_max")
    values = [t.snapshot(arm, "largest", step=0) for arm in ("half", "cast_before_max")]
    apart = int((values[0] != values[1]).sum())
    said = f"{apart} of {len(values[0])} maxima are another number"
    return (holds if apart else refuted)(said, effect=apart, unit="maxima")


@remedy(REFUTED, settles="A75")
def cast_in_front_of_max(t: Tables) -> Finding:
    """A .float() in front of max removes what float16 has spoilt."""
    return no_infinity(t, "cast_before_max")


@symptom(HOLDS)
def product_overflows(t: Tables) -> Finding:
    """What spoils it is the product in front, past 65504."""
    return negated(no_infinity(t, "half"))


@remedy(HOLDS)
def cast_in_front_of_the_product(t: Tables) -> Finding:
    """The .float() has to stand in front of the product."""
    return no_infinity(t, "cast_before_product")


@symptom(HOLDS)
def ties_share_the_gradient(t: Tables) -> Finding:
    """Rounding to float16 makes ties, whose gradient is shared, in more rows than float32 has."""
    t.require("half", "float32")
    half, single = (t.value(arm, "shared", step=0) for arm in ("half", "float32"))
    said = f"rows with a tie: {half} in float16, {single} in float32"
    return (holds if half > single else refuted)(said, effect=half, unit="rows")


SCENARIO = Scenario(
    title="torch.max under mixed precision: a cast in front of it mends nothing",
    family="precision",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        half_gives_another_maximum=("max is wrong in float16", "max is right in float16"),
        cast_in_front_of_max=("a cast mends it", "a cast behind the overflow mends nothing"),
    ),
    arms=(
        reference("float32", "float32 throughout", ranks=1, cast="float32"),
        faulty("half", "float16 throughout", ranks=1, cast="no"),
        faulty("cast_before_max", "max(y.float())", ranks=1, cast="before_max"),
        fixed("cast_before_product", "x.float() * x", ranks=1, cast="before_the_product"),
    ),
    claims=(
        not_on_the_list,
        half_gives_another_maximum,
        cast_in_front_of_max,
        product_overflows,
        cast_in_front_of_the_product,
        ties_share_the_gradient,
    ),
)
