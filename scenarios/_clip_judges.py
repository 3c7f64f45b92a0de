"""How clip_allreduce decides its claims: exact counts where it can, distances over floors else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import MissingRecord
from harness.floor import EPS, Floor, Size, permutation_floor
from harness.scenario import Finding, Outcome, holds, refuted, unknown
from harness.tables import Tables, relative_l2

NORMS = ("L1", "L2", "inf", "value", "layer")
"""Phase of a traffic arm; its place is the step it is recorded under."""
ORDERED = NORMS[:3]
SCALE = 2.0**16
"""Where a GradScaler starts."""
ONES, LARGE, MAX = 999, 1000.0, 500.0
"""The report's gradient, 999 ones and one 1000, and its bound."""
SPIKES = (1e4, 1e6, 1e8)
TINY, TINY_BOUND = 5e-7, 5.1e-7
"""A gradient below its bound, and both below the 1e-6 that torch adds to the norm."""
SHARDED = ("fsdp1", "fsdp1_part", "fsdp2", "fsdp2_part", "hsdp")
COUNTED = "collectives"
GAP = "relative L2 distance to one process"
EXACT_UNIT = "relative error"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """How far an arm's gradient is from one process, at worst over its ranks."""

    effect: float
    floor: Floor
    size: Size


def _gap(t: Tables, arm: str, norm: str) -> Gap:
    """Compare an arm of the traffic part with one process in the same dtype."""
    to = "one_process_fp32" if arm.startswith("fsdp1") else "one_process"
    return _distance(t, arm, to, step=NORMS.index(norm), phase=norm)


def _order_gap(t: Tables, arm: str) -> Gap:
    """Compare the first gradient of a training arm with one process that trains alike."""
    return _distance(t, arm, "trained_alone", step=0, phase="")


def _distance(t: Tables, arm: str, to: str, *, step: int, phase: str) -> Gap:
    t.require(arm, to)
    floor = permutation_floor(t.permuted(to, "grad", step=step, phase=phase))
    distances = [
        t.distance(arm, to, "grad", step=step, phase=phase, rank=rank) for rank in t.ranks(arm)
    ]
    effect = max(distances) if all(map(math.isfinite, distances)) else math.inf
    return Gap(effect=effect, floor=floor, size=floor.size(effect))


def _counts(t: Tables, arm: str, norms: Iterable[str], metric: str) -> list[int]:
    """Return a metric on every rank for every norm that was run; raises if a record is missing."""
    t.require(arm)
    return [
        t.value(arm, metric, step=NORMS.index(norm), phase=norm, rank=rank)
        for norm in norms
        if not _skipped(t, arm, norm)
        for rank in t.ranks(arm)
    ]


def _skipped(t: Tables, arm: str, norm: str) -> bool:
    phases = t.series(arm, "skipped", phase=norm) if t.has(arm, "skipped") else {}
    return bool(phases)


def _check_counter(t: Tables) -> None:
    """The control: one all-reduce put inside the clip has to be counted once, on every rank."""
    for norm, metric, right in (
        *((norm, "clip_ops", "all_reduce") for norm in ORDERED),
        *((norm, "clip_bytes", 8) for norm in ORDERED),
    ):
        got = set(_counts(t, "ddp_reduced", [norm], metric))
        if got != {right}:
            raise MissingRecord(
                f"the counter is not to be trusted: with one explicit all-reduce of 8 bytes inside "
                f"the clip ({norm}) it shows {metric} {sorted(map(str, got))}"
            )
    if not all(_counts(t, "ddp", ORDERED, "sync_collectives")):
        raise MissingRecord("the counter is not to be trusted: it saw no all-reduce in backward")


def ddp_reduces_the_norm(t: Tables) -> Finding:
    """Count the collectives inside clip_grad_norm_ under DDP."""
    _check_counter(t)
    counts = _counts(t, "ddp", ORDERED, "clip_collectives")
    evidence = {
        "clip_bytes": sum(_counts(t, "ddp", ORDERED, "clip_bytes")),
        "backward_bytes": max(_counts(t, "ddp", ORDERED, "sync_bytes")),
        "control_collectives": max(_counts(t, "ddp_reduced", ORDERED, "clip_collectives")),
    }
    numbers: dict[str, Any] = {"effect": float(max(counts)), "unit": COUNTED, "evidence": evidence}
    if min(counts) > 0:
        return holds(f"{min(counts)} or more collectives in every call", **numbers)
    if max(counts) > 0:
        return unknown("some calls send something and some do not", **numbers)
    return refuted(
        "0 collectives and 0 bytes inside clip_grad_norm_ for L1, L2 and inf on every rank; "
        "the control's one explicit all-reduce is counted as 1",
        **numbers,
    )


