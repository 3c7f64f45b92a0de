"""Forward passes that train, looked at now and then: their samples, and the state of randomness.

Through a wrapper of torch's, or through whatever module holds what an optimizer updates.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.watch.instruments.context import Context
from harness.watch.instruments.forward import in_training
from harness.watch.instruments.forward_hooks import after_forward, before_forward
from harness.watch.instruments.random_state import random_state
from harness.watch.instruments.rows import batch_of, sample_digests
from harness.watch.modules import parameters_of

MOST = 32
"""Modules that are looked at."""


class Inputs:
    """Looks at the first forward pass of a module before some of the updates."""

    def __init__(self, context: Context) -> None:
        """Wait for modules."""
        self._context = context
        self._handles: list[Any] = []
        self._known: list[weakref.ref[nn.Module]] = []
        self._asked: set[int] = set()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def wrapped(self, module: DistributedDataParallel, number: int) -> None:
        """Look at what goes through a wrapper."""
        self._look_at(module, f"module {number}")

    def before_update(self, number: int, optimizer: torch.optim.Optimizer, _: int) -> None:
        """Look, from its second update on, at the modules of an optimizer that nobody wraps."""
        if number in self._asked:
            return
        self._asked.add(number)
        updated = set(map(id, parameters_of(optimizer)))
        for root in self._context.modules.roots():
            kept = isinstance(root, DistributedDataParallel)
            if not kept and any(id(p) in updated for p in root.parameters()):
                self._look_at(root, type(root).__name__)

    def _look_at(self, module: nn.Module, name: str) -> None:
        if len(self._known) >= MOST or any(known() is module for known in self._known):
            return
        own = weakref.ref(module)
        self._known.append(own)
        looked = -1
        pending: dict[str, Any] | None = None
        context = self._context

        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal looked, pending
            update = context.updates
            if looked == update or not context.window.is_sparse(update) or called is not own():
                return
            if not (in_training(called) and torch.is_grad_enabled()):
                return
            looked = update
            pending = {"module": name, "update": update, **_parallel(called)}
            batch = batch_of([args, kwargs])
            if batch is not None:
                rows = sample_digests([args, kwargs])
                pending |= {"rows": rows, "count": batch.shape[0]}
            pending |= {"random": sorted(_random_parts(called)), "before": random_state()}

        def after(called: nn.Module, *_: Any) -> None:
            nonlocal pending
            if pending is None or called is not own():
                return
            event, pending = pending, None
            context.journal.write("inputs", **event, after=random_state())

        instrument = "samples and randomness"
        self._handles += [
            before_forward(context, module, instrument, before),
            after_forward(context, module, instrument, after),
        ]


def _parallel(module: nn.Module) -> dict[str, Any]:
    """Return the ranks that average the gradients of a module, and whether torch does it."""
    if isinstance(module, DistributedDataParallel):
        ranks = dist.get_process_group_ranks(module.process_group)
        return {"averages": ranks, "hooks": len(getattr(module, "_comm_hooks", ()))}
    if type(module).__name__.startswith("FSDP") or hasattr(module, "_get_fsdp_state"):
        meshes = [getattr(p, "device_mesh", None) for p in module.parameters()]
        if meshes and all(mesh is not None and mesh.ndim == 1 for mesh in meshes):
            mesh = meshes[0]
            return {"averages": mesh.mesh.flatten().tolist()}  # type: ignore[union-attr]
    return {}


def _random_parts(module: nn.Module) -> set[str]:
    """Name the kinds of modules that draw random numbers for each element."""
    found = set()
    for part in module.modules():
        if not part.training:
            continue
        # Dropout has its probability as `p`; attention and recurrent layers as `dropout`.
        kind = type(part).__name__
        for key, value in vars(part).items():
            chance = isinstance(value, float) and 0.0 < value < 1.0
            if chance and ((key == "p" and "drop" in kind.lower()) or key in _CHANCES):
                found.add(kind)
    return found


_CHANCES = ("dropout", "drop_prob", "dropout_p", "attn_dropout", "attention_dropout")
