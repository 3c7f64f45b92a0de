"""What the records of logsoftmax_drift say: one function a claim, pure functions of the tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from harness.errors import MissingRecord
from harness.floor import Effect, Floor, Scaling, dtype_floor, permutation_floor
from harness.scenario import Finding, holds, refuted, unknown

if TYPE_CHECKING:
    from harness.tables import Tables

L2 = "relative L2 distance of the parameters to one process"
DTYPES = {"": "float64", "_fp32": "float32", "_bf16": "bfloat16"}
"""Suffix of an arm's name -> dtype; the first decides."""
FORMS = ("log_softmax", "log_of_softmax")
"""Ways of writing cross_entropy by hand."""


def marks(steps: int) -> list[int]:
    """Return the steps at which values are kept: 1, 2, 4, ... and the last."""
    return sorted({2**k for k in range(steps.bit_length()) if 2**k <= steps} | {steps})


def dice_of(counts: Any) -> Any:
    """Return the mean over classes of 2 * overlap / size; a class that nobody has scores 1."""
    overlap, size = counts
    return ((2 * overlap + (size == 0)) / (size + (size == 0))).mean()


def last(t: Tables) -> int:
    """Return the number of the last step."""
    return int(t.root_params["steps"])


def gap(t: Tables, arm: str, to: str, step: int | None = None, *, reference: str = "") -> Effect:
    """Return how far the parameters of an arm's worst rank are from `to`, beside the floor.

    Raises:
        MissingRecord: if either did not stay finite: that is neither rounding nor a gap.
    """
    step = last(t) if step is None else step
    t.require(arm, to)
    check_dtype(t, arm)
    check_dtype(t, to)
    distances = [
        t.distance(arm, to, "params", step=step, phase="step", rank=rank) for rank in t.ranks(arm)
    ]
    if not all(map(math.isfinite, distances)):
        raise MissingRecord(
            f"the parameters of {arm} or {to} are not finite at step {step} (valid labels "
            f"{shares(t, arm)}): {settings(t, 'lr', 'batch', 'imbalance')}"
        )
    return Effect(value=max(distances), floor=floor(t, reference or to, step))


def check_dtype(t: Tables, arm: str) -> None:
    """Raise if an arm did not compute in the dtype of its name: its gap would be another one's."""
    wanted = next((d for suffix, d in DTYPES.items() if suffix and arm.endswith(suffix)), "float64")
    for rank in t.ranks(arm):
        found = t.value(arm, "logits", step=last(t), phase="backward", rank=rank)
        if found != wanted:
            raise MissingRecord(f"arm {arm}: the logits of rank {rank} are {found}, not {wanted}")


def settings(t: Tables, *names: str) -> str:
    """Return parameters as they would be typed."""
    return ", ".join(f"scenario.{name}={t.root_params[name]}" for name in names)


def floor(t: Tables, reference: str, step: int) -> Floor:
    """Return what permuted rows move; under autocast, what one process loses to bfloat16."""
    wide = reference.removesuffix("_bf16")
    try:
        if reference != wide:
            return dtype_floor(t.distance(reference, wide, "params", step=step, phase="step"))
        return permutation_floor(t.permuted(reference, "params", step=step, phase="step"))
    except MissingRecord as error:
        named = settings(t, "permutations", "lr", "batch")
        raise MissingRecord(f"{reference}, step {step}: {error} ({named})") from None


def largest(effects: Iterable[Effect]) -> Effect:
    """Return the effect of most floors."""
    return max(effects, key=lambda effect: effect.multiple)


def numbers(effect: Effect, unit: str = L2, /, **evidence: Any) -> dict[str, Any]:
    """Return the fields of a finding about an effect; names in `evidence` read as words."""
    words = {name.replace("_", " "): value for name, value in evidence.items()}
    words["floor, whole range"] = str(effect.floor)
    return {"effect": effect.value, "floor": effect.floor.value, "unit": unit, "evidence": words}


def shares(t: Tables, arm: str) -> list[int]:
    """Return the number of valid labels of each rank."""
    return [int(t.last(arm, "valid", rank=rank)) for rank in t.ranks(arm)]


