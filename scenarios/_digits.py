"""Handwritten digits that scikit-learn ships: real data for claims about accuracy, no download.

1,797 pictures of 8 x 8 grey values, ten classes (UCI, "Optical Recognition of Handwritten Digits").
A scenario with `scale: real` calls `prerequisite` in its `check` and `digits` in its `run`, or
`rows`, `held_out` and `net` in place of what `_models` has.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.errors import PrerequisiteError

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank

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


def rows(
    rank: Rank, count: int, scale: str, *, name: str = "rows"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of what `_models.rows` deals out, or at "real" of as many digits.

    Those are x (n, PIXELS) and y (n, CLASSES), 1 for the class and 0 for the others: a squared
    error fits them as it does the drawn rows.

    Raises:
        PrerequisiteError: if they are to be real and scikit-learn is missing.
    """
    from scenarios import _models

    if scale != "real":
        return _models.rows(rank, count, name=name)
    found = digits()
    picked = _picked(rank, len(found.train_y), count, name)
    return _one_hot(rank, found.train_x, found.train_y, rank.shard(picked))


def held_out(rank: Rank, count: int, scale: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return as many rows that nobody trains on, the same on all ranks; see `rows`."""
    from scenarios import _models

    name = "held out"
    if scale != "real":
        return _models.rows(rank, count, name=name, whole=True)
    found = digits()
    picked = _picked(rank, len(found.test_y), count, name)
    return _one_hot(rank, found.test_x, found.test_y, picked)


def _picked(rank: Rank, there: int, count: int, name: str) -> torch.Tensor:
    import torch

    drawn = torch.randperm(there, generator=rank.generator(name))
    return drawn[rank.permutation(count, name=name) % there]


def _one_hot(
    rank: Rank, x: torch.Tensor, y: torch.Tensor, picked: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    classes = torch.nn.functional.one_hot(y[picked], CLASSES).double()
    return x[picked].to(rank.device), classes.to(rank.device)


def net(rank: Rank, scale: str) -> torch.nn.Sequential:
    """Return `_models.net`, or at scale "real" one that takes digits and gives a number a class."""
    from scenarios import _models

    if scale != "real":
        return _models.net(rank)
    widths = (PIXELS, 12, CLASSES)
    return _models.mlp(widths, generator=rank.generator("net")).to(rank.device)


def right(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Say for each row whether the output is right: of its class, or on its side of zero."""
    if y.shape[1] == 1:
        return ((output > 0) == (y > 0)).flatten()
    return output.argmax(dim=1) == y.argmax(dim=1)
