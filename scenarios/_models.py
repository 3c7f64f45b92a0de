"""Tiny models and data that scenarios share: a few hundred parameters, the same in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank

FEATURES = 6
"""Columns of the rows that `rows` deals out."""


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


def net(rank: Rank) -> torch.nn.Sequential:
    """Return the same small net on every rank, on its device: `FEATURES` in, one number out."""
    return mlp((FEATURES, 12, 1), generator=rank.generator("net")).to(rank.device)


def rows(
    rank: Rank, count: int, *, name: str = "rows", whole: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of `count` rows to fit: x (n, FEATURES) and y (n, 1), float64.

    The same name gives the same rows in every arm and world size; a repeat permutes them first.
    With `whole` every rank gets all of them.
    """
    import torch

    draw = rank.generator(name)
    x = torch.randn(count, FEATURES, generator=draw, dtype=torch.float64)
    y = x[:, :1] + x[:, 1:2].sin() + 0.1 * torch.randn(count, 1, generator=draw).double()
    order = rank.permutation(count, name=name)
    mine = order if whole else rank.shard(order)
    return x[mine].to(rank.device), y[mine].to(rank.device)


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all parameters of a model as one flat copy; of sharded ones the whole, gathered."""
    return _flat(parameter.detach() for parameter in model.parameters())


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """Return all gradients of a model as one flat copy; of sharded ones the whole, gathered."""
    found = (parameter.grad for parameter in model.parameters())
    return _flat(gradient for gradient in found if gradient is not None)


def _flat(held: Iterable[torch.Tensor]) -> torch.Tensor:
    import torch
    from torch.distributed.tensor import DTensor

    whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in held]
    return torch.cat([value.flatten() for value in whole])


def equal_shares(p: Any, ranks: int) -> list[str]:
    """Refuse a batch of unequal shares: the mean of their means is another mean."""
    if p.batch % ranks == 0:
        return []
    enough = ranks * max(1, round(p.batch / ranks))
    return [
        f"scenario.batch={p.batch} rows cannot be shared equally by {ranks} ranks; "
        f"type scenario.batch={enough}"
    ]


def split_equally(*names: str) -> Callable[[Any, int], list[str]]:
    """Return a check that refuses values of these parameters which ranks cannot split equally."""

    def check(p: Any, ranks: int) -> list[str]:
        given = {name: getattr(p, name) for name in names}
        return [
            f"scenario.{name}={value} cannot be split equally over {ranks} ranks; "
            f"type scenario.{name}={ranks * max(1, round(value / ranks))}"
            for name, value in given.items()
            if value % ranks
        ]

    return check
