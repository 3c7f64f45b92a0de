"""Handwritten digits that scikit-learn ships: real data for claims about accuracy, no download.

1,797 pictures of 8 x 8 grey values, ten classes (UCI, "Optical Recognition of Handwritten Digits").
A scenario with `scale: real` calls `prerequisite` in its `check` and `digits` in its `run`.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.errors import PrerequisiteError

if TYPE_CHECKING:
    import torch

PIXELS = 64
"""Columns of a picture, rows of the 8 x 8 grid one after another."""
CLASSES = 10
TRAIN = 1200
"""Pictures to train on; the other 597 are for the test."""


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Pictures (n, PIXELS) in float64 and their classes (n,) in int64, in two parts."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


def prerequisite(scale: str) -> list[str]:
    """Return no objection to `scale`; say so at once where "real" needs what is not installed.

    Raises:
        PrerequisiteError: if scikit-learn is missing; says what to type.
    """
    if scale == "real" and importlib.util.find_spec("sklearn") is None:
        raise PrerequisiteError(
            "scenario.scale=real needs the digits of scikit-learn, which is not installed\n"
            "type: python -m pip install scikit-learn, or scenario.scale=toy"
        )
    return []


def digits(device: str = "cpu") -> Digits:
    """Return the same two parts on every rank, for every seed.

    One order, drawn once and for all, mixes the writers: scikit-learn has them one after another.
    Grey values are standardised by the mean and deviation of the training part as a whole, because
    some pixels of the rim are always zero and have no deviation of their own.

    Raises:
        PrerequisiteError: if scikit-learn is missing.
    """
    import torch

    prerequisite("real")
    loaded: Any = importlib.import_module("sklearn.datasets").load_digits()
    order = torch.randperm(len(loaded.target), generator=torch.Generator().manual_seed(0))
    x = torch.as_tensor(loaded.data, dtype=torch.float64)[order]
    y = torch.as_tensor(loaded.target, dtype=torch.int64)[order]
    x = (x - x[:TRAIN].mean()) / x[:TRAIN].std()
    x, y = x.to(device), y.to(device)
    return Digits(train_x=x[:TRAIN], train_y=y[:TRAIN], test_x=x[TRAIN:], test_y=y[TRAIN:])
