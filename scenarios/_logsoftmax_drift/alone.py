"""What log_softmax and cross_entropy do in one process, without training: gradient, range, labels.

Three probes that write records, and the claims that rest on them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from harness.floor import Effect, permutation_floor
from harness.scenario import Claim, Finding, Kind, Outcome, holds, refuted, unknown
from harness.tables import relative_l2

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables

ARM = "softmax_alone"
IGNORE = -100
CLASSES = 16
ROWS = 16
WIDE = 256
"""Classes where logits run from -top to +top; one row alone often moves by no bit."""
FORMS = ("log_softmax", "log_of_softmax")
TOPS = (28, 100)
GAPS = range(1, 121)
"""Distance between two logits, in steps of 1."""
LIMITS = {"float32": (128, 150), "bfloat16": (128, 134), "float16": (16, 25)}
"""Powers of two: of a probability p below 2^-first 1/p overflows, below 2^-second p itself is 0."""


def run(rank: Rank) -> None:
    """Record everything; repeats shuffle the classes, which moves nothing but the rounding."""
    probe_range(rank)
    probe_gradient(rank)
    if rank.repeat == 0:
        probe_labels(rank)


def probe_range(rank: Rank) -> None:
    """Record, by dtype, which share of the gradient is finite, and the gradient itself."""
    import torch
    import torch.nn.functional as F

    order = rank.permutation(WIDE, name="classes")
    back = order.argsort()
    spread = 2 * torch.rand(ROWS, WIDE, generator=rank.generator("spread")) - 1
    spread[:, 0], spread[:, -1] = -1, 1
    ends = back[torch.tensor([0, -1])].repeat(ROWS // 2).to(rank.device)  # lowest, highest logit
    gaps = torch.tensor(list(GAPS), device=rank.device)
    every = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for dtype in every if rank.repeat == 0 else (torch.float32,):
        name = str(dtype).removeprefix("torch.")
        for form in FORMS:
            for top in TOPS:
                x = (top * spread[:, order]).to(rank.device, dtype).requires_grad_()
                out = log_p(form, x)
                (gradient,) = torch.autograd.grad(F.nll_loss(out, ends), x)
                rank.log(step=top, phase=name, **{f"{form}.finite": share(gradient)})
                rank.log(step=top, phase=name, **{f"{form}.out_finite": share(out)})
                rank.snapshot(step=top, phase=name, **{form: gradient[:, back]})
                rank.log(step=top, phase=name, **{f"{form}.error": error_of(gradient, x, ends)})
            if rank.repeat == 0 and name in LIMITS:
                pair = torch.stack([torch.zeros_like(gaps), -gaps], 1).to(dtype).requires_grad_()
                (gradient,) = torch.autograd.grad(log_p(form, pair)[:, 1].sum(), pair)
                finite = gradient.isfinite().all(1)
                rank.snapshot(step=0, phase=name, **{f"{form}.finite_at": finite})


def log_p(form: str, x: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities, in one function or in two."""
    import torch

    return torch.log_softmax(x, 1) if form == "log_softmax" else torch.log(torch.softmax(x, 1))


