"""All forward passes of all ranks put together into one, as a single process would make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from harness.watch.audit.forward_pass import ForwardPass
from harness.watch.audit.trees import CannotModel

Weighted = tuple[ForwardPass, int, float]
"""A forward pass, the number of its backward pass, and the factor of that."""


def one_batch(passes: Sequence[Weighted]) -> Weighted:
    """Return one pass over the rows of all passes.

    Raises:
        CannotModel: they cannot be put together.
    """
    first = passes[0][0]
    for one, _, _ in passes:
        if (one.holder, one.path) != (first.holder, first.path):
            raise CannotModel("different modules are called")
        if one.evaluating != first.evaluating or one.autocast != first.autocast:
            raise CannotModel("modules are called in different modes")
    gradients: list[Any] = []
    for place in range(len(first.nodes)):
        gradients.append(_joined([_scaled(one, n, f)[place] for one, n, f in passes]))
    whole = replace(
        first,
        args=_joined([one.args for one, _, _ in passes]),
        kwargs=_joined([one.kwargs for one, _, _ in passes]),
        outputs=_joined([one.outputs for one, _, _ in passes]),
        gradients={0: gradients},
    )
    return whole, 0, 1.0


def _scaled(one: ForwardPass, number: int, factor: float) -> list[Any]:
    return [
        None if node is None else [None if g is None else g * factor for g in node]
        for node in one.gradients[number]
    ]


def _joined(parts: Sequence[Any]) -> Any:
    """Return nested containers whose tensors are those of all parts, one after the other."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise CannotModel("the model is called in different ways")
    if isinstance(first, torch.Tensor):
        if any(p.dim() == 0 or p.shape[1:] != first.shape[1:] for p in parts):
            raise CannotModel("tensors are of different shapes, or have no rows")
        return torch.cat([p.detach() for p in parts]).requires_grad_(first.requires_grad)
    if isinstance(first, list | tuple):
        if any(len(part) != len(first) for part in parts):
            raise CannotModel("the model is called in different ways")
        return type(first)(_joined(among) for among in zip(*parts, strict=True))
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise CannotModel("the model is called in different ways")
        return {key: _joined([part[key] for part in parts]) for key in first}
    if any(part != first for part in parts):
        raise CannotModel("the model is called in different ways")
    return first