def uneven_shares(t: Tables) -> list[int]:
    """Return the shares of the faulty arm; MissingRecord if this run has nothing uneven."""
    found = shares(t, "uneven")
    if len(set(found)) == 1:
        raise MissingRecord(
            f"imbalance={t.root_params['imbalance']} gives each of {len(found)} ranks {found[0]} "
            "valid labels: nothing is uneven; type scenario.imbalance=0.5"
        )
    return found


def equal_shares(t: Tables) -> int:
    """Return the share of every rank in the control arm; MissingRecord if they are not equal."""
    found = shares(t, "equal")
    if len(set(found)) > 1:
        world, batch = len(found), t.root_params["batch"]
        raise MissingRecord(
            f"batch={batch} holds {sum(found)} valid labels, which {world} ranks cannot share "
            f"equally; type scenario.batch={2 * world * -(-batch // (2 * world))}"
        )
    return found[0]


def judge_ranks_differ(t: Tables) -> Finding:
    """Compare the digests of gradients and parameters between ranks, at every step: exact."""
    arms = [arm.name for arm in t.plan.arms if arm.ranks > 1]
    t.require(*arms)
    found = {arm: t.first_divergence(arm, metrics=("grad.digest", "params.digest")) for arm in arms}
    for arm in arms:
        for step in range(1, last(t) + 1):
            for name, phase in (("grad", "backward"), ("params", "step")):
                t.value(arm, f"{name}.digest", step=step, phase=phase)
                if t.value(arm, f"{name}.nonfinite", step=step, phase=phase):
                    raise MissingRecord(
                        f"arm {arm}: {name} is not finite at step {step}, and any order of an "
                        f"all-reduce gives that: {settings(t, 'lr', 'batch', 'imbalance')}"
                    )
    apart = {arm: where for arm, where in found.items() if where}
    exact: dict[str, Any] = {
        "effect": float(len(apart)),
        "floor": 0.0,
        "unit": "arms whose ranks differ in a bit",
        "evidence": {"arms": len(arms), "steps": last(t), "ranks": len(t.ranks("equal"))},
    }
    for arm, where in apart.items():
        return holds(
            f"{len(apart)} of {len(arms)} arms; in {arm}, {where.metric} of ranks "
            f"{where.ranks[0]} and {where.ranks[1]} differ from step {where.step} on",
            **exact,
        )
    return refuted(
        f"gradients and parameters are bit-identical on {len(t.ranks('equal'))} ranks, in "
        f"{len(arms)} arms, at each of {last(t)} steps",
        **exact,
    )


def judge_order_bias(t: Tables) -> Finding:
    """Follow the gap of the arms with equal counts over the steps, in every dtype and form."""
    each = equal_shares(t)
    pairs = {
        f"equal{form}{suffix}": f"reference{suffix}"
        for form in ("", *(f"_{form}" for form in FORMS))
        for suffix in DTYPES
    }
    curves = {
        arm: {step: gap(t, arm, to, step) for step in marks(last(t))} for arm, to in pairs.items()
    }
    end = curves["equal"][last(t)]
    fields = numbers(
        end,
        valid_labels_of_each_rank=each,
        **{
            f"floors in {arm}, step {step}": round(effect.multiple, 3)
            for arm, curve in curves.items()
            for step, effect in curve.items()
        },
    )
    worst = largest(effect for curve in curves.values() for effect in curve.values()).multiple
    if all(effect.clean for curve in curves.values() for effect in curve.values()):
        return refuted(
            f"with {each} valid labels on every rank the gap to one process is {end} after "
            f"{last(t)} steps, and at most {worst:.2g} floors in any dtype, form and step",
            **fields,
        )
    if any(effect.fault for effect in curves["equal"].values()):
        return holds(f"the gap to one process is {end} with equal valid counts", **fields)
    return unknown(f"up to {worst:.2g} floors: neither rounding nor a fault", **fields)


