"""Digest of many tensors in one pass over their memory: keyed, position-dependent, exact.

A tensor is read as rows of bytes. Each row is multiplied with a matrix of random weights by the
int8 matrix product, whose sums are exact integers, so no bit can cancel by rounding or by running
over; the sums of a row, 32 bits wide, are then weighted with random 64-bit numbers and added up
modulo 2^64. A sum of 64-bit words with odd weights would be simpler, and is blind: two flipped
sign bits at the top of two words add up to zero.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.utils._python_dispatch import _disable_current_modes

ROW = 2048
"""Bytes in a row: short rows cost calls, longer ones no longer fit beside the weights in cache."""
SUMS = 8
"""Independent sums of a row: 7-bit weights, so two bytes share all of them once in 2^56."""
LARGE = 1 << 17
"""Bytes from which a tensor is read in place; smaller ones are copied together first."""
ABSENT = -1
"""Stands for the size of a tensor that is not there."""
_PLANS = 16
"""Sets of tensors remembered at the same time; a network with unused parameters has several."""


def _random(name: str, count: int) -> bytes:
    # Not torch's generator: its numbers may change between versions, digests must not.
    return hashlib.shake_256(f"crossrank digest: {name}".encode()).digest(count)


@cache
def _weights() -> torch.Tensor:
    drawn = torch.frombuffer(bytearray(_random("bytes", ROW * SUMS)), dtype=torch.int8)
    # 7 bits: processors that add two products in 16 bits first would clip larger ones. The
    # matrix is column by column in memory, which the product reads a little faster.
    return torch.bitwise_right_shift(drawn, 1).view(SUMS, ROW).t()


class _RowWeights:
    """Random odd 64-bit numbers, SUMS for each row, the same for the n-th row of any tensor."""

    def __init__(self) -> None:
        self._table = torch.empty((0, SUMS), dtype=torch.int64)

    def first(self, rows: int) -> torch.Tensor:
        if len(self._table) < rows:
            size = 1 << max(rows - 1, 63).bit_length()
            # shake_256 is a stream: a longer table starts with the shorter one.
            raw = bytearray(_random("rows", size * SUMS * 8))
            self._table = torch.frombuffer(raw, dtype=torch.int64).view(size, SUMS) | 1
        return self._table[:rows]


_ROWS = _RowWeights()


@cache
def _product_is_exact() -> bool:
    """Say whether this processor's int8 product adds without clipping, at the extremes too."""
    rows = torch.frombuffer(bytearray(_random("trial", 6 * ROW)), dtype=torch.int8).view(6, ROW)
    rows = torch.cat([rows, rows.new_full((1, ROW), -128), rows.new_full((1, ROW), 127)])
    result = torch.empty((len(rows), SUMS), dtype=torch.int32, device="cpu")
    try:
        torch._int_mm(rows, _weights(), out=result)
    except (RuntimeError, AttributeError):
        return False
    return torch.equal(result.to(torch.int64), _slow_product(rows))


def _slow_product(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.int64) @ _weights().to(torch.int64)


def _multiply(rows: torch.Tensor, out: torch.Tensor) -> None:
    if _product_is_exact():
        torch._int_mm(rows, _weights(), out=out)
        return
    for start in range(0, len(rows), 256):
        out[start : start + 256] = _slow_product(rows[start : start + 256]).to(torch.int32)


@dataclass(frozen=True)
class _Place:
    """Where the rows of one tensor are."""

    index: int
    rows: int
    """Whole rows read in place; none for a small tensor."""
    first: int
    """The first of them in the table of sums."""
    slot: torch.Tensor | None
    """Where the rest is copied to, as bytes for a large tensor; None if nothing is left over."""


