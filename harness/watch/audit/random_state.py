"""The state of every source of random numbers that a forward pass may draw from."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Return the states of torch, of its CUDA device, of Python, and of numpy if it is there."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, place, has_gauss, cached = numpy.random.get_state(legacy=True)
        state["numpy"] = [name, keys.tolist(), int(place), int(has_gauss), float(cached)]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put all of them back."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        numpy.random.set_state(tuple(state["numpy"]))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave all of them as they are, whatever is drawn inside."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
