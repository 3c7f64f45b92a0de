"""States of random generators that the script itself sets: after a resume, for example."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import Context
from harness.watch.instruments.patches import Patches
from harness.watch.instruments.random_state import digest_of

_TORCH = str(Path(torch.__file__).parent)
_BETWEEN = 3
"""Frames from the function below to whoever called torch's: two of the instruments' own."""


class Restores:
    """Observes `torch.set_rng_state` and its like of a device."""

    def __init__(self, context: Context) -> None:
        """Put functions around torch's own."""
        self._context = context
        self._patches = Patches()
        restored = context.safely("restored random states", self._restored)
        for owner in (torch, torch.random, torch.cuda, torch.cuda.random):
            self._patches.around(owner, "set_rng_state", before=restored)

    def close(self) -> None:
        """Put torch's own functions back."""
        self._patches.close()

    def _restored(self, state: Any, *_: Any, **__: Any) -> None:
        # Checkpointing and fork_rng restore a state again and again, from inside of torch.
        if sys._getframe(_BETWEEN).f_code.co_filename.startswith(_TORCH):
            return
        if isinstance(state, torch.Tensor) and state.is_cpu:
            self._context.journal.write("restored", state=digest_of(state), at=call_site())