def value_clip_is_silent(t: Tables) -> Finding:
    """Count the collectives inside clip_grad_value_, replicated and sharded."""
    _check_counter(t)
    counts = {arm: max(_counts(t, arm, ["value"], "clip_collectives")) for arm in ("ddp", *SHARDED)}
    numbers: dict[str, Any] = {
        "effect": float(max(counts.values())),
        "unit": COUNTED,
        "evidence": counts,
    }
    if any(counts.values()):
        return refuted("clip_grad_value_ does send something", **numbers)
    return holds("0 collectives under DDP, FSDP1, fully_shard and mixtures", **numbers)


def value_clip_saves_traffic(t: Tables) -> Finding:
    """Compare what the two kinds of clipping send under DDP."""
    _check_counter(t)
    norm = max(_counts(t, "ddp", ORDERED, "clip_collectives"))
    saved = norm - max(_counts(t, "ddp", ["value"], "clip_collectives"))
    before = t.snapshot("one_process", "grad", step=1, phase="L2")
    after = t.snapshot("one_process", "grad", step=3, phase="value")
    turned = _cosine(before, after)
    numbers: dict[str, Any] = {
        "effect": float(saved),
        "unit": "collectives saved a step",
        "evidence": {
            "cosine": turned,
            "saved_when_sharded": max(_counts(t, "fsdp2", ["L2"], "clip_collectives")),
            "saved_bytes_when_sharded": max(_counts(t, "fsdp2", ["L2"], "clip_bytes")),
        },
    }
    if saved > 0:
        return holds(f"{saved} collectives fewer a step", **numbers)
    return refuted(
        f"nothing to save under DDP, and the gradient turns: its cosine to what it was is "
        f"{turned:.2f}, while a norm clip keeps the direction",
        **numbers,
    )


def sharded_norm_is_one_all_reduce(t: Tables) -> Finding:
    """Count the collectives inside the norm clip of sharded gradients."""
    _check_counter(t)
    evidence: dict[str, Any] = {}
    right = True
    for arm in SHARDED:
        ops = _counts(t, arm, ORDERED, "clip_ops")
        right &= set(ops) == {"all_reduce"}
        evidence[f"{arm}_bytes"] = max(_counts(t, arm, ORDERED, "clip_bytes"))
        evidence[f"{arm}_ops"] = " / ".join(sorted({str(op) or "none" for op in ops}))
        evidence[f"{arm}_backward_bytes"] = max(_counts(t, arm, ORDERED, "sync_bytes"))
    evidence["fsdp2_by_layer"] = max(_counts(t, "fsdp2", ["layer"], "clip_collectives"))
    most = max(evidence[f"{arm}_bytes"] for arm in SHARDED)
    numbers: dict[str, Any] = {"effect": float(most), "unit": "bytes a call", "evidence": evidence}
    if not right:
        return refuted("another number of collectives than one all-reduce", **numbers)
    return holds(
        f"exactly one all-reduce of at most {most} bytes for L1, L2 and inf, under FSDP1, "
        f"fully_shard, HSDP and mixtures; clipping layer by layer takes "
        f"{evidence['fsdp2_by_layer']}, one a parameter",
        **numbers,
    )