def error_of(gradient: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the relative L2 error against float64 log_softmax of the same, rounded, logits."""
    import torch
    import torch.nn.functional as F

    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(wide, y), wide)
    return float((gradient.double() - exact).norm() / exact.norm())


def share(x: Any) -> float:
    """Return which part of a tensor is finite."""
    return float(x.detach().isfinite().double().mean())


def probe_gradient(rank: Rank) -> None:
    """Record the gradient of cross_entropy with hard labels, half of the rows ignored."""
    import torch
    import torch.nn.functional as F

    order = rank.permutation(CLASSES, name="columns")
    back = order.argsort()
    x = torch.randn(ROWS, CLASSES, generator=rank.generator("logits"), dtype=torch.float64)
    x = x[:, order].requires_grad_()
    y = back[torch.arange(ROWS) % CLASSES]
    y[ROWS // 2 :] = IGNORE
    (gradient,) = torch.autograd.grad(F.cross_entropy(x, y), x)
    valid, ignored = gradient[: ROWS // 2], gradient[ROWS // 2 :]
    one_hot = F.one_hot(y[: ROWS // 2], CLASSES)
    formula = (torch.softmax(x.detach()[: ROWS // 2], 1) - one_hot) / (ROWS // 2)
    apart = F.cross_entropy(x, y) - F.cross_entropy(x, y, reduction="sum") / (ROWS // 2)
    rank.log(step=0, phase="gradient", zeros=(valid == 0).sum(), leaks=(ignored != 0).sum())
    rank.log(step=0, phase="gradient", mean_minus_sum_over_valid=apart)
    rank.snapshot(step=0, phase="gradient", autograd=valid[:, back], formula=formula[:, back])


def probe_labels(rank: Rank) -> None:
    """Record what labels outside the classes do; on the CPU, where that does not kill a context."""
    import torch
    import torch.nn.functional as F

    x = torch.zeros(2, CLASSES)
    for label in (IGNORE, -1, CLASSES):
        y = torch.tensor([0, label])
        raised = {f"cross_entropy({label})": "nothing", f"gather({label})": "nothing"}
        try:
            F.cross_entropy(x, y)
        except (IndexError, RuntimeError) as error:
            raised[f"cross_entropy({label})"] = type(error).__name__
        try:
            F.log_softmax(x, 1).gather(1, y[:, None])
        except (IndexError, RuntimeError) as error:
            raised[f"gather({label})"] = type(error).__name__
        rank.log(step=0, phase="labels", **raised)


def judge_mask(t: Tables) -> Finding:
    """Zero entries in the rows that carry a label would be a mask; the formula has none."""
    t.require(ARM)
    zeros = t.value(ARM, "zeros", step=0, phase="gradient")
    leaks = t.value(ARM, "leaks", step=0, phase="gradient")
    autograd = t.snapshot(ARM, "autograd", step=0, phase="gradient")
    formula = t.snapshot(ARM, "formula", step=0, phase="gradient")
    effect = Effect(
        value=relative_l2(autograd, formula),
        floor=permutation_floor(t.permuted(ARM, "autograd", step=0, phase="gradient")),
    )
    numbers: dict[str, Any] = {
        "effect": effect.value,
        "floor": effect.floor.value,
        "unit": "relative L2 distance of autograd's gradient to (softmax - one-hot) / valid",
        "evidence": {
            "zero entries": zeros,
            "of": autograd.size,
            "non-zero entries of ignored rows": leaks,
            "mean - sum / valid": t.value(
                ARM, "mean_minus_sum_over_valid", step=0, phase="gradient"
            ),
        },
    }
    if zeros == 0 and effect.clean:
        return refuted(
            f"gradient = (softmax - one-hot) / valid to {effect}: none of {autograd.size} entries "
            "in labelled rows is zero",
            **numbers,
        )
    if zeros and not effect.clean:
        return holds(f"{zeros} of {autograd.size} entries in labelled rows are zero", **numbers)
    return unknown(f"{zeros} zero entries, yet {effect} from softmax - one-hot", **numbers)


def judge_precision(t: Tables) -> Finding:
    """Compare the error of log(softmax) with what shuffling the classes moves in log_softmax."""
    t.require(ARM)
    truth = t.snapshot(ARM, "log_softmax", step=28, phase="float64")
    floor = permutation_floor(t.permuted(ARM, "log_softmax", step=28, phase="float32"))
    error = {
        form: relative_l2(t.snapshot(ARM, form, step=28, phase="float32"), truth) for form in FORMS
    }
    effect = Effect(value=error["log_of_softmax"], floor=floor)
    numbers: dict[str, Any] = {
        "effect": effect.value,
        "floor": floor.value,
        "unit": "relative L2 error of the gradient against float64",
        "evidence": {
            f"error of {form}, {dtype}, logits +-{top}": t.value(
                ARM, f"{form}.error", step=top, phase=dtype
            )
            for dtype in LIMITS
            for top in TOPS
            for form in FORMS
        },
    }
    text = (
        f"float32 at logits of +-28: log(softmax) errs by {effect}, "
        f"log_softmax by {error['log_softmax']:.2g}"
    )
    if effect.clean:
        return refuted(text, **numbers)
    return holds(text, **numbers) if effect.fault else unknown(text, **numbers)


def judge_range(t: Tables) -> Finding:
    """Find, by dtype, the first gap of two logits at which each form's gradient is not finite."""
    t.require(ARM)
    first: dict[str, dict[str, int | None]] = {form: {} for form in FORMS}
    for dtype in LIMITS:
        for form in FORMS:
            finite = t.snapshot(ARM, f"{form}.finite_at", step=0, phase=dtype)
            broken = [gap for gap, good in zip(GAPS, finite, strict=True) if not good]
            first[form][dtype] = broken[0] if broken else None
    log2 = math.log(2)
    span = {dtype: (low * log2, high * log2 + 1) for dtype, (low, high) in LIMITS.items()}
    fits = {
        dtype: found is not None and span[dtype][0] <= found <= span[dtype][1]
        for dtype, found in first["log_of_softmax"].items()
    }
    evidence: dict[str, Any] = {
        f"{dtype}: log(softmax) breaks at a gap of": found
        for dtype, found in first["log_of_softmax"].items()
    }
    for dtype in LIMITS:
        low, high = span[dtype]
        evidence[f"{dtype}: predicted"] = f"{low:.1f} to {high:.1f}"
        for top in TOPS:
            evidence[f"{dtype}: finite share of its gradient, logits +-{top}"] = t.value(
                ARM, "log_of_softmax.finite", step=top, phase=dtype
            )
            evidence[f"{dtype}: the same of log_softmax, logits +-{top}"] = t.value(
                ARM, "log_softmax.finite", step=top, phase=dtype
            )
    numbers: dict[str, Any] = {
        "effect": first["log_of_softmax"]["float32"],
        "floor": None,
        "unit": "gap between two logits (float32)",
        "evidence": evidence,
    }
    found = ", ".join(f"{dtype} {gap}" for dtype, gap in first["log_of_softmax"].items())
    if any(gap is not None for gap in first["log_softmax"].values()):
        return refuted(f"log_softmax breaks, too, at a gap of {first['log_softmax']}", **numbers)
    if not any(first["log_of_softmax"].values()):
        return refuted(f"log(softmax) is finite up to a gap of {GAPS[-1]}", **numbers)
    text = (
        f"log(softmax) has no finite gradient from a logit gap of {found} on; log_softmax has one "
        f"at every gap up to {GAPS[-1]}"
    )
    if all(fits.values()):
        return holds(text, **numbers)
    return unknown(f"{text}; 1/p overflowing predicts {span}", **numbers)


def judge_labels(t: Tables) -> Finding:
    """Read which labels raised what: exact."""
    t.require(ARM)
    found = {
        name: t.value(ARM, name, step=0, phase="labels")
        for label in (IGNORE, -1, CLASSES)
        for name in (f"cross_entropy({label})", f"gather({label})")
    }
    strict = [found[f"cross_entropy({label})"] != "nothing" for label in (-1, CLASSES)]
    numbers: dict[str, Any] = {
        "effect": float(sum(strict)),
        "floor": 0.0,
        "unit": "illegal labels, of two, that raise",
        "evidence": found,
    }
    if found[f"cross_entropy({IGNORE})"] != "nothing":
        return unknown(f"label {IGNORE} itself raises", **numbers)
    if all(strict):
        return refuted(
            f"only exactly {IGNORE} is skipped: labels -1 and {CLASSES} of {CLASSES} classes raise "
            f"{found['cross_entropy(-1)']}; a gather by hand raises at {IGNORE}: "
            f"{found[f'gather({IGNORE})']}",
            **numbers,
        )
    if not any(strict):
        return holds(f"labels -1 and {CLASSES} are skipped like {IGNORE}", **numbers)
    return unknown(f"one of labels -1 and {CLASSES} raises, the other does not", **numbers)


CLAIMS = (
    Claim(
        name="implicit_mask",
        kind=Kind.MECHANISM,
        text="With hard labels the gradient of log_softmax carries an implicit mask.",
        expects=Outcome.REFUTED,
        judge=judge_mask,
        settles=("A12",),
    ),
    Claim(
        name="log_softmax_precision",
        kind=Kind.MECHANISM,
        text="At logits of +-28 log(softmax) costs accuracy in float32.",
        expects=Outcome.REFUTED,
        judge=judge_precision,
        settles=("A50",),
    ),
    Claim(
        name="log_softmax_range",
        kind=Kind.SYMPTOM,
        text="log(softmax) loses its gradient once 1/p overflows; log_softmax never does.",
        expects=Outcome.HOLDS,
        judge=judge_range,
        settles=("A49",),
    ),
    Claim(
        name="ignore_index",
        kind=Kind.MECHANISM,
        text="ignore_index=-100 makes cross_entropy skip every label outside the classes.",
        expects=Outcome.REFUTED,
        judge=judge_labels,
        settles=("B59",),
    ),
)
