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
        size = _norm(gradient)
        moves = [_norm(other[name] - gradient) if name in other else size for other in varied]
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
        least = max(_LEAST * coarsest, floor.get(name, 0.0))
        one = _one(name, gradient, due.get(name), least)
        if one is not None:
            compared.append(one)
    real = [one.factor for one in compared if not one.is_noise and math.isfinite(one.factor)]
    common = statistics.median_low(real) if real else math.nan
    return Comparison(tensors=tuple(compared), factor=common)


def _one(
    name: Name, gradient: torch.Tensor | None, due: torch.Tensor | None, floor: float
) -> Compared | None:
    """Compare a gradient; None where there is none, and none is due."""
    if gradient is None or due is None:
        there = due if gradient is None else gradient
        size = 0.0 if there is None else _norm(there)
        if not size:
            return None
        factor = 0.0 if gradient is None else math.inf
        return Compared(name=name, factor=factor, residual=1.0, floor=floor, size=size)
    if gradient.dtype == due.dtype and gradient.device == due.device and torch.equal(gradient, due):
        return Compared(name=name, factor=1.0, residual=0.0, floor=floor, size=_norm(due))
    given, wanted = gradient.double(), due.double().to(gradient.device)
    squared = float((wanted * wanted).sum())
    factor = float((given * wanted).sum()) / squared if squared else math.inf
    fitted = factor * wanted if squared else wanted
    size = _norm(fitted) or _norm(given)
    residual = _norm(given - fitted) / size if size else 0.0
    return Compared(
        name=name, factor=factor, residual=residual, floor=floor, size=math.sqrt(squared)
    )


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
