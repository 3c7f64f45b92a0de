"""A sample of a large tensor: lines of 64 bytes from all over it, the same ones at every update.

Gradients are read this way where they are large. A gradient that differs leaves parameters that
differ after the same update, and those are read in full: nothing is missed. What the sample
decides is where a divergence began, in the gradient or in the update. It sees any difference that
is spread over the tensor, as those of missing synchronisation are, and one in 16 or fewer of the
differences that a single element makes.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import torch

from harness.watch.product import random_bytes

FROM = 1 << 20
"""Bytes from which a tensor is sampled."""
LINES = 1024
"""Lines in a sample, one from each of as many equal parts of the tensor."""
_LINE = 64
"""Bytes in a line: what the processor fetches from memory at a time."""


def is_sampled(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is large enough; the same on every rank that has a replica of it."""
    return tensor.nbytes >= FROM


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the sample, (LINES, 64) of int8; the tensor may have any strides."""
    per_line = _LINE // tensor.element_size()
    lines = _lines(tensor.numel() // per_line, tensor.device)
    if tensor.is_contiguous():
        rows = tensor.view(-1)[: tensor.numel() // per_line * per_line].view(-1, per_line)
        return rows.view(torch.int8).index_select(0, lines)
    shape, strides = tuple(tensor.shape), tensor.stride()
    places = _places(shape, strides, per_line, tensor.device)
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = tensor.as_strided((span,), (1,), tensor.storage_offset())
    return memory.index_select(0, places).view(torch.int8).view(LINES, _LINE)


@lru_cache(maxsize=1024)
def _places(
    shape: tuple[int, ...], strides: tuple[int, ...], per_line: int, device: torch.device
) -> torch.Tensor:
    """Return where in memory the elements of the sample are."""
    lines = _lines(math.prod(shape) // per_line, torch.device("cpu"))
    offsets = torch.arange(per_line, device="cpu")
    places = torch.zeros(LINES * per_line, dtype=torch.int64, device="cpu")
    rest = (lines[:, None] * per_line + offsets).view(-1)
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        places += rest % size * stride
        rest //= size
    return places.to(device)


@lru_cache(maxsize=4096)
def _lines(count: int, device: torch.device) -> torch.Tensor:
    """Return which of so many lines are in the sample."""
    drawn = struct.unpack(f"<{LINES}Q", random_bytes(f"sample of {count}", 8 * LINES))
    edges = [count * part // LINES for part in range(LINES + 1)]
    lines = [a + one % (b - a) for one, a, b in zip(drawn, edges, edges[1:], strict=False)]
    return torch.tensor(lines, dtype=torch.int64, device=device)