def judge_rounding_scales(t: Tables) -> Finding:
    """Compare the gap with equal counts in float32 and float64 with the ratio of their floors."""
    equal_shares(t)
    fine, coarse = gap(t, "equal", "reference"), gap(t, "equal_fp32", "reference_fp32")
    scaling = Scaling(coarse=coarse.value, fine=fine.value)
    autocast = gap(t, "equal_bf16", "reference_bf16")
    fields: dict[str, Any] = {
        "effect": scaling.ratio,
        "floor": coarse.floor.value / fine.floor.value,
        "unit": "times smaller in float64 than in float32",
        "evidence": {
            "ratio of machine epsilons": scaling.eps_ratio,
            "gap in float32": coarse.value,
            "gap in float64": fine.value,
            "gap under bfloat16 autocast": autocast.value,
            "what autocast rounds away in one process": autocast.floor.value,
        },
    }
    text = f"{coarse.value:.2g} in float32, {fine.value:.2g} in float64: {scaling.ratio:.2g} times"
    if scaling.shrinks_like_rounding:
        return holds(f"{text}; the epsilons are {scaling.eps_ratio:.2g} apart", **fields)
    return refuted(text, **fields) if scaling.stays else unknown(text, **fields)


def judge_hard_labels(t: Tables) -> Finding:
    """Ask whether soft labels are free of the gap that hard labels show with uneven counts."""
    counts = uneven_shares(t)
    world, batch = len(counts), t.root_params["batch"]
    if batch % world:
        raise MissingRecord(
            f"scenario.batch={batch} gives {world} ranks unequal rows, so that the mean over all "
            f"rows is no control; type scenario.batch={2 * world * -(-batch // (2 * world))}"
        )
    hard, soft = gap(t, "uneven", "reference"), gap(t, "uneven_soft", "reference_soft")
    even = gap(t, "equal", "reference"), gap(t, "equal_soft", "reference_soft")
    # Dividing by all rows halves the step and no more: the floor of the same loss serves both.
    rows = gap(t, "uneven_soft_rows", "reference_soft_rows", reference="reference_soft")
    stays, in_dtypes = _stays(t, "uneven_soft", "reference_soft", soft)
    fields = numbers(
        soft,
        **{f"soft_labels_uneven_{dtype}": value for dtype, value in in_dtypes.items()},
        hard_labels_uneven=hard.value,
        hard_labels_equal=even[0].value,
        soft_labels_equal=even[1].value,
        soft_labels_divided_by_rows_uneven=rows.value,
        valid_labels_by_rank=str(counts),
    )
    clean = rows.clean and even[0].clean and even[1].clean
    if hard.fault and soft.fault and clean and stays:
        return refuted(
            f"soft labels over valid rows: {soft}, in every dtype, hard labels {hard.value:.2g}; "
            "soft labels only look innocent where cross_entropy divides them by all rows, equal on "
            f"ranks ({rows})",
            **fields,
        )
    if hard.fault and soft.clean and even[0].clean:
        return holds(f"hard labels: {hard}; soft labels: {soft}", **fields)
    return unknown(
        f"hard {hard}, soft {soft}, soft over all rows {rows}, with equal counts hard {even[0]}, "
        f"soft {even[1]}; in every dtype: {stays} ({settings(t, 'lr', 'batch')})",
        **fields,
    )


def judge_form(t: Tables) -> Finding:
    """Compare each way of writing the loss with cross_entropy, on the same ranks and counts."""
    effects = {
        f"{counts}_{form}{suffix}": gap(
            t, f"{counts}_{form}{suffix}", f"{counts}{suffix}", reference=f"reference{suffix}"
        )
        for counts in ("equal", "uneven")
        for form in FORMS
        for suffix in DTYPES
    }
    worst = largest(effects.values())
    fine = largest(effects[f"{counts}_{form}"] for counts in ("equal", "uneven") for form in FORMS)
    told = {name: effect.value for name, effect in effects.items()}
    fields = numbers(worst, **told)
    if all(effect.clean for effect in effects.values()):
        return refuted(
            f"log_softmax + nll_loss and log(softmax) + nll_loss end within {fine} of "
            "cross_entropy in float64, with equal and with uneven counts; in no dtype beyond "
            f"{worst.multiple:.2g} floors",
            **numbers(fine, **told),
        )
    if worst.fault:
        return holds(f"the form alone moves the parameters by {worst}", **fields)
    return unknown(f"the form moves the parameters by {worst}", **fields)


