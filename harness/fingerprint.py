"""Digest of a tensor: keyed, position-dependent, with the norm and the extremes beside it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What identifies a tensor bit for bit, and what a person wants to see of it."""

    digest: str
    """16 hex digits; equal for equal dtype, shape and bits, and in practice only then."""
    norm: float
    """L2 norm in float64."""
    smallest: float
    largest: float
    nonfinite: int
    """Number of NaNs and infinities."""


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Return the fingerprint of a tensor of any shape and dtype; the tensor is only read.

    Signed zeros and NaN payloads count: the digest is over the bits, keyed by dtype and shape.
    """
    import numpy as np
    import torch

    values = tensor.detach().to("cpu").contiguous()
    key = f"{values.dtype}{tuple(values.shape)}".encode()[:64]
    raw = values.reshape(-1).view(torch.uint8) if values.numel() else values.new_empty(0).byte()
    bits = hashlib.blake2b(raw.numpy().data, key=key, digest_size=8).hexdigest()
    # numpy from here on: a reduction of a small tensor costs a tenth of what it costs in torch.
    wide = values.reshape(-1).to(torch.float64).numpy()
    if not wide.size:
        return Fingerprint(digest=bits, norm=0.0, smallest=0.0, largest=0.0, nonfinite=0)
    with np.errstate(over="ignore", invalid="ignore"):
        return Fingerprint(
            digest=bits,
            norm=math.sqrt(wide @ wide),
            smallest=float(wide.min()),
            largest=float(wide.max()),
            nonfinite=wide.size - int(np.isfinite(wide).sum()),
        )
