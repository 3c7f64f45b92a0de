"""Small numbers that the script itself reduces over the ranks: metrics and their counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import ALL_OF, Context
from harness.watch.instruments.patches import Patches

MOST_NUMBERS = 8


class Reductions:
    """Observes `all_reduce` of a few numbers on the host, and gathers of whatever kind."""

    def __init__(self, context: Context) -> None:
        """Put functions around torch's own."""
        self._context = context
        self._patches = Patches()
        self._before: list[float] | None = None
        safely, around = context.safely, self._patches.around
        name = "reductions"
        for owner in (dist, dist.distributed_c10d):
            around(
                owner,
                "all_reduce",
                before=safely(name, self._asked),
                after=safely(name, self._reduced),
            )
            for gather in ("all_gather", "all_gather_into_tensor", "gather", "all_gather_object"):
                around(owner, gather, before=safely(name, self._gathered))

    def close(self) -> None:
        """Put torch's own functions back."""
        self._patches.close()

    def _looks(self) -> bool:
        updates = self._context.updates
        return updates < ALL_OF or self._context.window.is_sparse(updates)

    def _asked(self, tensor: Any = None, *_: Any, **__: Any) -> None:
        self._before = _numbers(tensor) if self._looks() else None

    def _reduced(
        self, work: Any, tensor: Any = None, op: Any = dist.ReduceOp.SUM, *_: Any, **__: Any
    ) -> None:
        before, self._before = self._before, None
        # Of an asynchronous one the result is not there yet.
        if before is None or work is not None:
            return
        self._context.journal.write(
            "reduced",
            op=str(op).rpartition(".")[2],
            mine=before,
            all=_numbers(tensor),
            training=torch.is_grad_enabled(),
            at=call_site(),
        )

    def _gathered(self, *_: Any, **__: Any) -> None:
        if self._looks():
            self._context.journal.write("gathered", at=call_site())


def _numbers(tensor: Any) -> list[float] | None:
    small = type(tensor) is torch.Tensor and tensor.numel() <= MOST_NUMBERS
    if not small or not tensor.is_cpu or tensor.is_complex():
        return None
    return [float(value) for value in tensor.detach().reshape(-1).tolist()]