def judge_uneven(t: Tables) -> Finding:
    """Ask whether uneven counts leave a gap that neither float64 nor float32 nor autocast moves."""
    counts = uneven_shares(t)
    end, start = gap(t, "uneven", "reference"), gap(t, "uneven", "reference", 1)
    stays, gaps = _stays(t, "uneven", "reference", end)
    ratio = gaps["float32"] / end.value if end.value else math.inf
    gradient = t.distance("uneven", "reference", "grad", step=1, phase="backward")
    fields = numbers(
        end,
        valid_labels_by_rank=str(counts),
        gradient_at_step_1=gradient,
        parameters_at_the_end_float32=gaps["float32"],
        parameters_at_the_end_bfloat16=gaps["bfloat16"],
        float32_over_float64=ratio,
        **{
            f"parameters_at_step_{step}": gap(t, "uneven", "reference", step).value
            for step in marks(last(t))
        },
    )
    text = (
        f"valid labels {counts}: gradient off by {gradient:.2g} at step 1, parameters by "
        f"{start.value:.2g} at step 1 and {end} at step {last(t)}"
    )
    if end.fault and stays:
        return holds(
            f"{text}; float32 gives {ratio:.4f} times that, bfloat16 autocast "
            f"{gaps['bfloat16']:.2g}",
            **fields,
        )
    if end.clean:
        return refuted(text, **fields)
    return unknown(
        f"{text}; float32 gives {ratio:.4f} times that, autocast {gaps['bfloat16']:.2g}: not the "
        f"same in every dtype, or between rounding and a fault ({settings(t, 'lr', 'steps')})",
        **fields,
    )


def _stays(t: Tables, arm: str, to: str, fine: Effect) -> tuple[bool, dict[str, float]]:
    """Say whether a gap is the same in every dtype; returns it in the coarser ones, too."""
    single, autocast = (gap(t, arm + suffix, to + suffix) for suffix in ("_fp32", "_bf16"))
    moved = Effect(value=abs(autocast.value - fine.value), floor=autocast.floor)
    stays = Scaling(coarse=single.value, fine=fine.value).stays and moved.clean
    return stays, {"float32": single.value, "bfloat16": autocast.value}


def judge_dice(t: Tables) -> Finding:
    """Ask whether the gap reaches the metric: soft Dice decides, since it moves continuously."""
    counts = uneven_shares(t)
    t.require("fixed")
    parameters = gap(t, "uneven", "reference")
    base = t.last("reference", "dice_soft")
    repeats = range(1, t.plan.arm("reference").repeats)
    spacing = math.ulp(base)  # many permutations move soft Dice by less than that, so by nothing
    moved = [max(abs(t.last("reference", "dice_soft", repeat=k) - base), spacing) for k in repeats]
    signed = t.last("uneven", "dice_soft") - base
    effect = Effect(value=abs(signed), floor=permutation_floor(moved))
    hard = t.last("uneven", "dice") - t.last("reference", "dice")
    fields = numbers(
        effect,
        "points of soft Dice on the held-out rows",
        parameters_from_one_process=parameters.value,
        soft_Dice_of_one_process=base,
        Dice_of_one_process=t.last("reference", "dice"),
        soft_Dice_signed=signed,
        Dice_signed=hard,
        soft_Dice_signed_at_step_1=_dice_at(t, "uneven", 1) - _dice_at(t, "reference", 1),
        Dice_signed_fixed=t.last("fixed", "dice") - t.last("reference", "dice"),
        soft_Dice_signed_fixed=t.last("fixed", "dice_soft") - base,
        **{
            f"soft_Dice_signed_{dtype}": t.last(f"uneven{suffix}", "dice_soft")
            - t.last(f"reference{suffix}", "dice_soft")
            for suffix, dtype in DTYPES.items()
            if suffix
        },
        valid_labels_by_rank=str(counts),
    )
    text = (
        f"Dice moves by {hard:+.2f} points, soft Dice by {signed:+.2g} ({effect.multiple:.2g} "
        "floors); one seed leaves the sign open: type seed=1,2,3,4,5,6,7,8 in a sweep"
    )
    if not parameters.fault:
        return unknown(f"the parameters have no gap that could reach Dice: {parameters}", **fields)
    if effect.fault:
        return holds(text, **fields)
    return refuted(text, **fields) if effect.clean else unknown(text, **fields)


