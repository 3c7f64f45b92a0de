"""Digest of many tensors in one pass over their memory: keyed, position-dependent, exact.

The bytes of a tensor are rows of 2048, and each row is multiplied with a matrix of random weights
(`product`): eight sums, exact integers, so no bit is lost to rounding. These sums are bytes again,
64 times fewer, and rows again: they are multiplied once more. What is left is weighted with random
64-bit numbers and added up modulo 2^64.

Every bit counts, and every place. In the first product no change of one or two bytes in a row
cancels, with certainty: no flipped bit, no two flipped signs, no two swapped bytes. Of any other
change it is a matter of chance, and of the weights alone: a given change is missed by at most one
in 2^56 choices of the weights in each of the products, and one in 2^38 in the last sum. What it
can miss, then, is what somebody computed in order to be missed. A sum of 64-bit words with odd
weights would be simpler, and is blind: two flipped sign bits at the top of two words add up to
zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from harness.watch.product import ROW, SUMS, multiply, random_bytes
from harness.watch.sample import is_sampled, sample

LARGE = 1 << 17
"""Bytes from which a tensor is read in place; smaller ones are copied together first."""
BLOCK = ROW // (4 * SUMS)
"""Rows whose sums make a row of the second product."""
_PLANS = 16
"""Sets of tensors remembered at the same time; a network with unused parameters has several."""


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
    sums: torch.Tensor
    """Where the sums of its whole rows go."""
    slot: torch.Tensor | None
    """Where the bytes beyond them are copied to; None if there are none."""


class _Plan:
    """The buffers and weights for one list of shapes on one device, made once."""

    def __init__(self, tensors: Sequence[torch.Tensor | None], device: torch.device) -> None:
        sizes = [0 if tensor is None else tensor.nbytes for tensor in tensors]
        whole = [size // ROW if size >= LARGE else 0 for size in sizes]
        rows = [-(-size // ROW) for size in sizes]
        blocks = [-(-count // BLOCK) for count in rows]
        copied = sum(all_ - whole_ for all_, whole_ in zip(rows, whole, strict=True))
        self._scratch = torch.zeros((copied, ROW), dtype=torch.int8, device=device)
        self._scratch_sums = torch.empty((copied, SUMS), dtype=torch.int32, device=device)
        self._sums = torch.zeros((sum(blocks) * BLOCK, SUMS), dtype=torch.int32, device=device)
        self._block_sums = torch.empty((sum(blocks), SUMS), dtype=torch.int32, device=device)
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
                sums = self._sums[first : first + whole[index]]
                self._large.append(_InPlace(index, sums, slot if len(slot) else None))
            elif tensor is not None and size:
                self._small.append(index)
                self._slots.append(slot.view(tensor.dtype).view(tensor.shape))
            places += range(first + whole[index], first + rows[index])
            owners += [index] * blocks[index]
            first += blocks[index] * BLOCK
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self._owners = torch.tensor(owners, dtype=torch.int64, device=device)
        salts = [_salt(tensor) for tensor in tensors]
        self._salts = torch.tensor(salts, dtype=torch.int64, device=device)
        weights = [_BLOCKS.first(count) for count in blocks]
        self._weights = torch.cat(weights).to(device)

    def digests(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return the digests, on the device; on a GPU nothing here waits for it."""
        for large in self._large:
            tensor = tensors[large.index]
            assert tensor is not None
            raw = self._flat(tensor).view(torch.int8)
            split = len(large.sums) * ROW
            multiply(raw[:split].view(-1, ROW), large.sums)
            if large.slot is not None:
                large.slot.copy_(raw[split:])
        if self._slots:
            small = [t for i in self._small if (t := tensors[i]) is not None]
            torch._foreach_copy_(self._slots, small)
        if len(self._scratch):
            multiply(self._scratch, self._scratch_sums)
            self._sums.index_copy_(0, self._places, self._scratch_sums)
        if len(self._block_sums):
            multiply(self._sums.view(torch.int8).view(-1, ROW), self._block_sums)
        weighted = torch.mul(self._block_sums, self._weights).sum(1)
        return self._salts.index_add(0, self._owners, weighted)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous():
            return tensor.view(-1)
        # Into the same memory every time: pages that were never touched cost more than the copy.
        if len(self._ordered) < tensor.nbytes:
            self._ordered = torch.empty(tensor.nbytes, dtype=torch.int8, device=tensor.device)
        ordered = self._ordered[: tensor.nbytes].view(tensor.dtype)
        ordered.view(tensor.shape).copy_(tensor)
        return ordered


def _salt(tensor: torch.Tensor | None) -> int:
    """Tell apart what has no bytes to tell apart: absent, empty, zeros of another shape."""
    text = "absent" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
    return int.from_bytes(random_bytes(text, 8), "little", signed=True)


class Digester:
    """Digests lists of tensors; keeps buffers for the lists it has seen."""

    def __init__(self) -> None:
        """Start with no buffers."""
        self._plans: dict[tuple[object, ...], _Plan] = {}

    def __call__(
        self, tensors: Sequence[torch.Tensor | None], *, sampled: bool = False
    ) -> list[int]:
        """Return a signed 64-bit digest of each tensor; the tensors are only read.

        Equal for equal dtype, shape and bits, and in practice only then. None has a digest of its
        own. Sparse and quantised tensors, and those on other devices, are copied first.

        Args:
            tensors: what to read.
            sampled: read no more than a sample of the large ones.
        """
        if not tensors:
            return []
        with torch.no_grad(), _no_modes():
            dense = [None if t is None else _dense(t, sampled=sampled) for t in tensors]
            digests: list[int] = self._plan(dense).digests(dense).tolist()
            return digests

    def _plan(self, dense: Sequence[torch.Tensor | None]) -> _Plan:
        key = tuple([None if t is None else (t.shape, t.dtype) for t in dense])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[key] = _Plan(dense, torch.device("cpu"))
        return plan


def _no_modes() -> contextlib.AbstractContextManager[object]:
    # A mode of the user's, such as one that counts operators, must not see ours.
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return _without_modes()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _without_modes():  # type: ignore[no-untyped-def]  # noqa: ANN202
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _dense(tensor: torch.Tensor, *, sampled: bool) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_conj() or tensor.is_neg():
        # What such a tensor means is not what is in its memory.
        tensor = tensor.resolve_conj().resolve_neg()
    if sampled and is_sampled(tensor):
        tensor = sample(tensor)
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    return tensor
