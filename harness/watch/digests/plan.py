"""How the digests of one list of tensors are computed: operations in order, and their buffers."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from harness.watch.digests.drawn import random_bytes, salt
from harness.watch.digests.product import ROW, SUMS, Product, product_for

LARGE = 1 << 17
"""Bytes from which a tensor is read in place; smaller ones are copied together first."""
FEW = 1 << 20
"""Bytes of all tensors up to which none is: one product of copies takes less than several do."""
_DENSE = 1 << 10
"""Blocks times tensors up to which one product with a matrix is faster than three operations."""
BLOCK = ROW // (4 * SUMS)
"""Rows whose sums make a row of the second product."""


class _BlockWeights:
    """Random odd 64-bit numbers, SUMS for each block, the same for the n-th one of any tensor."""

    def __init__(self) -> None:
        self._table = torch.empty((0, SUMS), dtype=torch.int64, device="cpu")

    def first(self, blocks: int) -> torch.Tensor:
        if len(self._table) < blocks:
            size = 1 << max(blocks - 1, 63).bit_length()
            raw = bytearray(random_bytes("blocks", size * SUMS * 8))
            self._table = torch.frombuffer(raw, dtype=torch.int64).view(size, SUMS) | 1
        return self._table[:blocks]


_BLOCKS = _BlockWeights()


@dataclass(frozen=True)
class _InPlace:
    """A large tensor: its whole rows are read where they are."""

    index: int
    bytes: int
    """In whole rows."""
    product: Product
    sums: torch.Tensor
    """Where the sums of its whole rows go."""
    slot: torch.Tensor | None
    """Where the bytes beyond them are copied to; None if there are none."""


class Plan:
    """The buffers and weights for one list of shapes on one device, made once."""

    def __init__(
        self, tensors: Sequence[torch.Tensor | None], device: torch.device, staged: int = 0
    ) -> None:
        """Make them for tensors of these sizes, the first ones of which are copied in any case."""
        sizes = [0 if tensor is None else tensor.nbytes for tensor in tensors]
        apart = device.type != "cpu" or sum(sizes) > FEW
        whole = [size // ROW if apart and size >= LARGE else 0 for size in sizes]
        whole[:staged] = [0] * staged
        rows = [-(-size // ROW) for size in sizes]
        blocks = [-(-count // BLOCK) for count in rows]
        copied = sum(all_ - whole_ for all_, whole_ in zip(rows, whole, strict=True))
        self._scratch = torch.zeros((copied, ROW), dtype=torch.int8, device=device)
        self._scratch_sums = torch.empty((copied, SUMS), dtype=torch.int32, device=device)
        self._scratch_product = product_for(device, copied) if copied else None
        self._sums = torch.zeros((sum(blocks) * BLOCK, SUMS), dtype=torch.int32, device=device)
        self._blocks = self._sums.view(torch.int8).view(-1, ROW)
        self._block_sums = torch.empty((sum(blocks), SUMS), dtype=torch.int32, device=device)
        self._block_product = product_for(device, sum(blocks)) if sum(blocks) else None
        self._ordered = torch.empty(0, dtype=torch.int8, device=device)
        self._large: list[_InPlace] = []
        self._small: list[int] = []
        self._slots: list[torch.Tensor] = []
        places: list[int] = []
        owners: list[int] = []
        first = 0
        for index, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
            rest = self._scratch[len(places) : len(places) + rows[index] - whole[index]]
            slot = rest.view(-1)[: size - whole[index] * ROW]
            if tensor is not None and whole[index]:
                self._large.append(
                    _InPlace(
                        index=index,
                        bytes=whole[index] * ROW,
                        product=product_for(device, whole[index]),
                        sums=self._sums[first : first + whole[index]],
                        slot=slot if len(slot) else None,
                    )
                )
            elif tensor is not None and size:
                self._small.append(index)
                self._slots.append(slot.view(tensor.dtype).view(tensor.shape))
            places += range(first + whole[index], first + rows[index])
            owners += [index] * blocks[index]
            first += blocks[index] * BLOCK
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self._owners = torch.tensor(owners, dtype=torch.int64, device=device)
        salts = [salt(None) if t is None else salt(t.dtype, t.shape) for t in tensors]
        self._salts = torch.tensor(salts, dtype=torch.int64, device=device)
        weights = [_BLOCKS.first(count) for count in blocks]
        self._weights = torch.cat(weights).to(device)
        self._matrix: torch.Tensor | None = None
        if device.type == "cpu" and 0 < len(owners) * len(tensors) <= _DENSE:
            matrix = torch.zeros((len(tensors), len(owners), SUMS), dtype=torch.int64, device="cpu")
            matrix[self._owners, torch.arange(len(owners), device="cpu")] = self._weights
            self._matrix = matrix.view(len(tensors), -1)
            self._flat_sums = self._block_sums.view(-1)
            self._wide = torch.empty(len(owners) * SUMS, dtype=torch.int64, device="cpu")
            self._found = torch.empty_like(self._salts)

    def numbers(self, tensors: Sequence[torch.Tensor | None], start: int = 0) -> list[int]:
        """Return the digests as numbers, for which a GPU is waited for.

        Args:
            tensors: those from place `start` on; what comes before them was copied by `stage`.
            start: how many were.
        """
        return list(self.digests(tensors, start).tolist())

    def digests(self, tensors: Sequence[torch.Tensor | None], start: int = 0) -> torch.Tensor:
        """Return the digests, on the device; on a GPU nothing here waits for it."""
        self._multiply(tensors, start)
        if self._matrix is not None:
            self._wide.copy_(self._flat_sums)
            return torch.addmv(self._salts, self._matrix, self._wide, out=self._found)
        weighted = torch.mul(self._block_sums, self._weights).sum(1)
        return self._salts.index_add(0, self._owners, weighted)

    def stage(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy the first tensors, whose memory will be written to."""
        self._copy(tensors, 0)

    def _copy(self, tensors: Sequence[torch.Tensor | None], start: int) -> None:
        first = bisect.bisect_left(self._small, start)
        last = bisect.bisect_left(self._small, start + len(tensors))
        if first < last:
            small = [t for i in self._small[first:last] if (t := tensors[i - start]) is not None]
            torch._foreach_copy_(self._slots[first:last], small)

    def _multiply(self, tensors: Sequence[torch.Tensor | None], start: int) -> None:
        for large in self._large:
            tensor = tensors[large.index - start]
            assert tensor is not None
            raw = self._flat(tensor).view(torch.int8)
            large.product(raw[: large.bytes].view(-1, ROW), large.sums)
            if large.slot is not None:
                large.slot.copy_(raw[large.bytes :])
        self._copy(tensors, start)
        if self._scratch_product is not None:
            self._scratch_product(self._scratch, self._scratch_sums)
            self._sums.index_copy_(0, self._places, self._scratch_sums)
        if self._block_product is not None:
            self._block_product(self._blocks, self._block_sums)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        # The products of GPUs want an address that 16 divides, and shards may have any.
        aligned = tensor.is_cpu or tensor.data_ptr() % 16 == 0
        if aligned and tensor.is_contiguous():
            return tensor.view(-1)
        # Into the same memory every time: pages that were never touched cost more than the copy.
        if self._ordered.numel() < tensor.nbytes:
            self._ordered = torch.empty(tensor.nbytes, dtype=torch.int8, device=tensor.device)
        ordered = self._ordered[: tensor.nbytes].view(tensor.dtype)
        ordered.view(tensor.shape).copy_(tensor)
        return ordered
