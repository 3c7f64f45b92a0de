"""The digest sees every bit, every position, the dtype and the shape; nothing cancels out."""

from __future__ import annotations

import math

import pytest
import torch

from harness.fingerprint import fingerprint

ONES = torch.ones(2)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def test_equal_bits_equal_digest_whatever_the_strides() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert fingerprint(x) == fingerprint(x.clone())
    assert fingerprint(x.t().contiguous().t()).digest == fingerprint(x).digest


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.float64)),
        (torch.zeros(4), torch.zeros(5)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.full((8,), 3.0), torch.full((8,), 5.0)),
        (ONES, torch.stack([ONES[0], torch.nextafter(ONES[1], torch.tensor(2.0))])),
        (torch.zeros(0), torch.zeros(0, 3)),
    ],
)
def test_other_tensors_have_another_digest(x: torch.Tensor, y: torch.Tensor) -> None:
    assert fingerprint(x).digest != fingerprint(y).digest


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_flipped_bit_is_seen(dtype: torch.dtype) -> None:
    x = torch.ones(33).to(dtype)
    before = fingerprint(x).digest
    x.view(torch.uint8)[17] ^= 1
    assert fingerprint(x).digest != before


def test_norm_extremes_and_nonfinite() -> None:
    print_ = fingerprint(torch.tensor([3.0, -4.0]))
    assert (print_.norm, print_.smallest, print_.largest, print_.nonfinite) == (5.0, -4.0, 3.0, 0)
    odd = fingerprint(torch.tensor([math.inf, math.nan, 1.0]))
    assert odd.nonfinite == 2
    assert math.isnan(odd.norm)
    assert math.isnan(odd.smallest)


def test_reading_leaves_the_tensor_alone() -> None:
    x = torch.randn(5, requires_grad=True)
    copy = x.detach().clone()
    fingerprint(x)
    assert torch.equal(x, copy)
    assert x.grad is None