def traffic_grows_with_the_model(t: Tables) -> Finding:
    """Compare the bytes of the clip at two widths, beside those of backward."""
    evidence: dict[str, Any] = {}
    grows, checked = False, False
    for arm in ("timed_ddp", "timed_fsdp1", "timed_fsdp2"):
        t.require(arm)
        clip, sync = (
            [t.value(arm, metric, step=step, phase=phase) for step, phase in _WIDTHS]
            for metric in ("clip_bytes", "sync_bytes")
        )
        grows |= clip[1] > clip[0]
        checked |= sync[1] > sync[0]
        evidence |= {f"{arm}_clip": f"{clip[0]} -> {clip[1]}"}
        evidence |= {f"{arm}_backward": f"{sync[0]} -> {sync[1]}"}
    clip, sync = (
        t.value("timed_fsdp2", metric, step=1, phase="wide")
        for metric in ("clip_bytes", "sync_bytes")
    )
    evidence["parameters"] = t.value("timed_fsdp2", "parameters", step=1, phase="wide")
    share = clip / (clip + sync)
    numbers: dict[str, Any] = {"effect": share, "unit": "share of the bytes", "evidence": evidence}
    if not checked:
        return unknown("backward's own traffic did not grow with the width", **numbers)
    if grows:
        return holds("a wider model sends more inside the clip", **numbers)
    return refuted(
        f"twice the width leaves the clip's bytes as they are while backward's grow; under "
        f"fully_shard they are {clip} of {clip + sync} bytes",
        **numbers,
    )


_WIDTHS = ((0, "narrow"), (1, "wide"))


def clip_takes_as_long_as_backward(t: Tables) -> Finding:
    """Compare times, by intervals only; a claim far from either side."""
    evidence: dict[str, Any] = {}
    decided: list[tuple[float, float, float]] = []
    for arm in ("timed_ddp", "timed_fsdp1", "timed_fsdp2"):
        t.require(arm)
        for mode in ("foreach",) if arm == "timed_fsdp1" else ("foreach", "loop"):
            ranks = [_share(t, arm, mode, rank) for rank in t.ranks(arm)]
            low, middle, high = (
                pick(one)
                for pick, one in zip((min, max, max), zip(*ranks, strict=True), strict=True)
            )
            name = f"{arm.removeprefix('timed_')}_{mode}"
            evidence[name] = f"{middle:.1%} ({low:.1%} to {high:.1%})"
            evidence[f"{name}_us"] = round(
                1e6 * max(_median(t, arm, mode, rank) for rank in t.ranks(arm)), 1
            )
            if arm == "timed_ddp":
                decided.append((low, middle, high))
    steps = len(t.series("timed_ddp", "clip_s", phase="foreach"))
    evidence |= {
        "steps": steps,
        "parameters": t.value("timed_ddp", "parameters", step=1, phase="wide"),
    }
    worst = max(middle for _, middle, _ in decided)
    numbers: dict[str, Any] = {
        "effect": worst,
        "unit": "share of backward + clip",
        "evidence": evidence,
    }
    if steps < FEWEST_STEPS:
        return unknown(f"{steps} timed steps give no interval, it takes {FEWEST_STEPS}", **numbers)
    text = f"a median of {worst:.1%} of backward, gradient all-reduce and clip, on the slowest rank"
    if all(high < 0.5 for _, _, high in decided):
        return refuted(text, **numbers)
    if all(low > 0.5 for low, _, _ in decided):
        return holds(text, **numbers)
    return unknown(f"{text}: the interval lies on both sides of one half", **numbers)


FEWEST_STEPS = 10


