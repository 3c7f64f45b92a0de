"""Decisions that many judges share, each a finding: a gap, equal bits, a count, a mean.

Each function decides one statement about the records and gives the fact as the reason, so that a
judge reads like its claim: `negated(ranks_agree(t, "faulty", "weights"))`. What is missing raises
`MissingRecord`, and what the parameters have made void is `unknown`: neither is ever a pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from harness.errors import MissingRecord
from harness.floor import Effect, Floor
from harness.rounding import rounding
from harness.scenario import Finding, Outcome, Scalar, holds, refuted, unknown
from harness.tables import relative_l2

if TYPE_CHECKING:
    from harness.tables import Tables

SAME_SE = 4.0
"""A mean so many standard errors from a value counts as equal: 1 false alarm in 16,000."""
OTHER_SE = 8.0
"""A mean this far away or further counts as different; between the two nothing is said."""
TOO_NEAR = ": too near for this many values"


def matches(
    t: Tables,
    arm: str,
    reference: str,
    name: str,
    *,
    step: int | None = None,
    times: float = 1.0,
) -> Finding:
    """Decide: every rank of the arm holds the reference's tensor, up to rounding.

    The floor is how far the reference's own repeats move under permuted reductions.

    Args:
        t: records of the run.
        arm: whose ranks are compared, each on its own.
        reference: arm with at least 20 permuted repeats; its rank 0 is compared with.
        name: of a snapshot that both took in phase "".
        step: where; None = the last step at which the reference took it.
        times: how often each rank is said to hold the reference's tensor.

    Raises:
        MissingRecord: if a snapshot is missing, or no permutation moved the reference.
    """
    t.require(arm, reference)
    at = list(t.series(reference, f"{name}.digest", phase=""))[-1] if step is None else step
    floor = rounding(t, reference, name, step=at)
    due = times * t.snapshot(reference, name, step=at)
    gaps = {r: relative_l2(t.snapshot(arm, name, step=at, rank=r), due) for r in t.ranks(arm)}
    effects = {rank: Effect(value=gap, floor=floor) for rank, gap in gaps.items()}
    # NaN compares with nothing, and a weight that is not finite is the worst there is.
    worst = max(effects.values(), key=lambda e: math.inf if math.isnan(e.value) else e.value)
    said = "" if times == 1.0 else f"{times:.4g} times "
    reason = f"{name} of {arm} after step {at} are {worst} from {said}{reference}"
    finding = is_rounding(worst.value, floor, reason, "relative L2 distance")
    evidence: dict[str, Scalar] = {"step": at, **finding.evidence}
    evidence |= {f"rank_{rank}": effect.value for rank, effect in effects.items()}
    return dataclasses.replace(finding, evidence=evidence)


def is_rounding(effect: float, floor: Floor, reason: str, unit: str) -> Finding:
    """Decide: an effect is no more than rounding; what lies between rounding and fault is open."""
    found = Effect(value=effect, floor=floor)
    numbers = {"effect": effect, "floor": floor.value, "unit": unit}
    evidence: dict[str, Scalar] = {"floor": str(floor)}
    if found.clean:
        return holds(reason, **numbers, evidence=evidence)
    if found.fault:
        return refuted(reason, **numbers, evidence=evidence)
    return unknown(f"{reason}: neither rounding nor a fault", **numbers, evidence=evidence)


def like_one_process(t: Tables, arm: str, name: str = "weights") -> Finding:
    """Decide: all ranks end with one tensor, and it is the reference's up to rounding.

    The reference is the arm `one_process`. One rank that agrees with it says nothing of the others,
    and ranks that agree may all be wrong: this asks both.
    """
    return all_of(matches(t, arm, "one_process", name), ranks_agree(t, arm, name))


def ranks_agree(t: Tables, arm: str, name: str, *, moving: bool = True) -> Finding:
    """Decide: at every moment of the arm all ranks hold the same bits of a tensor.

    Args:
        t: records of the run.
        arm: with two ranks or more.
        name: of a digest or snapshot, or of a metric that every rank logged under that name.
        moving: a value that never changes shows nothing, and the finding is `unknown`.

    Raises:
        MissingRecord: if one rank lacks what another recorded.
    """
    t.require(arm)
    if len(t.ranks(arm)) < 2:
        return unknown(f"arm {arm} has one rank: there is nothing to compare")
    metric = f"{name}.digest" if t.has(arm, f"{name}.digest") else name
    parted = t.first_divergence(arm, metrics=(metric,))
    seen = [value for rank in t.ranks(arm) for value in t.series(arm, metric, rank=rank).values()]
    evidence: dict[str, Scalar] = {"ranks": len(t.ranks(arm)), "compared": len(seen)}
    if parted is not None:
        first, other = parted.ranks
        evidence |= {"first_step": parted.step, "first_rank": other}
        return refuted(
            f"{name} of {arm} differ from step {parted.step} on, first between ranks {first} and "
            f"{other}",
            evidence=evidence,
        )
    if moving and len(t.series(arm, metric)) > 1 and len(set(seen)) == 1:
        return unknown(f"{name} of {arm} never change in this run: equal ranks show nothing")
    return holds(
        f"{name} of {arm} are equal bit for bit on all {len(t.ranks(arm))} ranks at every step",
        evidence=evidence,
    )


def stands_still(t: Tables, arm: str, reference: str, name: str) -> Finding:
    """Decide: on no rank of the arm does a bit of the tensor or metric change, ever.

    `unknown` where it does not change in the reference either: then nothing was to be seen.

    Raises:
        MissingRecord: if either never recorded it.
    """
    t.require(arm, reference)
    metric = f"{name}.digest" if t.has(reference, f"{name}.digest") else name
    if len(set(t.series(reference, metric).values())) == 1:
        return unknown(f"{name} of {reference} never change either: this run shows nothing")
    for rank in t.ranks(arm):
        series = t.series(arm, metric, rank=rank)
        moved = [step for step, value in series.items() if value != next(iter(series.values()))]
        if moved:
            return refuted(
                f"{name} of rank {rank} of {arm} change, first at step {moved[0]}",
                evidence={"first_step": moved[0], "rank": rank},
            )
    return holds(
        f"{name} of {arm} are the same to the last bit at all {len(series)} steps, on every rank",
        evidence={"steps": len(series)},
    )


def repeats_records(t: Tables, arm: str, other: str, name: str) -> Finding:
    """Decide: every rank of the arm recorded, step by step, exactly what rank 0 of `other` did.

    `name` is that of a digest or snapshot (then bits are compared) or of a logged metric.

    Raises:
        MissingRecord: if either lacks a step that the other has.
    """
    t.require(arm, other)
    metric = f"{name}.digest" if t.has(other, f"{name}.digest") else name
    base = t.series(other, metric)
    for rank in t.ranks(arm):
        mine = t.series(arm, metric, rank=rank)
        if mine.keys() != base.keys():
            raise MissingRecord(
                f"arm {arm}: rank {rank} recorded {name} at other steps than {other}"
            )
        parted = [step for step, value in base.items() if mine[step] != value]
        if parted:
            return refuted(
                f"{name} of rank {rank} of {arm} are not those of {other} from step {parted[0]} on",
                evidence={"first_step": parted[0], "steps_apart": len(parted)},
            )
    return holds(
        f"{name} of {arm} are those of {other} exactly, on every rank, at all {len(base)} steps",
        evidence={"steps": len(base)},
    )


def same_by_rank(t: Tables, arm: str, other: str, metric: str, *, step: int = 0) -> Finding:
    """Decide: at one step each rank of the arm logged exactly what that rank of `other` did.

    Raises:
        MissingRecord: if a rank of either did not log it.
    """
    t.require(arm, other)
    found = {r: t.value(arm, metric, step=step, rank=r) for r in t.ranks(arm)}
    due = {r: t.value(other, metric, step=step, rank=r) for r in t.ranks(other)}
    apart = [rank for rank in found if rank not in due or found[rank] != due[rank]]
    if apart:
        one, wanted = found[apart[0]], due.get(apart[0])
        reason = (
            f"{metric} of {arm} at step {step} is {one} on rank {apart[0]}, of {other} {wanted}"
        )
        return refuted(reason, evidence={"apart": len(apart)})
    return holds(f"{metric} of {arm} at step {step} is that of {other} exactly, on every rank")


def counts(t: Tables, arm: str, metric: str, expected: int, unit: str) -> Finding:
    """Decide: every rank of the arm recorded this number, at every step that it recorded.

    Raises:
        MissingRecord: if a rank never recorded the metric.
    """
    t.require(arm)
    found = {rank: t.series(arm, metric, rank=rank) for rank in t.ranks(arm)}
    odd = [
        (step, rank, value)
        for rank, series in found.items()
        for step, value in series.items()
        if value != expected
    ]
    evidence: dict[str, Scalar] = {"expected": expected, "compared": sum(map(len, found.values()))}
    if odd:
        step, rank, value = min(odd)
        evidence["got"] = value
        return refuted(
            f"{arm}: {value} {unit} on rank {rank} at step {step}, not {expected}",
            effect=float(value),
            unit=unit,
            evidence=evidence,
        )
    return holds(
        f"{arm}: {expected} {unit} on every rank",
        effect=float(expected),
        unit=unit,
        evidence=evidence,
    )


def mean_is(values: Sequence[float], expected: float, what: str) -> Finding:
    """Decide: the mean of independent values is the expected one, against their standard error."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return unknown(f"{what}: {len(values)} values, or one not finite, have no standard error")
    mean = math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    error = math.sqrt(spread / len(values))
    away = abs(mean - expected)
    found = {"effect": away, "floor": error, "unit": f"distance of the mean {what}"}
    evidence: dict[str, Scalar] = {"mean": mean, "standard_error": error, "n": len(values)}
    reason = f"{what}: {mean:.4g} ± {error:.2g} (n={len(values)}), against {expected:.4g}"
    if away <= SAME_SE * error:
        return holds(reason, **found, evidence=evidence)
    if away >= OTHER_SE * error:
        return refuted(reason, **found, evidence=evidence)
    return unknown(reason + TOO_NEAR, **found, evidence=evidence)


