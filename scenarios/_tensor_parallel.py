"""What tensor parallelism does at the seams of a split layer, as autograd sees it.

Every rank of the group computes the same loss, so backward needs no sum where forward had one, and
the other way round. `torch.distributed.nn.functional` counts the losses of all ranks instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from scenarios._models import FEATURES, mlp, rows

if TYPE_CHECKING:
    from harness.rank import Rank


def words(
    rank: Rank, tokens: int, vocabulary: int
) -> tuple[torch.nn.Module, torch.nn.Parameter, torch.Tensor, torch.Tensor]:
    """Return a body of width 8, this rank's rows of a table, and inputs and targets of all ranks.

    The ranks' rows, put together in their order, are one table in every world size.
    """
    body = mlp((FEATURES, 8), generator=rank.generator("net")).to(rank.device)
    table = torch.randn(vocabulary, 8, generator=rank.generator("table"), dtype=torch.float64)
    mine = table.chunk(rank.world_size)[rank.rank].to(rank.device, copy=True)
    x, y = rows(rank, tokens, whole=True)
    return body, torch.nn.Parameter(mine), x, (y[:, 0] * 1000).long() % vocabulary


def layers(rank: Rank, hidden: int) -> tuple[torch.nn.LayerNorm, torch.Tensor, torch.Tensor]:
    """Return a norm that all ranks hold, and this rank's rows of two layers, (hidden, FEATURES)."""
    wide = (2, hidden, FEATURES)
    drawn = torch.randn(wide, generator=rank.generator("split"), dtype=torch.float64)
    parts = drawn[:, rank.rank :: rank.world_size].to(rank.device, copy=True)
    norm = torch.nn.LayerNorm(FEATURES, dtype=torch.float64, device=rank.device)
    return norm, *(part.clone().requires_grad_() for part in parts)


def copied(x: torch.Tensor) -> torch.Tensor:
    """Hand a tensor to the parts of a split layer: each adds to its gradient."""
    return _Copied.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def summed(x: torch.Tensor) -> torch.Tensor:
    """Add up what the parts of a split layer give: each gets the whole gradient."""
    return _Summed.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def gathered(x: torch.Tensor) -> torch.Tensor:
    """Put the ranks' last dimensions side by side: each gets its own part of the gradient."""
    return _Gathered.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the logarithm of the sum of exponentials over all ranks' columns."""
    most = logits.detach().amax(dim=1)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return summed((logits - most[:, None]).exp().sum(dim=1)).log() + most


def at_targets(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each row's logit of its target, from the rank in whose columns that is."""
    local = targets - dist.get_rank() * logits.shape[1]
    here = (local >= 0) & (local < logits.shape[1])
    own = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return summed(own.where(here, 0.0))


def square(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of all squares."""
    return torch.stack([(tensor * tensor).sum() for tensor in tensors]).sum()


def exchanged(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Send the k-th of these rows to rank k, and return what the ranks have sent here."""
    counts = torch.tensor([len(part) for part in parts], device=parts[0].device)
    due = torch.empty_like(counts)
    dist.all_to_all_single(due, counts)
    received = parts[0].new_empty(int(due.sum()), *parts[0].shape[1:])
    dist.all_to_all_single(received, torch.cat(list(parts)), due.tolist(), counts.tolist())
    return received


def everywhere(x: torch.Tensor) -> torch.Tensor:
    """Return what all ranks hold, along the first dimension, for the record."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.detach().contiguous())
    return torch.cat(found)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(found, x.contiguous())
        return torch.cat(found, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        parts = gradients[0].chunk(dist.get_world_size(), dim=-1)
        return parts[dist.get_rank()].contiguous()