class _Plan:
    """The buffers and weights for one list of sizes, made once."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        large_rows = sum(t.nbytes // ROW for t in tensors if t is not None and t.nbytes >= LARGE)
        owners: list[int] = []
        weights: list[torch.Tensor] = []
        rests: list[tuple[int, int, int]] = []
        for index, tensor in enumerate(tensors):
            size = 0 if tensor is None else tensor.nbytes
            whole = size // ROW if size >= LARGE else 0
            owners += [index] * whole
            weights.append(_ROWS.first(whole))
            rests.append((index, whole, size - whole * ROW))
        first, packed = large_rows, 0
        self._copied: list[int] = []
        self._slots: list[torch.Tensor] = []
        self._large: list[tuple[int, int, int, torch.Tensor | None]] = []
        rows_of_rest = [-(-rest // ROW) for _, _, rest in rests]
        self._scratch = torch.zeros((sum(rows_of_rest), ROW), dtype=torch.int8, device="cpu")
        done = 0
        for (index, whole, rest), rows in zip(rests, rows_of_rest, strict=True):
            slot = self._scratch[packed : packed + rows].view(-1)[:rest]
            tensor = tensors[index]
            if whole:
                self._large.append((index, done, whole, slot if rest else None))
                done += whole
            elif rest and tensor is not None:
                self._copied.append(index)
                self._slots.append(slot.view(tensor.dtype).view(tensor.shape))
            owners += [index] * rows
            weights.append(_ROWS.first(whole + rows)[whole:])
            packed += rows
        assert done == first
        self._packed_at = first
        self._weights = torch.cat(weights)
        self._owners = torch.tensor(owners, dtype=torch.int64, device="cpu")
        self._sums = torch.empty((first + packed, SUMS), dtype=torch.int32, device="cpu")
        salts = [_salt(tensor) for tensor in tensors]
        self._salts = torch.tensor(salts, dtype=torch.int64, device="cpu")

    def digests(self, tensors: Sequence[torch.Tensor | None]) -> list[int]:
        for index, first, rows, slot in self._large:
            tensor = tensors[index]
            assert tensor is not None
            raw = tensor.contiguous().view(-1).view(torch.int8)
            split = rows * ROW
            _multiply(raw[:split].view(rows, ROW), self._sums[first : first + rows])
            if slot is not None:
                slot.copy_(raw[split:])
        if self._slots:
            torch._foreach_copy_(
                self._slots, [t for i in self._copied if (t := tensors[i]) is not None]
            )
        if len(self._scratch):
            _multiply(self._scratch, self._sums[self._packed_at :])
        weighted = torch.mul(self._sums, self._weights).sum(1)
        digests: list[int] = self._salts.index_add(0, self._owners, weighted).tolist()
        return digests


def _salt(tensor: torch.Tensor | None) -> int:
    """Tell apart what has no bytes to tell apart: absent, empty, zeros of another shape."""
    text = "absent" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
    return int.from_bytes(_random(text, 8), "little", signed=True)


class Digester:
    """Digests lists of tensors; keeps buffers for the lists it has seen."""

    def __init__(self) -> None:
        """Start with no buffers."""
        self._plans: dict[tuple[object, ...], _Plan] = {}

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> list[int]:
        """Return a signed 64-bit digest of each tensor; the tensors are only read.

        Equal for equal dtype, shape and bits, and in practice only then. None has a digest of its
        own. Sparse and quantised tensors, and those on other devices, are copied first.
        """
        if not tensors:
            return []
        with torch.no_grad(), _no_modes():
            dense = [None if tensor is None else _dense(tensor) for tensor in tensors]
            key = tuple([ABSENT if t is None else (t.shape, t.dtype) for t in dense])
            plan = self._plans.get(key)
            if plan is None:
                if len(self._plans) >= _PLANS:
                    del self._plans[next(iter(self._plans))]
                plan = self._plans[key] = _Plan(dense)
            return plan.digests(dense)


def _no_modes() -> contextlib.AbstractContextManager[object]:
    # A mode of the user's, such as one that counts operators, must not see ours.
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return _without_modes()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _without_modes():  # type: ignore[no-untyped-def]  # noqa: ANN202
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    return tensor