def mean_exceeds(values: Sequence[float], bound: float, what: str) -> Finding:
    """Decide: the mean of independent values is above a bound; one that equals it is not."""
    finding = mean_is(values, bound, what)
    mean = finding.evidence.get("mean")
    if isinstance(mean, float) and mean < bound:
        reason = finding.reason.removesuffix(TOO_NEAR)
        return dataclasses.replace(finding, outcome=Outcome.REFUTED, reason=reason)
    return negated(finding)


def negated(finding: Finding) -> Finding:
    """Return the finding about the opposite statement; what is unknown stays so."""
    flipped = {Outcome.HOLDS: Outcome.REFUTED, Outcome.REFUTED: Outcome.HOLDS}
    return dataclasses.replace(finding, outcome=flipped.get(finding.outcome, Outcome.UNKNOWN))


def all_of(*findings: Finding) -> Finding:
    """Decide that all statements hold: one refuted refutes, one unknown leaves it open.

    Numbers are those of the finding that decides; where all hold, of the first that has any.
    """
    for outcome in (Outcome.REFUTED, Outcome.UNKNOWN):
        for finding in findings:
            if finding.outcome is outcome:
                return finding
    measured = next((f for f in findings if f.effect is not None), findings[0])
    evidence = {key: value for f in reversed(findings) for key, value in f.evidence.items()}
    reason = "; ".join(finding.reason for finding in findings)
    return dataclasses.replace(measured, reason=reason, evidence=evidence)


def says(**words: tuple[str, str]) -> Callable[[Mapping[str, Finding]], str]:
    """Return a headline: for each claim by name what to say if it holds, and if it is refuted."""

    def headline(findings: Mapping[str, Finding]) -> str:
        said = []
        for claim, (true, false) in words.items():
            outcome = findings[claim].outcome
            undecided = f"undecided: {claim.replace('_', ' ')}"
            said.append({Outcome.HOLDS: true, Outcome.REFUTED: false}.get(outcome, undecided))
        return "; ".join(said)

    return headline
