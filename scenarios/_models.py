"""Tiny models that scenarios share: a few hundred parameters, the same start in every dtype."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def mlp(widths: Sequence[int], *, generator: torch.Generator) -> torch.nn.Sequential:
    """Return Linear layers of these widths with tanh between them, in float64.

    Smooth, because a ReLU that changes sides turns rounding of 1e-7 into a gap of 1e-4. Drawn in
    float64 from the generator, so that a copy in another dtype starts from the same weights.
    """
    import torch

    layers: list[torch.nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        linear = torch.nn.Linear(fan_in, fan_out, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.normal_(0.0, fan_in**-0.5, generator=generator)
            linear.bias.zero_()
        layers += [linear, torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1])
