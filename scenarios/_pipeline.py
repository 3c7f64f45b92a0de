"""Layers in stages, one to a rank: activations go up, gradients come down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from scenarios._models import FEATURES, mlp

if TYPE_CHECKING:
    from harness.rank import Rank

Stage = Callable[[torch.Tensor], torch.Tensor]


class Residual(nn.Module):
    """A layer of which any number fits together: FEATURES in, as many out."""

    def __init__(self, *, generator: torch.Generator) -> None:
        """Draw the weights."""
        super().__init__()
        self.linear = mlp((FEATURES, FEATURES), generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x and a little more."""
        return x + 0.3 * torch.tanh(self.linear(x))


def share(rank: Rank, layers: Sequence[nn.Module]) -> nn.Sequential:
    """Return this stage's layers."""
    count, stages = len(layers), rank.world_size
    first, end = rank.rank * count // stages, (rank.rank + 1) * count // stages
    return nn.Sequential(*layers[first:end]).to(rank.device)


def through_stages(
    stage: Stage, x: torch.Tensor, loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Run forward and backward through the stages of all ranks, and return the loss.

    Args:
        stage: what this rank does; all but the last return what looks like x.
        x: what the first stage is given, (rows, FEATURES).
        loss_of: the loss, from what the last stage returns.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    given = x.detach().clone()
    if rank > 0:
        dist.recv(given, rank - 1)
    output = stage(given.requires_grad_())
    if rank < last:
        dist.send(output.detach(), rank + 1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, rank + 1)
        output.backward(gradient)
        loss = output.new_zeros(())
    else:
        loss = loss_of(output)
        loss.backward()
        loss = loss.detach()
    if rank > 0 and given.grad is not None:
        dist.send(given.grad, rank - 1)
    dist.broadcast(loss, last)
    return loss


def of_ends(tensor: torch.Tensor | None, like: torch.Tensor) -> list[torch.Tensor]:
    """Return what the first and the last stage have of something, on every rank."""
    found = []
    for owner in (0, dist.get_world_size() - 1):
        found.append(torch.zeros_like(like) if tensor is None else tensor.detach().clone())
        dist.broadcast(found[-1], owner)
    return found
