"""The arithmetic of the report behind clip_allreduce: clipped by torch in float64, then judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.floor import EPS
from harness.scenario import Finding, holds, refuted
from harness.tables import Tables, relative_l2
from scenarios._clip_allreduce.records import NORMS, ORDERED, RELATIVE, cosine_between

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.rank import Rank

    Clip = Callable[[nn.Module, str, str, float], torch.Tensor | None]

ONES, LARGE, MAX = 999, 1000.0, 500.0
"""The report's gradient, 999 ones and one 1000, and its bound."""
SPIKES, SPIKE_BOUND = (1e4, 1e6, 1e8), 1e3
TINY, TINY_BOUND = 5e-7, 5.1e-7
"""A gradient below its bound, and both below the 1e-6 that torch adds to the norm."""


def check_report(rank: Rank, clip: Clip) -> None:
    """Clip the report's vector, in float64, with every norm at the report's bound."""
    import torch

    original = torch.ones(ONES + 1, dtype=torch.float64, device=rank.device)
    original[-1] = LARGE
    for number, norm in enumerate(("L1", "L2", "inf", "value")):
        rank.snapshot(step=number, phase=norm, clipped=_clipped(original, norm, MAX, clip))
    ratio = float(original.norm(2) / original.norm(1))
    matched = _clipped(original, "L2", MAX * ratio, clip)
    rank.snapshot(step=4, phase="matched", clipped=matched)
    for number, spike in enumerate(SPIKES):
        steep = torch.ones(ONES + 1, dtype=torch.float64, device=rank.device)
        steep[-1] = spike
        for norm in ("L1", "L2"):
            rank.log(step=number, phase=norm, spike=_clipped(steep, norm, SPIKE_BOUND, clip)[-1])
    tiny = torch.full((1,), TINY, dtype=torch.float64, device=rank.device)
    rank.log(step=0, phase="tiny", left=_clipped(tiny, "L2", TINY_BOUND, clip)[0])


def _clipped(gradient: torch.Tensor, norm: str, bound: float, clip: Clip) -> torch.Tensor:
    import torch
    from torch import nn

    holder = nn.ParameterList([nn.Parameter(torch.zeros_like(gradient))])
    holder[0].grad = gradient.clone()
    clip(holder, "function", norm, bound)
    clipped: torch.Tensor | None = holder[0].grad
    assert clipped is not None
    return clipped


def report_arithmetic(t: Tables) -> Finding:
    """Recompute the report's example."""
    norms = {"L1": ONES + LARGE, "L2": math.sqrt(ONES + LARGE**2)}
    left = {norm: float(_report(t, norm)[-1]) for norm in norms}
    error = max(abs(left[norm] / (MAX * LARGE / (size + 1e-6)) - 1) for norm, size in norms.items())
    numbers: dict[str, Any] = {
        "effect": error,
        "floor": _rounding(),
        "unit": RELATIVE,
        "evidence": {f"{norm}_norm": size for norm, size in norms.items()}
        | {f"{norm}_leaves": value for norm, value in left.items()},
    }
    said = abs(left["L2"] - 499.75) < 0.005 and abs(left["L1"] - 250.1) < 0.05
    if error > _rounding() or not said:
        return refuted(f"L2 leaves {left['L2']:.4f}, L1 leaves {left['L1']:.4f}", **numbers)
    return holds(
        f"L2 leaves {left['L2']:.4f} of 1000 and L1 leaves {left['L1']:.4f} "
        "(499.7, as it is often told, is cut off, not rounded)",
        **numbers,
    )


def norm_choice_changes_direction(t: Tables) -> Finding:
    """Compare directions and proportions before and after each norm."""
    import numpy as np

    original = np.ones(ONES + 1)
    original[-1] = LARGE
    evidence: dict[str, Any] = {}
    errors = []
    for norm in ORDERED:
        clipped = _report(t, norm)
        ratio, cosine = float(clipped[-1] / clipped[0]), cosine_between(clipped, original)
        errors += [abs(ratio / LARGE - 1), abs(1 - cosine)]
        evidence |= {f"{norm}_ratio": ratio, f"{norm}_cosine": cosine}
    by_value = _report(t, "value")
    evidence["value_ratio"] = float(by_value[-1] / by_value[0])
    evidence["value_cosine"] = cosine_between(by_value, original)
    matched = relative_l2(_report(t, "L1"), _report(t, "matched", step=4))
    evidence["L1_against_L2_with_matched_bound"] = matched
    numbers: dict[str, Any] = {
        "effect": max(errors),
        "floor": _rounding(),
        "unit": RELATIVE,
        "evidence": evidence,
    }
    if max(errors) > _rounding():
        return holds("a norm clip turns the gradient", **numbers)
    return refuted(
        "after L1, L2 and inf the spike is still 1000 times the rest and the cosine 1: a norm clip "
        f"rescales one vector; only the value clip changes the proportion (to "
        f"{evidence['value_ratio']:.0f})",
        **numbers,
    )


def l2_cuts_a_spike_harder(t: Tables) -> Finding:
    """Compare what L1 and L2 leave of a spike at the same bound."""
    t.require("report")
    left = {
        norm: [float(t.value("report", "spike", step=s, phase=norm)) for s in range(len(SPIKES))]
        for norm in ("L1", "L2")
    }
    excess = max(0.0, *(one / two - 1 for one, two in zip(left["L1"], left["L2"], strict=True)))
    evidence: dict[str, Any] = {
        f"{norm}_leaves_of_{spike:g}": value
        for norm, values in left.items()
        for spike, value in zip(SPIKES, values, strict=True)
    }
    numbers: dict[str, Any] = {
        "effect": excess,
        "floor": _rounding(),
        "unit": "what L1 leaves beyond L2, relative",
        "evidence": evidence,
    }
    if excess > _rounding():
        return holds("at the same bound L1 leaves more of the spike than L2", **numbers)
    return refuted(
        "the L1 norm is never the smaller one, so at the same bound L1 never leaves more: "
        + ", ".join(f"{a:.4g} against {b:.4g}" for a, b in zip(*left.values(), strict=True)),
        **numbers,
    )


def below_the_bound_is_untouched(t: Tables) -> Finding:
    """See what is left of a tiny gradient below its bound."""
    t.require("report")
    left = float(t.value("report", "left", step=0, phase="tiny"))
    shrunk = abs(left / TINY - 1)
    numbers: dict[str, Any] = {
        "effect": shrunk,
        "floor": _rounding(),
        "unit": RELATIVE,
        "evidence": {"norm": TINY, "bound": TINY_BOUND, "left": left},
    }
    if shrunk <= _rounding():
        return holds("it comes out as it went in", **numbers)
    return refuted(
        f"torch divides by norm + 1e-6: a gradient of {TINY:g} under a bound of {TINY_BOUND:g} "
        f"comes out as {left:.2g}; it matters below norms of about 1e-5",
        **numbers,
    )


def _report(t: Tables, norm: str, step: int | None = None) -> Any:
    t.require("report")
    place = NORMS.index(norm) if step is None else step
    return t.snapshot("report", "clipped", step=place, phase=norm)


def _rounding() -> float:
    """Rounding of a sum of 1000 float64 values and what follows: 4 eps sqrt(n)."""
    return 4 * EPS["float64"] * math.sqrt(ONES + 1)
