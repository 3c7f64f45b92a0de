"""Fingerprints of samples: rows of a tensor by their content, and an even choice of indices."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

MOST_ROWS = 32
_MOST_BYTES = 1 << 20
"""Of one row; a longer one is known by its beginning and its length."""
_MIX = 0x9E3779B97F4A7C15


def batch_of(values: Any, rows: int | None = None) -> torch.Tensor | None:
    """Return the first tensor that has rows, from nested lists and dicts.

    Args:
        values: the arguments of a forward pass, or what a loader yields.
        rows: how many it has to have, if that is known.
    """
    return next(batches_of(values, rows), None)


def batches_of(values: Any, rows: int | None = None) -> Iterator[torch.Tensor]:
    """Yield all tensors that have rows, from nested lists and dicts."""
    if type(values) is torch.Tensor:
        fits = values.dim() > 0 and values.numel() > 0 and values.layout == torch.strided
        if fits and rows in (None, values.shape[0]):
            yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from batches_of(value, rows)


def sample_digests(values: Any) -> list[int]:
    """Return 48 bits for each sample: the rows of all tensors that have as many as the first.

    Samples may well begin with what they have in common, such as positions or a mask.
    """
    first = batch_of(values)
    if first is None:
        return []
    digests = [row_digests(batch) for batch in batches_of(values, first.shape[0])]
    if len(digests) == 1:
        return digests[0]
    return [_digest(repr(row).encode()) for row in zip(*digests, strict=True)]


def row_digests(batch: torch.Tensor, chosen: Sequence[int] | None = None) -> list[int]:
    """Return 48 bits for each row, or for the chosen ones: equal for equal content.

    On a device this makes the program wait for it.
    """
    rows = batch.detach()
    rows = rows[:MOST_ROWS] if chosen is None else rows[list(chosen)]
    rows = rows.reshape(len(rows), -1).cpu().contiguous()
    size = rows.shape[1] * rows.element_size()
    head = f"{tuple(batch.shape[1:])} {batch.dtype}".encode()
    # numpy need not be installed.
    starts = range(rows.data_ptr(), rows.data_ptr() + size * len(rows), size)
    return [_digest(head + ctypes.string_at(start, min(size, _MOST_BYTES))) for start in starts]


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big")


class Choice:
    """Keeps some of the indices of a stream, the same ones wherever they come by.

    All of them as long as they are few; then every second one by a hash, every fourth, and so on.
    Two ranks that have gone through the same indices have kept the same ones.
    """

    def __init__(self, most: int) -> None:
        """Keep at most so many."""
        self._most = most
        self._mask = 0
        self.kept: dict[int, Any] = {}

    @property
    def every(self) -> int:
        """One index of so many is kept."""
        return self._mask + 1

    def places(self, indices: Sequence[int]) -> Sequence[int]:
        """Return where in a batch the indices are that are to be kept."""
        mask = self._mask
        if not mask:
            return range(len(indices))
        return [n for n, index in enumerate(indices) if not index * _MIX >> 40 & mask]

    def put(self, index: int, value: Any = None) -> None:
        """Keep an index, and perhaps fewer from now on."""
        if index * _MIX >> 40 & self._mask:
            return
        self.kept[index] = value
        while len(self.kept) > self._most:
            self._mask = 2 * self._mask + 1
            self.kept = {i: v for i, v in self.kept.items() if not i * _MIX >> 40 & self._mask}


def attempt(act: Callable[[], Any]) -> Any:
    """Return what `act` returns, or None: what belongs to the user may raise anything."""
    try:
        return act()
    except Exception:
        return None


def whole_numbers(values: Iterable[Any]) -> list[int] | None:
    """Return indices as numbers, or None where they are something else."""
    found = []
    for value in values:
        if type(value) is int:
            found.append(value)
        elif hasattr(value, "__index__") and not isinstance(value, torch.Tensor):
            found.append(int(value))
        else:
            return None
    return found
