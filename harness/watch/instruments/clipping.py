"""Clips of gradients, and the loss scale they may still carry.

The norm that a clip saw stands beside the norm that the update is made from: a clip before the
ranks' average sees another one on each rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import ALL_OF, Context
from harness.watch.instruments.patches import Patches
from harness.watch.modules import parameters_of

MOST = 8
"""Clips between two updates that are written down."""


class Clipping:
    """Observes clip_grad_norm_ and clip_grad_value_, and GradScaler."""

    def __init__(self, context: Context) -> None:
        """Put functions around torch's own."""
        self._context = context
        self._patches = Patches()
        self._clips: list[dict[str, Any]] = []
        self._scaler: Any = None
        self._scaled = self._unscaled = False
        safely, around = context.safely, self._patches.around
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            around(owner, "clip_grad_norm_", after=safely("clips", self._clipped_norm))
            around(owner, "clip_grad_value_", after=safely("clips", self._clipped_value))
        scaler = torch.amp.GradScaler
        around(scaler, "scale", after=safely("loss scales", self._did_scale))
        around(scaler, "unscale_", after=safely("loss scales", self._did_unscale))

    @property
    def scale(self) -> float | None:
        """The factor that the losses since the last update carry, if it can be read."""
        scale = getattr(self._scaler, "_scale", None) if self._scaled else None
        return float(scale) if isinstance(scale, torch.Tensor) and self._readable(scale) else None

    def close(self) -> None:
        """Put torch's own functions back."""
        self._patches.close()

    def before_update(self, number: int, optimizer: Optimizer, update: int) -> None:
        """Write the clips since the last update of any optimizer."""
        clips, self._clips = self._clips, []
        if clips:
            event: dict[str, Any] = {"optimizer": number, "update": update, "clips": clips}
            if self._context.window.is_sparse(self._context.updates):
                event |= _norm(optimizer)
            self._context.journal.write("clip", **event)

    def after_update(self) -> None:
        """Begin anew."""
        self._scaled = self._unscaled = False

    def _clipped_norm(
        self,
        norm: Any,
        parameters: Any = None,
        max_norm: Any = None,
        norm_type: Any = 2.0,
        *_: Any,
        **__: Any,
    ) -> None:
        local = getattr(norm, "_local_tensor", None)
        self._clipped("norm", norm if local is None else local, max_norm, local is not None)

    def _clipped_value(
        self, _: Any, parameters: Any = None, clip_value: Any = None, *__: Any, **___: Any
    ) -> None:
        self._clipped("value", None, clip_value, False)

    def _clipped(self, kind: str, norm: Any, bound: Any, sharded: bool) -> None:
        updates = self._context.updates
        if len(self._clips) >= MOST or not (
            updates < ALL_OF or self._context.window.is_sparse(updates)
        ):
            return
        readable = isinstance(norm, torch.Tensor) and self._readable(norm)
        self._clips.append(
            {
                "kind": kind,
                "norm": float(norm) if readable else None,
                "bound": float(bound) if isinstance(bound, int | float) else None,
                "sharded": sharded,
                "backwards": self._context.window.so_far().get("backwards", 0),
                # Of several optimizers one may have been unscaled: then nothing is said of any.
                "scale": None if self._unscaled else self.scale,
                "at": call_site(),
            }
        )

    def _readable(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu or self._context.window.is_sparse(self._context.updates)

    def _did_scale(self, _: Any, scaler: Any, *__: Any, **___: Any) -> None:
        self._scaler = scaler
        self._scaled = bool(scaler.is_enabled())

    def _did_unscale(self, *_: Any, **__: Any) -> None:
        self._unscaled = True


def _norm(optimizer: Optimizer) -> dict[str, Any]:
    """Return the norm of the gradients that an update is made from, and how they are laid out."""
    held = parameters_of(optimizer)
    gradients = [p.grad for p in held if p.grad is not None]
    sharded = any(getattr(p, "device_mesh", None) is not None for p in held)
    flat = any(hasattr(p, "_fsdp_flattened") or hasattr(p, "_sharded_size") for p in held)
    plain = all(g.layout == torch.strided and g.device == gradients[0].device for g in gradients)
    if sharded or flat or not gradients or not plain:
        return {"shards": "DTensor" if sharded else "FSDP1" if flat else None}
    norms = torch._foreach_norm([g.detach() for g in gradients])
    return {"norm": float(torch.stack([n.double() for n in norms]).norm()), "shards": None}
