"""Digests of tensors in the memory of the processor by XXH3, where the package `xxhash` is there.

XXH3 reads memory about as fast as `torch.dot` does, on any processor; the products of `product`,
which need nothing but torch, come near only where there are instructions for matrices of int8. A
seed made of dtype and shape tells apart what has the same bytes. A change is missed by one in 2^64,
unless somebody computed it in order to be missed.

One thread reads. torchrun gives each of several ranks no more than that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from harness.watch.digests.drawn import salt

xxh3: Callable[[Any, int], int] | None
try:
    from xxhash import xxh3_64_intdigest
except Exception:  # a file of the program may have that name, and do anything
    xxh3 = None
else:
    xxh3 = xxh3_64_intdigest

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SEEDS = 1 << 64
_SIGN = 1 << 63
_ABSENT = salt(None) % _SEEDS


class Hasher:
    """Hashes lists of tensors; keeps memory for what is not in the order of its elements."""

    def __init__(self) -> None:
        """Start with no memory."""
        self._ordered = torch.empty(0, dtype=torch.int8, device="cpu")

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> list[int]:
        """Return a signed 64-bit digest of each tensor; strided ones, in the processor's memory."""
        assert xxh3 is not None
        found = []
        for tensor in tensors:
            if tensor is None:
                number = xxh3(b"", _ABSENT)
            else:
                if type(tensor) not in _PLAIN or not tensor.is_contiguous():
                    tensor = self._in_order(tensor)
                seed, memory = _form(tensor.dtype, tensor.shape)
                # What has no elements has no address.
                address = tensor.data_ptr()
                number = xxh3(memory.from_address(address) if address else b"", seed)
            found.append(number - (number & _SIGN) * 2)
        return found

    def _in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        # Into the same memory every time: pages that were never touched cost more than the copy.
        if self._ordered.numel() < tensor.nbytes:
            self._ordered = torch.empty(tensor.nbytes, dtype=torch.int8, device="cpu")
        ordered = self._ordered[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return ordered.copy_(tensor)


@lru_cache(maxsize=1 << 14)
def _form(dtype: torch.dtype, shape: torch.Size) -> tuple[int, type[ctypes.Array[ctypes.c_char]]]:
    """Return the seed of such tensors, and the type of their memory."""
    return salt(dtype, shape) % _SEEDS, ctypes.c_char * (shape.numel() * dtype.itemsize)
