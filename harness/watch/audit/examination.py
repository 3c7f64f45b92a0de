"""The last rank's part of an audit: replay what all ranks contributed, and compare."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from harness.watch.audit.comparison import Comparison, compare, floors
from harness.watch.audit.contribution import Contribution
from harness.watch.audit.one_batch import Weighted
from harness.watch.audit.replay import Name, Replay
from harness.watch.audit.trees import CannotModel
from harness.watch.audit.variation import Variation
from harness.watch.audit.weighting import UNKNOWN, Cell, Loss, corrections, losses

SECONDS = 2.0
"""What the replays for the floor may take."""
MOST, FEWEST = 20, 2
"""Replays for the floor: fewer than 20 miss its tail, which the answer then says."""
_SHOWN = 24


def examine(
    everyone: Mapping[int, Contribution],
    roots: Mapping[int, nn.Module],
    after_backward: Mapping[Name, torch.Tensor | None],
    given: Mapping[Name, torch.Tensor | None],
    *,
    coarsest: float,
    world_size: int,
) -> dict[str, Any]:
    """Return what the audit has found, as JSON.

    Args:
        everyone: what each rank contributed.
        roots: the modules whose parameters the optimizer holds, as they are now.
        after_backward: the gradients after the last backward pass.
        given: the gradients that the optimizer is given, before they are clipped.
        coarsest: epsilon of the coarsest dtype that the gradients went through.
        world_size: number of ranks.
    """
    backwards: dict[Cell, dict[str, Any]] = {}
    for rank, one in everyone.items():
        backwards |= one.cells(rank)
    lined_up, unknown = losses(backwards)
    found = _described(everyone) | {
        "weighting": UNKNOWN if unknown else [loss.weighting for loss in lined_up],
        "weighting_unknown": unknown,
        "losses": [loss.to_json() for loss in lined_up],
    }
    reasons = _reasons(everyone)
    if reasons:
        return found | {"could_not": "; ".join(reasons)}
    factors = corrections(lined_up) if lined_up else None
    passes = _passes(everyone, factors or {})
    try:
        replay = Replay(roots)
        began = time.perf_counter()
        own, due = replay.gradients(passes)
        took = time.perf_counter() - began
        count = max(FEWEST, min(MOST, int(SECONDS / max(took, 1e-9))))
        varied = [replay.gradients(passes, Variation(seed=seed))[0] for seed in range(count)]
    except CannotModel as reason:
        return found | {"could_not": str(reason)}
    except Exception as error:
        return found | {"could_not": f"the replay failed: {type(error).__name__}: {error}"}
    floor = floors(own, varied)
    synchronised, by_itself = after_backward, compare(after_backward, own, floor, coarsest)
    if not by_itself.clean:
        # Whoever averages by hand does so after the backward pass.
        by_hand = compare(given, own, floor, coarsest)
        if by_hand.clean:
            synchronised, by_itself = given, by_hand
    if not any(not one.is_noise for one in by_itself.tensors):
        return found | {"could_not": "no gradient is larger than its own rounding"}
    found["at_once"], found["at_once_unknown"] = _at_once(replay, passes, due, floor, len(roots))
    whole = by_itself if due is own else compare(synchronised, due, floor, coarsest)
    before = {name: gradient for name, gradient in synchronised.items() if gradient is not None}
    later = compare(given, before, dict.fromkeys(before, 0.0), coarsest)
    found |= {
        "could_not": None,
        "replays": count,
        "rows_permuted": replay.rows_permute and not replay.random,
        "random": replay.random,
        "batch_norm": replay.batch_norm,
        "floor": by_itself.floor,
        "synchronised": _compared(by_itself, len(roots), by_itself.factor * world_size),
        "one_process": None if factors is None else _compared(whole, len(roots), whole.factor),
        "later": _compared(later, len(roots), later.factor),
    }
    for loss, entry in zip(lined_up, found["losses"], strict=True):
        # What a sum or a mean is taken of may have either sign.
        entry["factor"] = abs(whole.factor * loss.mean_weight) * loss.total * later.factor
    found["factor"] = _factor(lined_up, found["losses"]) if factors is not None else None
    return found


def _at_once(
    replay: Replay,
    passes: list[Weighted],
    due: Mapping[Name, torch.Tensor],
    floor: Mapping[Name, float],
    modules: int,
) -> tuple[dict[str, Any] | None, str | None]:
    """Compare with one forward pass over all rows: do rows have an influence on each other?"""
    try:
        together = replay.at_once(passes)
    except CannotModel as reason:
        return None, str(reason)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    compared = compare(due, together, floor, 0.0)
    return _compared(compared, modules, compared.factor), None


def _described(everyone: Mapping[int, Contribution]) -> dict[str, Any]:
    first = next((b for one in everyone.values() for b in one.backwards.values()), {})
    return {
        "rows": _each(everyone, "rows"),
        "values": _each(everyone, "value"),
        "at": first.get("at"),
    }


def _each(everyone: Mapping[int, Contribution], what: str) -> dict[str, list[Any]]:
    return {
        str(rank): [one.backwards[number][what] for number in one.micro_batches]
        for rank, one in everyone.items()
    }


def _reasons(everyone: Mapping[int, Contribution]) -> list[str]:
    reasons = list(dict.fromkeys(reason for one in everyone.values() for reason in one.reasons))
    if len({one.checksum for one in everyone.values()}) > 1:
        reasons.append("the ranks hold different parameters")
    return reasons


def _passes(everyone: Mapping[int, Contribution], factors: Mapping[Cell, float]) -> list[Weighted]:
    return [
        (made, number, factors.get((rank, one.micro_batches[number]), 1.0))
        for rank, one in sorted(everyone.items())
        for made in one.passes
        for number in sorted(made.gradients)
    ]


def _compared(compared: Comparison, modules: int, factor: float) -> dict[str, Any]:
    def shown(name: Name) -> str:
        return name[1] if modules == 1 else f"{name[0]}.{name[1]}"

    return {
        "factor": factor,
        "spread": compared.spread,
        "residual": compared.residual,
        "clean": compared.clean,
        "fault": compared.fault,
        "compared": sum(not one.is_noise for one in compared.tensors),
        "noise": [shown(one.name) for one in compared.tensors if one.is_noise][:_SHOWN],
        "tensors": [
            [shown(one.name), one.factor, one.residual, one.floor] for one in compared.worst(_SHOWN)
        ],
    }


def _factor(lined_up: list[Loss], entries: list[dict[str, Any]]) -> float | None:
    """Return the factor that all losses have in common, or None where they have none."""
    factors = [entry["factor"] for entry in entries]
    if not factors or max(factors) - min(factors) > 1e-3 * max(map(abs, factors)):
        return None
    return float(factors[0])