def _dice_at(t: Tables, arm: str, step: int) -> float:
    return float(t.value(arm, "dice_soft", step=step, phase="eval"))


def judge_metric(t: Tables) -> Finding:
    """Average Dice over ranks in the arm whose parameters equal one process's: exact counts."""
    import numpy as np

    equal_shares(t)
    healthy = gap(t, "equal", "reference")
    at: dict[str, Any] = {"step": last(t), "phase": "eval"}
    mine = [
        t.snapshot("equal", "mine", rank=rank, **at).reshape(2, -1) for rank in t.ranks("equal")
    ]
    whole = t.snapshot("equal", "whole", **at).reshape(2, -1)
    one = t.snapshot("reference", "whole", **at).reshape(2, -1)
    by_rank = [100 * float(dice_of(counts)) for counts in mine]
    mean, pooled = sum(by_rank) / len(by_rank), 100 * float(dice_of(sum(mine)))
    exact = bool(np.array_equal(sum(mine), whole) and np.array_equal(whole, one))
    fields: dict[str, Any] = {
        "effect": abs(mean - pooled),
        "floor": abs(pooled - 100 * float(dice_of(one))),
        "unit": "points of Dice on the held-out rows",
        "evidence": {
            "mean of Dice over ranks": mean,
            "Dice of the summed counts": pooled,
            "Dice by rank": ", ".join(f"{value:.2f}" for value in by_rank),
            "parameters, floors from one process": healthy.multiple,
        },
    }
    if not (exact and healthy.clean):
        return unknown("the counts of the ranks do not add up to those of one process", **fields)
    if mean == pooled:
        return unknown("the ranks' shares happen to give the same Dice", **fields)
    return refuted(
        f"with parameters equal to one process's, the mean over ranks is {mean - pooled:+.2f} "
        "points off, the sum of the counts over ranks is exact",
        **fields,
    )


def judge_global_count(t: Tables) -> Finding:
    """Ask, in each dtype, whether the count of all ranks brings the gap back to rounding."""
    counts = uneven_shares(t)
    broken = gap(t, "uneven", "reference")
    cured = {
        dtype: gap(t, f"fixed{suffix}", f"reference{suffix}") for suffix, dtype in DTYPES.items()
    }
    fields = numbers(
        cured["float64"],
        valid_labels_by_rank=str(counts),
        without_it=broken.value,
        **{f"floors_in_{dtype}": effect.multiple for dtype, effect in cured.items()},
    )
    text = f"from {broken.value:.2g} to " + ", ".join(f"{v} in {k}" for k, v in cured.items())
    if not broken.fault:
        return unknown(f"there was nothing to cure: {broken}", **fields)
    if all(effect.clean for effect in cured.values()):
        return holds(text, **fields)
    return refuted(text, **fields) if cured["float64"].fault else unknown(text, **fields)


def judge_class_weights(t: Tables) -> Finding:
    """Ask whether weights make rank means differ with equal counts, and their sum cures it."""
    return _other_loss(t, "class_weights", "the weights of the labels")


def judge_dice_loss(t: Tables) -> Finding:
    """Ask whether Dice of a rank's own rows misleads, and overlap and size of all ranks cure it."""
    return _other_loss(t, "dice_loss", "overlap and size")


def _other_loss(t: Tables, loss: str, summed_up: str) -> Finding:
    each = equal_shares(t)
    broken = gap(t, loss, f"reference_{loss}")
    cured = gap(t, f"{loss}_fixed", f"reference_{loss}")
    gradient = t.distance(loss, f"reference_{loss}", "grad", step=1, phase="backward")
    fields = numbers(
        broken, gradient_at_step_1=gradient, cured=cured.value, valid_labels_of_each_rank=each
    )
    text = (
        f"{each} valid labels on every rank, yet {broken} from one process; with {summed_up} "
        f"summed over ranks {cured}"
    )
    if broken.fault and cured.clean:
        return holds(text, **fields)
    return refuted(text, **fields) if broken.clean or cured.fault else unknown(text, **fields)
