"""What one rank writes for an audited update, and the last one reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.watch.audit.forward_pass import ForwardPass
from harness.watch.audit.loss_graph import Reduction
from harness.watch.audit.recorder import BackwardPass, Recorder
from harness.watch.audit.weighting import Cell


@dataclass(kw_only=True)
class Contribution:
    """The forward and backward passes of a rank since the last update of an optimizer."""

    reasons: list[str]
    """Why there is nothing to replay; empty where there is."""
    passes: list[ForwardPass]
    backwards: dict[int, dict[str, Any]]
    """Number of a backward pass -> rows, value, line, and the losses in it."""
    checksum: float
    """Sum of all parameters: equal on replicas."""

    @property
    def micro_batches(self) -> dict[int, int]:
        """Number of a backward pass -> its place among those of this update."""
        return {number: place for place, number in enumerate(sorted(self.backwards))}

    def cells(self, rank: int) -> dict[Cell, dict[str, Any]]:
        """Return the backward passes by rank and place."""
        return {
            (rank, place): self.backwards[number] for number, place in self.micro_batches.items()
        }

    def write(self, path: Path) -> None:
        """Write it so that a reader sees all of it or nothing.

        Raises:
            OSError: the file cannot be written.
        """
        plain = {
            "reasons": self.reasons,
            "passes": [] if self.reasons else [one.to_plain() for one in self.passes],
            "backwards": self.backwards,
            "checksum": self.checksum,
        }
        draft = path.with_suffix(f".{os.getpid()}.draft")
        torch.save(plain, draft)
        draft.replace(path)

    @classmethod
    def read(cls, path: Path) -> Contribution:
        """Read what `write` wrote.

        Raises:
            OSError: the file cannot be read.
        """
        plain = torch.load(path, map_location="cpu", weights_only=True)
        passes = [ForwardPass.from_plain(one) for one in plain.pop("passes")]
        return cls(passes=passes, **plain)


def contribution(
    recorder: Recorder, holders: set[int], reasons: list[str], checksum: float
) -> Contribution:
    """Return what this rank has to contribute to the audit of an optimizer.

    Args:
        recorder: what was kept since the last update.
        holders: numbers of the modules whose parameters the optimizer holds.
        reasons: why there is nothing to replay, as far as that is known already.
        checksum: sum of all parameters.
    """
    passes = [one for one in recorder.passes if one.holder in holders and one.gradients]
    used = {number for one in passes for number in one.gradients}
    backwards = {n: b for n, b in recorder.backwards.items() if n in used}
    reasons = [*reasons, *recorder.reasons]
    if any(one.graph.past for one in backwards.values()):
        reasons.append(
            "parameters enter the loss past the outputs of the model, as a penalty on them does"
        )
    if not all(one.graph.complete for one in backwards.values()):
        reasons.append("the loss is too far from the outputs of the model")
    if not passes and not reasons:
        reasons.append("no forward pass of the model with a backward pass was seen")
    return Contribution(
        reasons=reasons,
        passes=passes,
        backwards={
            number: _plain(one, max(made.rows for made in passes if number in made.gradients))
            for number, one in backwards.items()
        },
        checksum=checksum,
    )


def _plain(one: BackwardPass, rows: int) -> dict[str, Any]:
    return {
        "rows": rows,
        "value": None if one.value is None else float(one.value),
        "at": one.at,
        "losses": [_weighted(reduction) for reduction in _telling(one.graph.reductions)],
    }


def _telling(reductions: list[Reduction]) -> list[Reduction]:
    """Choose between a loss for each row and the mean above it.

    Rows that a mask leaves out are seen at the former; a weight for each row only at the latter.
    """
    taking_part = [one for one in reductions if one.gradients]
    rows = [one for one in taking_part if one.how == "none"]
    above = [one for one in taking_part if one.above]
    alike = all(one.weight()[2] for one in rows)
    return [one for one in taking_part if one not in (above if alike or not above else rows)]


def _weighted(reduction: Reduction) -> dict[str, Any]:
    weight, count, alike = reduction.weight()
    coarse = max((torch.finfo(g.dtype).eps for g in reduction.gradients), default=0.0)
    return {
        "kind": reduction.kind,
        "how": reduction.how,
        "weight": weight,
        "count": count,
        "alike": alike,
        "tolerance": max(1e-5, 8 * coarse),
    }
