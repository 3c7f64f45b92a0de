"""The state of each generator of random numbers, as a number; reading it draws nothing."""

from __future__ import annotations

import ctypes
import random
import sys
import zlib

import torch


def random_state() -> dict[str, int]:
    """Return 32 bits for each generator that the program may use without saying so."""
    found = {"torch": digest_of(torch.get_rng_state()), "python": _of_python()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        _, keys, place, *_ = numpy.get_state()
        found["numpy"] = zlib.crc32(keys.tobytes(), place)
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        # Seed and offset, which are kept on the host.
        found["cuda"] = digest_of(torch.cuda.get_rng_state())
    return found


def _of_python() -> int:
    version, numbers, gauss = random.getstate()
    # Of numbers, so the same in every process; before Python 3.12 None hashes to a place in memory.
    return hash((version, numbers, gauss is None, gauss or 0.0))


def digest_of(state: torch.Tensor) -> int:
    """Return 32 bits for the state of one of torch's generators."""
    # numpy need not be installed.
    return zlib.crc32(ctypes.string_at(state.data_ptr(), state.numel()))
