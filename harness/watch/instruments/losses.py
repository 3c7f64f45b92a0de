"""What each backward pass starts from: the terms of the loss, with their counts and factors."""

from __future__ import annotations

from typing import Any

import torch

from harness.watch.instruments.backward import loss_of
from harness.watch.instruments.clipping import Clipping
from harness.watch.instruments.context import ALL_OF, Context
from harness.watch.instruments.loss_terms import of_probabilities, terms
from harness.watch.instruments.patches import Patches


class Losses:
    """Reads the graph of a loss when backward is about to begin, at some of the updates."""

    def __init__(self, context: Context, clipping: Clipping) -> None:
        """Put a function around torch's own; `clipping` knows the scale of the losses."""
        self._context = context
        self._clipping = clipping
        self._patches = Patches()
        self._patches.around(
            torch.autograd, "backward", before=context.safely("losses", self._before)
        )

    def close(self) -> None:
        """Put torch's own function back."""
        self._patches.close()

    def _before(self, tensors: Any = None, *_: Any, **__: Any) -> None:
        window, updates = self._context.window, self._context.updates
        sparse = window.is_sparse(updates)
        if not sparse and updates >= ALL_OF:
            return
        loss = loss_of(tensors)
        if loss is None:
            return
        if not loss.is_cpu and not sparse:
            return
        window.add("loss_terms", terms(loss))
        if of_probabilities(loss):
            window.add("softmax_twice", True)
        scale = self._clipping.scale
        if scale is not None:
            window.add("loss_scales", scale)
