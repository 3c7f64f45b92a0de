"""The synchronised gradient beside the replayed one, tensor by tensor, in multiples of a floor."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.floor import CLEAN, FAULT
from harness.watch.audit.replay import Name

_LEAST = 1.0
"""Epsilons that a floor has at least: the gradient itself is rounded."""
_NOISE = 1e-2
"""A tensor whose floor is larger has no factor: it is zero but for rounding."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A gradient as a multiple of what it is due to be, and what that leaves over."""

    name: Name
    factor: float
    residual: float
    """Norm of what is left over the norm of the multiple; relative, like the floor."""
    floor: float
    size: float
    """Norm of the replayed gradient."""

    @property
    def is_noise(self) -> bool:
        """True where the gradient is zero but for rounding, as before a batch norm."""
        return self.floor > _NOISE or self.size == 0.0

    @property
    def floors(self) -> float:
        """What is left over, in multiples of the floor."""
        return self.residual / self.floor


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All tensors of an optimizer."""

    tensors: tuple[Compared, ...]
    factor: float
    """The one of most tensors."""

    @property
    def floor(self) -> float:
        """The largest floor of a tensor that is not noise itself."""
        return max((t.floor for t in self.tensors if not t.is_noise), default=math.nan)

    @property
    def spread(self) -> float:
        """How far the factors of the tensors are from the common one, at most, in floors."""
        return max((self.distance(t) for t in self.tensors if not t.is_noise), default=0.0)

    @property
    def residual(self) -> float:
        """What is left of the tensor that fits worst, in floors."""
        return max((t.floors for t in self.tensors if not t.is_noise), default=0.0)

    @property
    def clean(self) -> bool:
        """One factor fits all tensors, up to rounding."""
        return max(self.spread, self.residual) <= CLEAN

    @property
    def fault(self) -> bool:
        """There is a tensor which no rounding explains."""
        return not max(self.spread, self.residual) < FAULT

    def distance(self, tensor: Compared) -> float:
        """Return how far the factor of a tensor is from the common one, in floors."""
        return abs(tensor.factor / self.factor - 1) / tensor.floor if self.factor else math.inf

    def worst(self, most: int) -> list[Compared]:
        """Return the tensors that fit worst, the worst first."""
        real = [tensor for tensor in self.tensors if not tensor.is_noise]
        return sorted(real, key=lambda t: -max(t.floors, self.distance(t)))[:most]


def floors(
    replayed: Mapping[Name, torch.Tensor], varied: Sequence[Mapping[Name, torch.Tensor]]
) -> dict[Name, float]:
    """Return how far each gradient moves when nothing but the rounding changes: the largest move.

    Relative to its norm.
    """
    found = {}
    for name, gradient in replayed.items():
        size = float(gradient.double().norm())
        moves = [
            float((other[name].double() - gradient.double()).norm()) if name in other else size
            for other in varied
        ]
        least = _LEAST * torch.finfo(gradient.dtype).eps
        found[name] = max([least, *(move / size for move in moves)]) if size else math.inf
    return found


def compare(
    synchronised: Mapping[Name, torch.Tensor | None],
    due: Mapping[Name, torch.Tensor],
    floor: Mapping[Name, float],
    coarsest: float,
) -> Comparison:
    """Compare every gradient with what it is due to be.

    Args:
        synchronised: what the optimizer is given; None for a tensor without a gradient.
        due: what was replayed.
        floor: relative floor of each tensor.
        coarsest: epsilon of the dtype in which gradients were sent, at least that of the gradient.
    """
    compared = []
    for name, gradient in synchronised.items():
        expected = due.get(name)
        if expected is None and (gradient is None or not bool(gradient.any())):
            continue
        least = _LEAST * coarsest
        if expected is None or gradient is None:
            there = expected if expected is not None else gradient
            assert there is not None
            size = float(there.double().norm())
            alone = 0.0 if gradient is None else math.inf
            one = Compared(
                name=name,
                factor=alone,
                residual=1.0,
                floor=max(least, floor.get(name, 0.0)),
                size=size,
            )
            if size:
                compared.append(one)
            continue
        given, wanted = gradient.double(), expected.double().to(gradient.device)
        squared = float((wanted * wanted).sum())
        factor = float((given * wanted).sum()) / squared if squared else math.inf
        fitted = factor * wanted
        size = float(fitted.norm()) or float(given.norm())
        compared.append(
            Compared(
                name=name,
                factor=factor,
                residual=float((given - fitted).norm()) / size if size else 0.0,
                floor=max(least, floor[name]),
                size=math.sqrt(squared),
            )
        )
    real = [one.factor for one in compared if not one.is_noise and math.isfinite(one.factor)]
    common = statistics.median_low(real) if real else math.nan
    return Comparison(tensors=tuple(compared), factor=common)
