"""Writes down projections of gradients and parameters, update by update, for a later comparison."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch

from harness.watch.instruments.context import Context
from harness.watch.modules import Known, local_part, parameters_of
from harness.watch.twin.projection import project

UPDATES = 256
"""Updates of each optimizer that are recorded."""


class Recorder:
    """The record of this rank: a line for each optimizer, update and phase."""

    def __init__(self, folder: str, context: Context, updates: int = UPDATES) -> None:
        """Record into a folder; one file a rank.

        Raises:
            OSError: the folder cannot be made.
        """
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._context = context
        self._updates = updates
        self._file: Any = None
        self._names: dict[int, list[str]] = {}

    def begin(self, rank: int, world_size: int) -> None:
        """Open the file of a rank, once it is known which one this is; then do nothing more."""
        if self._file is None:
            path = self._folder / f"rank{rank}.projections.jsonl"
            self._file = path.open("w", encoding="utf-8", buffering=1)
            self._rank = rank
            self._line({"rank": rank, "world_size": world_size, "torch": torch.__version__})

    def before_update(self, number: int, optimizer: torch.optim.Optimizer, update: int) -> None:
        """Record the gradients from which an update is made."""
        if update < self._updates:
            parameters = parameters_of(optimizer)
            self._record(number, update, "gradients", optimizer, [p.grad for p in parameters])

    def after_update(self, number: int, optimizer: torch.optim.Optimizer, update: int) -> None:
        """Record the parameters."""
        if update < self._updates:
            self._record(number, update, "parameters", optimizer, [*parameters_of(optimizer)])

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _record(
        self,
        number: int,
        update: int,
        phase: str,
        optimizer: torch.optim.Optimizer,
        tensors: list[torch.Tensor | None],
    ) -> None:
        if self._file is None:
            return
        parameters = parameters_of(optimizer)
        names = self._names.get(number)
        if names is None or len(names) != len(parameters):
            known = self._context.modules.known(parameters)
            names = self._names[number] = [
                known.get(id(p), Known(f"parameter {i}")).name for i, p in enumerate(parameters)
            ]
        values: dict[str, Any] = {}
        for name, parameter, tensor in zip(names, parameters, tensors, strict=True):
            first = _first_element(parameter)
            # Replicas are recorded once; of a shard everybody has his own part.
            if (
                tensor is None
                or not parameter.is_floating_point()
                or (first is None and self._rank)
            ):
                continue
            square, projections = project(local_part(tensor), first or 0)
            values[name] = [square, *projections]
        self._line({"optimizer": number, "update": update, "phase": phase, "values": values})

    def _line(self, content: dict[str, Any]) -> None:
        self._file.write(json.dumps(content) + "\n")


def _first_element(parameter: torch.Tensor) -> int | None:
    """Return where this rank's part of a sharded tensor begins; None for a replica."""
    placements = getattr(parameter, "placements", None)
    if placements is None or all(placement.is_replicate() for placement in placements):
        return None
    with contextlib.suppress(ImportError, AttributeError):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape,
            parameter.device_mesh,  # type: ignore[attr-defined]
            placements,
        )
        if shape[1:] == tuple(parameter.shape[1:]):
            return int(offset[0]) * (parameter[0].numel() if parameter.dim() > 1 else 1)
    return None


class Nudge:
    """Moves every parameter by one rounding step before it is used, to see what that becomes.

    A nudged run against an unnudged one is the rounding floor of a training: it grows as the
    dynamics make rounding grow.
    """

    def __init__(self, seed: int) -> None:
        """Wait for the first forward pass of any module that has parameters."""
        self._seed = seed
        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(self._nudge)

    def _nudge(self, module: torch.nn.Module, _: Any) -> None:
        parameters = list(module.parameters())
        if not parameters:
            return
        self._handle.remove()
        generator = torch.Generator().manual_seed(self._seed)
        with torch.no_grad():
            for parameter in parameters:
                if not parameter.is_floating_point():
                    continue
                part = local_part(parameter)
                signs = torch.randint(0, 2, part.shape, generator=generator) * 2 - 1
                epsilon = torch.finfo(part.dtype).eps
                part.mul_(1 + epsilon * signs.to(part.device, part.dtype))
