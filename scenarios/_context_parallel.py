"""Attention over sequences of which each rank holds a chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scenarios._models import mlp
from scenarios._tensor_parallel import everywhere

WIDTH = 8
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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


class Block(nn.Module):
    """Attention of some kind between the rows that it is given, beside them."""

    def __init__(self, width: int, attend: Attend, *, generator: torch.Generator) -> None:
        """Draw the weights of queries, keys and values."""
        super().__init__()
        self.qkv = mlp((width, 3 * width), generator=generator)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return as many rows as there are in x."""
        return x + self.attend(*self.qkv(x).chunk(3, dim=1))


def ring_attention(probability: Callable[..., torch.Tensor]) -> Attend:
    """Return attention of this rank's queries to the keys of all ranks, chunk by chunk.

    Args:
        probability: of backward, from the scores of a chunk, their log-sum-exp over that chunk, and
            the one over all chunks.
    """
    world = dist.get_world_size()

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
            ctx.query = query
            ctx.keys, ctx.values = (everywhere(x).chunk(world) for x in (key, value))
            ctx.scores = [query @ keys.T for keys in ctx.keys]
            ctx.of_chunk = [scores.logsumexp(dim=1, keepdim=True) for scores in ctx.scores]
            ctx.of_all = torch.stack(ctx.of_chunk).logsumexp(dim=0)
            chunks = zip(ctx.scores, ctx.values, strict=True)
            ctx.output = sum((scores - ctx.of_all).exp() @ values for scores, values in chunks)
            return ctx.output

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            (of_output,) = gradients
            common = (of_output * ctx.output).sum(dim=1, keepdim=True)
            of_query, of_chunks = torch.zeros_like(ctx.query), []
            for place in range(world):
                attended = probability(ctx.scores[place], ctx.of_chunk[place], ctx.of_all)
                of_scores = attended * (of_output @ ctx.values[place].T - common)
                of_query += of_scores @ ctx.keys[place]
                of_chunks.append(torch.stack([of_scores.T @ ctx.query, attended.T @ of_output]))
            of_all = torch.stack(of_chunks)
            dist.all_reduce(of_all)
            return of_query, *of_all[dist.get_rank()]

    return Ring.apply


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