def _share(t: Tables, arm: str, mode: str, rank: int) -> tuple[float, float, float]:
    """Return the median share of a rank with its 95 % interval, from the order of the values."""
    clip = t.series(arm, "clip_s", phase=mode, rank=rank)
    backward = t.series(arm, "backward_s", phase=mode, rank=rank)
    shares = sorted(clip[step] / (clip[step] + backward[step]) for step in clip)
    count = len(shares)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    return shares[low], shares[count // 2], shares[high]


def _median(t: Tables, arm: str, mode: str, rank: int) -> float:
    values = sorted(t.series(arm, "clip_s", phase=mode, rank=rank).values())
    return float(values[len(values) // 2])


def distributed_clip_is_right(t: Tables) -> Finding:
    """Compare the clipped gradient of every way of distributing with one process."""
    gaps = {
        f"{arm} {norm}": _gap(t, arm, norm)
        for arm in ("ddp", *SHARDED)
        for norm in NORMS
        if not (norm == "layer" and arm.startswith("fsdp1")) and not _skipped(t, arm, norm)
    }
    return _all_clean(gaps, "every clipped gradient equals that of one process")


def local_norm_is_the_models(t: Tables) -> Finding:
    """Compare a clip of what each rank holds with one process."""
    gaps = {f"{arm} {norm}": _gap(t, arm, norm) for arm, norms in _LOCAL.items() for norm in norms}
    return _all_faulty(gaps, "each rank scales its shard by another factor")


_LOCAL = {"fsdp1_shards": ("L1", "L2"), "fsdp2_shards": ("L1", "L2", "layer")}


def shard_norm_is_sqrt_n_smaller(t: Tables) -> Finding:
    """Add up the squares of the shards' norms."""
    arm = "fsdp2_shards"
    local = [float(n) for n in _counts(t, arm, ["L2"], "norm")]
    full = float(t.value("one_process", "full_norm", step=1, phase="L2"))
    floor = permutation_floor(t.permuted("one_process", "grad", step=1, phase="L2"))
    mean = math.sqrt(sum(norm**2 for norm in local) / len(local))
    effect = abs(mean * math.sqrt(len(local)) / full - 1)
    evidence = {
        "mean_ratio": full / mean,
        "smallest_ratio": full / max(local),
        "largest_ratio": full / min(local) if min(local) else math.inf,
        "sqrt_n": math.sqrt(len(local)),
    }
    numbers: dict[str, Any] = {
        "effect": effect,
        "floor": floor.value,
        "unit": EXACT_UNIT,
        "evidence": evidence,
    }
    size = floor.size(effect)
    if size is Size.BETWEEN:
        return unknown("the shards' norms nearly add up to the model's", **numbers)
    if size is Size.FAULT:
        return refuted("the squares of the shards' norms do not add up to the model's", **numbers)
    return holds(
        f"the model's norm is {full / mean:.4g} times the shards' root mean square, on single "
        f"ranks {evidence['smallest_ratio']:.3g} to {evidence['largest_ratio']:.3g} times",
        **numbers,
    )


def one_call_takes_both_kinds(t: Tables) -> Finding:
    """See whether fully_shard's and plain gradients may be clipped together."""
    t.require("fsdp2_part")
    refusals = {
        str(t.value("fsdp2_part", "refusal", step=len(NORMS), phase="one call", rank=rank))
        for rank in t.ranks("fsdp2_part")
    }
    evidence = {f"refusal_{number}": text for number, text in enumerate(sorted(refusals))}
    if refusals == {""}:
        return holds("torch clips sharded and plain gradients in one call", evidence=evidence)
    if "" in refusals:
        return unknown("some ranks refuse and some do not", evidence=evidence)
    return refuted(
        "under fully_shard the call raises; clip each kind with one total norm "
        "(get_total_norm of both, then clip_grads_with_norm_), which gives one process's gradient",
        evidence=evidence,
    )


def returned_norm_can_be_logged(t: Tables) -> Finding:
    """Compare the norm each rank would print with the model's."""
    t.require("fsdp2", "one_process")
    floor = permutation_floor(t.permuted("one_process", "grad", step=1, phase="L2"))
    errors = {}
    for norm in ORDERED:
        if _skipped(t, "fsdp2", norm):
            continue
        full = float(t.value("one_process", "full_norm", step=NORMS.index(norm), phase=norm))
        errors[norm] = max(abs(float(n) / full - 1) for n in _counts(t, "fsdp2", [norm], "norm"))
    worst = max(errors, key=lambda norm: errors[norm])
    numbers: dict[str, Any] = {
        "effect": errors[worst],
        "floor": floor.value,
        "unit": EXACT_UNIT,
        "evidence": errors,
    }
    size = floor.size(errors[worst])
    if size is Size.FAULT:
        return refuted(
            f"under fully_shard the {worst} norm comes back unreduced: what a rank prints is up to "
            f"{errors[worst]:.0%} off; full_tensor() gives the model's",
            **numbers,
        )
    if size is Size.BETWEEN or len(errors) < len(ORDERED):
        return unknown("not every norm could be compared", **numbers)
    return holds("every rank gets the model's norm", **numbers)


def lone_call_hangs_ddp(t: Tables) -> Finding:
    """Compare what rank 0 sends, alone in clipping, with what the others send."""
    t.require("rank0", "after")
    steps = list(t.series("rank0", "collectives"))
    sent = [
        [t.value("rank0", "collectives", step=s, rank=r) for s in steps] for r in t.ranks("rank0")
    ]
    extra = max(
        mine - other for others in sent[1:] for mine, other in zip(sent[0], others, strict=True)
    )
    numbers: dict[str, Any] = {
        "effect": float(extra),
        "unit": "collectives the others do not join",
        "evidence": {"steps": len(steps), "collectives_a_step": sent[0][0]},
    }
    if not any(sent[0]):
        return unknown("no collective was counted in these steps", **numbers)
    if extra > 0:
        return holds("rank 0 waits for collectives that the others never join", **numbers)
    return refuted(f"all {len(steps)} steps complete: the call sends nothing", **numbers)


def lone_call_is_harmless_under_ddp(t: Tables) -> Finding:
    """See whether the ranks still hold the same weights."""
    t.require("rank0", "after")
    control = t.first_divergence("after", metrics=("weights.digest",))
    if control is not None:
        return unknown("the ranks part even where all of them clip")
    parted = t.first_divergence("rank0", metrics=("weights.digest",))
    if parted is None:
        return holds("all ranks hold the same weights after every step")
    return refuted(
        f"no error and no hang, but after step {parted.step} ranks {parted.ranks[0]} and "
        f"{parted.ranks[1]} hold different weights, and nothing brings them together again",
        evidence={"step": parted.step, "with_all_ranks": "equal"},
    )


def lone_call_hangs_when_sharded(t: Tables) -> Finding:
    """See how rank 0 fared when it alone clipped sharded gradients."""
    t.require("fsdp1", "fsdp2")
    evidence: dict[str, Any] = {}
    outcomes = []
    for step, case in ((0, "fsdp2"), (1, "fsdp1")):
        raised = str(t.value("alone", "raised", step=step, phase=case))
        waited = t.value("alone", "waited", step=step, phase=case)
        others = [
            t.value("alone", "called", step=step, phase=case, rank=r) for r in t.ranks("alone")
        ]
        if others != [True] + [False] * (len(others) - 1):
            return unknown(f"{case}: it is not rank 0 alone that called")
        outcomes.append(bool(raised) and waited == 1)
        evidence |= {f"{case}_raised": raised, f"{case}_waiting_collectives": waited}
    seconds = t.value("alone", "timeout_s", step=0, phase="fsdp2")
    if all(outcomes):
        return holds(
            f"rank 0 waits in its all-reduce until the timeout (here {seconds:g} s) ends it, under "
            "FSDP1 and fully_shard",
            evidence=evidence,
        )
    if any(outcomes):
        return unknown("one of FSDP1 and fully_shard waits, the other does not", evidence=evidence)
    return refuted("rank 0 returns", evidence=evidence)


def inf_norm_works_where_l2_does(t: Tables) -> Finding:
    """See how the infinity norm fared where ranks hold an empty shard."""
    t.require("fsdp2")
    raised = [
        str(t.value("alone", "raised", step=2, phase="empty", rank=r)) for r in t.ranks("alone")
    ]
    waited = [t.value("alone", "waited", step=2, phase="empty", rank=r) for r in t.ranks("alone")]
    evidence = {
        "rank_0_raised": raised[0],
        "rank_1_raised": raised[1],
        "rank_0_waits_in": waited[0],
    }
    if not any(raised):
        return holds("a parameter with fewer rows than ranks is no obstacle", evidence=evidence)
    if not (all(raised[1:]) and not any(waited[1:]) and raised[0] and waited[0]):
        return unknown("some ranks with an empty shard raise and some do not", evidence=evidence)
    return refuted(
        "with a parameter of one row, the ranks without a row raise before the all-reduce and "
        "rank 0 waits in it: on the other ranks an error, on this one a hang",
        evidence=evidence,
    )


def _before(arm: str, means: str) -> Any:
    def judge(t: Tables) -> Finding:
        control = _order_gap(t, "same_rows")
        if control.size is not Size.CLEAN:
            return unknown("the order matters even where all ranks hold the same gradient")
        gap = _order_gap(t, arm)
        wrong = t.snapshot(arm, "grad", step=0)
        right = t.snapshot("trained_alone", "grad", step=0)
        norms = math.sqrt(float(wrong @ wrong)), math.sqrt(float(right @ right))
        cosine = _cosine(wrong, right)
        numbers: dict[str, Any] = {
            "effect": gap.effect,
            "floor": gap.floor.value,
            "unit": GAP,
            "evidence": {
                "cosine": cosine,
                "norm": norms[0],
                "right_norm": norms[1],
                "same_gradient_on_all_ranks": control.effect,
                "floor": str(gap.floor),
            },
        }
        if gap.size is Size.CLEAN:
            return holds("the gradient is that of one process", **numbers)
        if gap.size is Size.BETWEEN:
            return unknown("neither rounding nor a clear fault", **numbers)
        return refuted(
            f"{means}: cosine {cosine:.3f} to the right gradient, norm {norms[0]:.3g} instead of "
            f"{norms[1]:.3g}",
            **numbers,
        )

    return judge


by_hand_first = _before(
    "manual_before", "every rank's gradient gets the same weight, steep or flat"
)
in_hook = _before("hook_before", "the hook clips each rank's gradient before the average")
in_no_sync = _before("no_sync_before", "the first half is clipped on its own, before the average")
without_unscale = _before("scaled", f"the bound meets gradients {SCALE:g} times too large")


def averaging_first_is_right(t: Tables) -> Finding:
    """Compare every remedy with one process."""
    arms = ("after", "manual_after", "no_sync_after", "unscaled", "same_rows")
    gaps = {arm: _order_gap(t, arm) for arm in arms}
    return _all_clean(gaps, "averaged first, then clipped: the gradient of one process")


def _all_clean(gaps: Mapping[str, Gap], text: str) -> Finding:
    worst = max(gaps, key=lambda name: gaps[name].effect / gaps[name].floor.value)
    numbers = _numbers(gaps, worst)
    if any(gap.size is Size.FAULT for gap in gaps.values()):
        bad = ", ".join(name for name, gap in gaps.items() if gap.size is Size.FAULT)
        return refuted(f"not so: {bad}", **numbers)
    if any(gap.size is Size.BETWEEN for gap in gaps.values()):
        return unknown(f"{worst} is neither at the floor nor clearly off it", **numbers)
    return holds(text, **numbers)


def _all_faulty(gaps: Mapping[str, Gap], text: str) -> Finding:
    least = min(gaps, key=lambda name: gaps[name].effect / gaps[name].floor.value)
    numbers = _numbers(gaps, least)
    if all(gap.size is Size.CLEAN for gap in gaps.values()):
        return holds("the gradient is that of one process", **numbers)
    if not all(gap.size is Size.FAULT for gap in gaps.values()):
        return unknown(f"{least} is not clearly off the floor", **numbers)
    return refuted(f"{text}: at least {gaps[least].effect:.0%} off", **numbers)


def _numbers(gaps: Mapping[str, Gap], chosen: str) -> dict[str, Any]:
    evidence: dict[str, Any] = {name: gap.effect for name, gap in gaps.items()}
    gap = gaps[chosen]
    evidence["floor"] = str(gap.floor)
    return {"effect": gap.effect, "floor": gap.floor.value, "unit": GAP, "evidence": evidence}


def report_arithmetic(t: Tables) -> Finding:
    """Recompute the report's example."""
    norms = {"L1": ONES + LARGE, "L2": math.sqrt(ONES + LARGE**2)}
    left = {norm: float(_report(t, norm)[-1]) for norm in norms}
    error = max(abs(left[norm] / (MAX * LARGE / (size + 1e-6)) - 1) for norm, size in norms.items())
    numbers: dict[str, Any] = {
        "effect": error,
        "floor": _rounding(),
        "unit": EXACT_UNIT,
        "evidence": {f"{norm}_norm": size for norm, size in norms.items()}
        | {f"{norm}_leaves": value for norm, value in left.items()},
    }
    said = abs(left["L2"] - 499.75) < 0.005 and abs(left["L1"] - 250.1) < 0.05
    if error > _rounding() or not said:
        return refuted(f"L2 leaves {left['L2']:.4f}, L1 leaves {left['L1']:.4f}", **numbers)
    return holds(
        f"L2 leaves {left['L2']:.4f} of 1000 and L1 leaves {left['L1']:.4f} "
        "(the report's 499.7 is cut off, not rounded)",
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
        ratio, cosine = float(clipped[-1] / clipped[0]), _cosine(clipped, original)
        errors += [abs(ratio / LARGE - 1), abs(1 - cosine)]
        evidence |= {f"{norm}_ratio": ratio, f"{norm}_cosine": cosine}
    evidence["value_cosine"] = _cosine(_report(t, "value"), original)
    matched = relative_l2(_report(t, "L1"), _report(t, "matched", step=4))
    evidence["L1_against_L2_with_matched_bound"] = matched
    numbers: dict[str, Any] = {
        "effect": max(errors),
        "floor": _rounding(),
        "unit": EXACT_UNIT,
        "evidence": evidence,
    }
    if max(errors) > _rounding():
        return holds("a norm clip turns the gradient", **numbers)
    return refuted(
        "after L1, L2 and inf the spike is still 1000 times the rest and the cosine 1: a norm clip "
        f"rescales one vector; only the value clip turns it (cosine "
        f"{evidence['value_cosine']:.3f})",
        **numbers,
    )


def l2_cuts_a_spike_harder(t: Tables) -> Finding:
    """Compare what L1 and L2 leave of a spike at the same bound."""
    left = {
        norm: [float(t.value("report", "spike", step=s, phase=norm)) for s in range(len(SPIKES))]
        for norm in ("L1", "L2")
    }
    margin = [one / two - 1 for one, two in zip(left["L1"], left["L2"], strict=True)]
    evidence: dict[str, Any] = {
        f"{norm}_leaves_of_{spike:g}": value
        for norm, values in left.items()
        for spike, value in zip(SPIKES, values, strict=True)
    }
    numbers: dict[str, Any] = {
        "effect": max(margin),
        "floor": _rounding(),
        "unit": "what L1 leaves beyond L2, relative",
        "evidence": evidence,
    }
    if max(margin) > _rounding():
        return holds("at the same bound L1 leaves more of the spike than L2", **numbers)
    return refuted(
        "the L1 norm is never the smaller one, so at the same bound L1 never leaves more: "
        + ", ".join(f"{a:.4g} against {b:.4g}" for a, b in zip(*left.values(), strict=True)),
        **numbers,
    )


def below_the_bound_is_untouched(t: Tables) -> Finding:
    """See what is left of a tiny gradient below its bound."""
    left = float(t.value("report", "left", step=0, phase="tiny"))
    shrunk = abs(left / TINY - 1)
    numbers: dict[str, Any] = {
        "effect": shrunk,
        "floor": _rounding(),
        "unit": EXACT_UNIT,
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


def _cosine(x: Any, y: Any) -> float:
    return float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))


def headline(findings: Mapping[str, Finding]) -> str:
    """Say what this run found, in one sentence."""
    ddp, sharded = findings["ddp_reduces_the_norm"], findings["sharded_norm_is_one_all_reduce"]
    order, timed = findings["by_hand_first"], findings["clip_takes_as_long_as_backward"]
    parts = []
    if ddp.outcome is Outcome.REFUTED:
        share = f" and takes {timed.effect:.1%} of backward plus clip" if timed.effect else ""
        parts.append(f"under DDP clip_grad_norm_ sends nothing{share}")
    elif ddp.outcome is Outcome.HOLDS:
        parts.append(f"under DDP clip_grad_norm_ issues up to {ddp.effect:.0f} collectives")
    if sharded.outcome is Outcome.HOLDS:
        parts.append(f"sharded gradients need one all-reduce of {sharded.effect:.0f} bytes")
    if order.outcome is Outcome.REFUTED:
        parts.append(
            f"clipping before the average is the failure: the gradient is {order.effect:.0%} off, "
            f"{order.multiple:.0e} floors"
        )
    elif order.outcome is Outcome.HOLDS:
        parts.append("clipping before or after the average is the same")
    text = (
        "; ".join(parts) or "this run decides neither what the clip sends nor what its place does"
    )
    return text[0].upper() + text[1:] + "."
