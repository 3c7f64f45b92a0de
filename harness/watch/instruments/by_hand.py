"""What the script reduces itself, one by one: gradients, in which order; and weights."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import Context
from harness.watch.instruments.patches import Patches
from harness.watch.modules import PLAIN

MOST = 4096
"""Reductions between two updates that are remembered."""
NAMES = 256
"""Names that are written down of them."""
TIMES = 8
"""Averages of the weights of an optimizer that are written down."""


class ByHand:
    """Observes `all_reduce` of tensors that turn out to be gradients of an optimizer."""

    def __init__(self, context: Context) -> None:
        """Put functions around torch's own."""
        self._context = context
        self._reduced: list[weakref.ref[torch.Tensor]] = []
        self._places: set[int] = set()
        self._sizes: set[int] = set()
        self._averaged: dict[int, int] = {}
        """Optimizer -> how often its weights have been reduced."""
        self.sees_averages = False
        """Whether the weights of any optimizer have been reduced, as they are or in one tensor."""
        self._names: dict[int, list[str]] = {}
        self._strided = False
        self._groups: list[list[int]] = []
        self._patches = Patches()
        asked = context.safely("gradients reduced by hand", self._asked)
        grouped = context.safely("groups made by the script", self._grouped)
        for owner in (dist, dist.distributed_c10d):
            self._patches.around(owner, "all_reduce", before=asked)
            self._patches.around(owner, "new_group", after=grouped)

    def close(self) -> None:
        """Put torch's own functions back."""
        self._patches.close()

    def before_update(self, number: int, update: int, held: list[tuple[str, torch.Tensor]]) -> None:
        """Note in which order gradients were reduced, where it is not that of the update before."""
        if not self._reduced:
            if self._names.get(number):
                # The update before was made from reduced gradients, and this one is not.
                self._note(number, update, [])
            return
        self._weights(number, update, held)
        names = {id(p.grad): name for name, p in held if p.grad is not None}
        alive = [tensor for reference in self._reduced if (tensor := reference()) is not None]
        self._reduced.clear()
        order = [names[id(tensor)] for tensor in alive if id(tensor) in names]
        if order and order != self._names.get(number):
            self._note(number, update, order)

    def _note(self, number: int, update: int, order: list[str]) -> None:
        self._names[number] = order
        self._context.journal.write(
            "reduced_by_hand", optimizer=number, update=update, names=order[:NAMES]
        )

    def _weights(self, number: int, update: int, held: list[tuple[str, torch.Tensor]]) -> None:
        """Note that weights were reduced; `parameter.data` is another tensor each time.

        One tensor that has as many elements as all of them is noted too: it may be the weights.
        """
        places, self._places = self._places, set()
        sizes, self._sizes = self._sizes, set()
        if self._averaged.get(number, 0) >= TIMES:
            return
        names = [name for name, p in held if type(p) in PLAIN and p.data_ptr() in places]
        flat = not names and sum(p.numel() for _, p in held) in sizes
        if names or flat:
            self._averaged[number] = self._averaged.get(number, 0) + 1
            self.sees_averages = True
            self._context.journal.write(
                "reduced_as_one" if flat else "weights_reduced",
                optimizer=number,
                update=update,
                count=len(held) if flat else len(names),
                names=([name for name, _ in held] if flat else names)[:NAMES],
            )

    def _asked(self, tensor: Any = None, *_: Any, **__: Any) -> None:
        if isinstance(tensor, torch.Tensor) and len(self._reduced) < MOST:
            self._reduced.append(weakref.ref(tensor))
            self._sizes.add(tensor.numel())
            if type(tensor) in PLAIN and tensor.layout == torch.strided and tensor.numel():
                self._places.add(tensor.data_ptr())
                self._gaps(tensor)

    def _gaps(self, tensor: torch.Tensor) -> None:
        """Note once that a view with gaps was reduced, where gloo does not heed its strides."""
        if self._strided or tensor.is_contiguous() or not tensor.is_cpu:
            return
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            self._strided = True
            self._context.journal.write(
                "strided_reduction",
                shape=list(tensor.shape),
                stride=list(tensor.stride()),
                at=call_site(),
            )

    def _grouped(self, _: Any, ranks: Any = None, *__: Any, **___: Any) -> None:
        if ranks is not None and len(self._groups) < NAMES:
            group = sorted(int(rank) for rank in ranks)
            if group not in self._groups:
                self._groups.append(group)
                self._context.journal.write("new_group", ranks=group)
