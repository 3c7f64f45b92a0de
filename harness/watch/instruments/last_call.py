"""The last collective that this rank's own code has called, in a file that outlives the process.

Torch keeps a record of all collectives, in memory: a rank that is aborted by gloo, or killed,
takes it along. So what is about to be called is written to a mapped page first.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import torch

from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import Context
from harness.watch.instruments.patches import Patches

SIZE = 1024
UPDATES = struct.Struct("<q")
"""At the end of the page: how many updates had been made at the last backward pass."""
_FIRST = ("all_reduce", "broadcast", "reduce", "gather", "send", "recv", "isend", "irecv")
"""Collectives whose first argument is what the rank brings; of the others it is the second."""
_SECOND = (
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)
_NONE = ("barrier", "monitored_barrier", "scatter")
_BRINGS = ("tensor", "input_tensor", "input")


class LastCall:
    """Writes down each call of torch.distributed just before it is made."""

    def __init__(self, context: Context) -> None:
        """Put functions around torch's own; nothing is written until there is a file."""
        self._context = context
        self._page: mmap.mmap | None = None
        self._count = 0
        self._said: tuple[int, str, str | None] | None = None
        """What is written there, if it is a call that brings nothing."""
        self._patches = Patches()
        places = dict.fromkeys(_FIRST, 0) | dict.fromkeys(_SECOND, 1) | dict.fromkeys(_NONE, -1)
        for name, place in places.items():
            before = context.safely("collectives", self._writer(name, place))
            for owner in (torch.distributed, torch.distributed.distributed_c10d):
                self._patches.around(owner, name, before=before)
        before = context.safely("collectives", self._writer("backward", -1))
        self._patches.around(torch.autograd, "backward", before=before)

    def open(self, path: Path) -> None:
        """Write to a file from now on.

        Raises:
            OSError: the file cannot be written.
        """
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, SIZE)
            self._page = mmap.mmap(file, SIZE)
        finally:
            os.close(file)

    def close(self) -> None:
        """Put torch's own functions back."""
        self._patches.close()

    def _writer(self, name: str, place: int) -> Any:
        depth = name != "backward"

        def write(*args: Any, **kwargs: Any) -> None:
            self._count += depth
            if self._page is None:
                return
            if not depth:
                UPDATES.pack_into(self._page, SIZE - UPDATES.size, self._context.updates)
            brings = args[place] if 0 <= place < len(args) else None
            if place >= 0 and brings is None:
                brings = next((kwargs[key] for key in _BRINGS if key in kwargs), None)
            at = call_site()
            said = (self._count, name, at) if brings is None else None
            # Between two collectives the same backward pass comes again and again.
            if said is not None and said == self._said:
                return
            self._said = said
            several = brings if isinstance(brings, list | tuple) else [brings]
            tensors = [one for one in several if isinstance(one, torch.Tensor)]
            text = json.dumps(
                {
                    "count": self._count,
                    "operation": name,
                    "shapes": [list(one.shape) for one in tensors[:4]],
                    "elements": sum(one.numel() for one in tensors),
                    "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
                    "at": at,
                    "updates": self._context.updates,
                }
            )
            written = text.encode()[: SIZE - UPDATES.size - 1] + b"\n"
            self._page[: len(written)] = written

        return write
