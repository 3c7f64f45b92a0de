"""Exact products of rows of bytes with a fixed matrix of random weights, by the fastest way here.

A row has 2048 bytes, taken as numbers from -128 to 127, and a weight has 7 bits: no sum is larger
than 2^24 in size. So every way gives the same integers, even one that adds float32 numbers in an
order of its own, and which one is taken is a matter of speed alone. A way counts only after it
was tried where it is to be used: against float64, for some processors clip int8 products, and
against the clock, for where the instructions of a way are missing oneDNN has a reference that is a
thousand times slower (the packed one needs AMX: 48 ms for 64 rows on an Ice Lake, which has none,
where float32 takes 0.4 ms).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from harness.watch.digests.drawn import random_bytes

ROW = 2048
"""Bytes in a row; all ways of multiplying are slower with rows of half or twice the length."""
SUMS = 8
"""Independent sums of a row: two bytes of it share all of their weights once in 2^56."""
MANY = 2048
"""Rows from which a product in packed weights is worth what its preparation costs: 4 MB."""

_TRIAL = 64
"""Rows with which a way is tried against the clock."""
_SLOW = 2.0
"""Times of plain float32 products that a way may take."""

Product = Callable[[torch.Tensor, torch.Tensor], None]
"""Puts the sums of rows, (n, ROW) of int8, into its second argument, (n, SUMS) of int32."""
_Way = Callable[[torch.device], Product]
_ABSENT = (RuntimeError, AttributeError, TypeError, ValueError)
"""What a way raises that does not exist here."""


def product_for(device: torch.device, rows: int) -> Product:
    """Return the fastest product of so many rows on a device.

    Raises:
        RuntimeError: there is none that is exact.
    """
    for way in _ways(device.type, rows):
        # The clock first: a trial of many rows takes seconds where it says no.
        if _is_fast(way, device) and _is_exact(way, device, rows >= MANY):
            return _made(way, device)
    raise RuntimeError(f"no product of bytes is exact on {device}")


@cache
def weights(device: torch.device) -> torch.Tensor:
    """Return the matrix, (ROW, SUMS) of int8: random numbers from -64 to 63."""
    drawn = torch.frombuffer(bytearray(random_bytes("bytes", ROW * SUMS)), dtype=torch.int8)
    # Column by column in memory, which the products read a little faster.
    return torch.bitwise_right_shift(drawn, 1).view(SUMS, ROW).to(device).t()


def _ways(device: str, rows: int) -> tuple[_Way, ...]:
    if device == "cpu":
        return (_packed, _int8, *_ALWAYS) if rows >= MANY else (_int8, *_ALWAYS)
    # CUDA's int8 product wants more than 16 rows.
    return (_int8, *_ALWAYS) if device == "cuda" and rows > 16 else _ALWAYS


def _int8(device: torch.device) -> Product:
    matrix = weights(device)

    def product(rows: torch.Tensor, out: torch.Tensor) -> None:
        torch._int_mm(rows, matrix, out=out)

    return product


def _packed(device: torch.device) -> Product:
    # The linear layer of quantised networks: it reads the rows in place, where `_int_mm` makes a
    # copy in the processor's own order first.
    linear = torch.ops.onednn.qlinear_pointwise.default
    packed = torch.ops.onednn.qlinear_prepack(weights(device).t(), None)
    scale = torch.ones(SUMS, dtype=torch.float32, device=device)
    zero = torch.zeros(SUMS, dtype=torch.int64, device=device)
    what: tuple[Any, ...]
    what = (1.0, 0, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], "")

    def product(rows: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(linear(rows, *what))

    return product


def _by_float32(device: torch.device) -> Product:
    return _by_floats(device, torch.float32)


def _by_float64(device: torch.device) -> Product:
    return _by_floats(device, torch.float64)


_ALWAYS = (_by_float32, _by_float64)


def _by_floats(device: torch.device, dtype: torch.dtype) -> Product:
    matrix = weights(device).to(dtype)
    # Numbers of 4 or 8 bytes for each byte: a part at a time.
    most = 256 if device.type == "cpu" else 4096

    def product(rows: torch.Tensor, out: torch.Tensor) -> None:
        for start in range(0, len(rows), most):
            part = rows[start : start + most].to(dtype)
            sums = torch.empty((len(part), SUMS), dtype=dtype, device=device)
            # Autocast would round `part @ matrix`, and leaves alone what has an `out`.
            torch.mm(part, matrix, out=sums)
            out[start : start + most].copy_(sums)

    return product


@cache
def _made(way: _Way, device: torch.device) -> Product:
    return way(device)


def _is_fast(way: _Way, device: torch.device) -> bool:
    """Say whether a way exists here and takes about as long as plain products or less.

    Only asked of the CPU: a GPU would have to be waited for, and has its products in hardware.
    """
    if way in _ALWAYS or device.type != "cpu":
        return True
    return _seconds(way, device) <= _SLOW * _seconds(_by_float32, device)


@cache
def _seconds(way: _Way, device: torch.device) -> float:
    """Return what a few rows take, infinity where the way does not exist."""
    rows = _trial(_TRIAL)
    out = torch.empty((_TRIAL, SUMS), dtype=torch.int32, device=device)
    # The shortest of several times: what else the machine does only makes them longer.
    best = math.inf
    try:
        product = _made(way, device)
        product(rows, out)  # the first one compiles
        for _ in range(3):
            start = time.perf_counter()
            product(rows, out)
            best = min(best, time.perf_counter() - start)
    except _ABSENT:
        return math.inf
    return best


def _trial(count: int) -> torch.Tensor:
    """Return rows to try a way with, a multiple of 32, the largest numbers among them."""
    drawn = torch.frombuffer(bytearray(random_bytes("trial", 30 * ROW)), dtype=torch.int8)
    extremes = torch.tensor([[-128], [127]], dtype=torch.int8, device="cpu").expand(2, ROW)
    return torch.cat([drawn.view(30, ROW), extremes]).repeat(count // 32, 1)


@cache
def _is_exact(way: _Way, device: torch.device, many: bool) -> bool:
    """Say whether a way exists here and gives the right sums, of the largest numbers too."""
    # As large as the smallest product that it will be used for: others may be done otherwise.
    rows = _trial(MANY if many else 32)
    expected = torch.empty((len(rows), SUMS), dtype=torch.int32, device="cpu")
    _by_float64(torch.device("cpu"))(rows, expected)
    found = torch.empty_like(expected, device=device)
    try:
        _made(way, device)(rows.to(device), found)
    except _ABSENT:
        return False
    return torch.equal(found.cpu(), expected)
