"""What is read of a large tensor at one update: a sample of its gradient, a part of its values.

Memory gives a processor some 10 GB/s, so that to read 25 million parameters after every update
takes 4 % of a step of a perceptron of that size, whatever is computed from them.

A sample is 64 lines of 256 bytes from all over the tensor, the same ones at every update.
Gradients are read this way. A gradient that differs leaves parameters that differ after the same
update: nothing is missed. What the sample decides is where a divergence began, in the gradient or
in the update. It sees any difference that is spread over the tensor, as those of missing
synchronisation are, and one in 32 or fewer of the differences that a single element makes.

Parameters are read a quarter at an update, very large ones a sixteenth, another part each time, and
in full at the first updates and at those whose number is a power of two. A difference that is
spread over the tensor is seen at once; one in a few elements some updates late, since what one
update has made unequal the next ones leave unequal.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import torch

from harness.watch.digests.drawn import random_bytes

FROM = 1 << 19
"""Bytes from which a gradient is sampled, and a parameter read in parts."""
LARGE = 1 << 23
"""Bytes from which there are MANY parts instead of FEW."""
FEW, MANY = 4, 16
LINES = 64
"""Lines in a sample, one from each of as many equal parts of the tensor."""
_LINE = 256
"""Bytes in a line: as many again of 64 bytes take five times as long to fetch."""


def is_sampled(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is large enough; the same on every rank that has a replica of it."""
    return tensor.nbytes >= FROM


def parts_of(tensor: torch.Tensor) -> int:
    """Return in how many parts a tensor is read, 0 for whole; the same for all replicas of it."""
    if tensor.nbytes < FROM or tensor.layout != torch.strided:
        return 0
    parts = FEW if tensor.nbytes < LARGE else MANY
    return parts if len(tensor) >= parts else 0


def part_of(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Return the part whose turn it is, a view; all have the same size, and the last may overlap.

    Returns the tensor itself if it is read whole.
    """
    parts = parts_of(tensor)
    if not parts:
        return tensor
    length = -(-len(tensor) // parts)
    part = turn % parts
    return tensor.narrow(0, min(part * length, len(tensor) - length), length)


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the sample, (LINES, 256) of int8; the tensor may have any strides."""
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
