"""One layer of causal attention over sequences of which each rank holds a chunk."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 8


class Attention(nn.Module):
    """Embed, attend to all earlier tokens of all ranks, and name the next one."""

    def __init__(self, vocabulary: int, *, generator: torch.Generator) -> None:
        """Draw the weights, in float64."""
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH, dtype=torch.float64)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, vocabulary, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.5, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (documents, chunk, vocabulary) of this rank's tokens (documents, chunk)."""
        query, key, value = self.qkv(self.embed(tokens)).chunk(3, dim=-1)
        keys, values = (whole(x.contiguous()) for x in (key, value))
        scores = query @ keys.transpose(1, 2) / WIDTH**0.5
        places = torch.arange(keys.shape[1], device=tokens.device)
        mine = places.chunk(dist.get_world_size())[dist.get_rank()]
        scores = scores.masked_fill(places > mine[:, None], -torch.inf)
        return self.out(scores.softmax(dim=-1) @ values)  # type: ignore[no-any-return]


def whole(chunk: torch.Tensor) -> torch.Tensor:
    """Put the ranks' chunks (documents, chunk, ...) together; a chunk gets all ranks' gradients."""
    return _Whole.apply(chunk)  # type: ignore[no-any-return, no-untyped-call]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunk: torch.Tensor) -> torch.Tensor:
        found = [torch.empty_like(chunk) for _ in range(dist.get_world_size())]
        dist.all_gather(found, chunk)
        return torch.cat(found, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        # Gloo takes a strided view's memory for a dense tensor's.
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
