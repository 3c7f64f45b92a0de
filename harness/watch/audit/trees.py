"""Arguments and results of a forward pass: nested containers with tensors in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


class CannotModel(Exception):
    """What a replay would need and cannot have; says why."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a result, always in the same order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same nesting of plain containers with each tensor replaced.

    Raises:
        CannotModel: something in it is neither a tensor nor a plain value.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, _PLAIN) and type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return type(value)(changed(part, change) for part in value)
    if type(value) is dict:
        return {key: changed(part, change) for key, part in value.items()}
    raise CannotModel(f"the model is called with a {type(value).__name__}")


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that the program cannot change any more.

    Raises:
        CannotModel: it is of a class of its own, such as a DTensor.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise CannotModel(f"the model is called with a {type(tensor).__name__}")
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad else copy
