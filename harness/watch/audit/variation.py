"""What may be changed in a replay without changing anything but the rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from harness.watch.audit.forward_pass import ForwardPass
from harness.watch.audit.trees import changed, tensors

_SIGNS = 65_521
"""Random signs for a tensor, again and again for a larger one; a prime, so no row has its own."""


@dataclass(frozen=True, kw_only=True)
class Variation:
    """A replay in which nothing is changed but the rounding."""

    seed: int

    def signs(self, tensor: torch.Tensor, place: int) -> torch.Tensor:
        """Return +1 or -1 for each number of a tensor, from random numbers of our own."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + place)
        count = tensor.numel()
        drawn = torch.randint(0, 2, (min(count, _SIGNS),), generator=generator, dtype=torch.int8)
        signs = (2 * drawn - 1).to(tensor.device, tensor.dtype)
        # Many more would cost as much as a backward pass does.
        return signs.repeat(-(-count // _SIGNS))[:count].view(tensor.shape)

    def nudged(self, tensor: torch.Tensor, place: int) -> torch.Tensor:
        """Return it with every number moved by one machine epsilon, up or down."""
        if not tensor.is_floating_point():
            return tensor
        eps = torch.finfo(tensor.dtype).eps
        with torch.no_grad():
            moved = tensor * (1 + eps * self.signs(tensor, place))
        return moved.requires_grad_(tensor.requires_grad)

    def order(self, length: int, place: int) -> torch.Tensor:
        """Return a permutation: of the passes at place 0, of the rows of a pass elsewhere."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + place)
        return torch.randperm(length, generator=generator)


def common_length(one: ForwardPass, backward: int) -> int | None:
    """Return the number of rows, if everything that goes in and comes out has as many."""
    parts = [one.args, one.kwargs, one.outputs, one.gradients[backward]]
    lengths = {len(tensor) if tensor.dim() else 0 for tensor in tensors(parts)}
    (length,) = lengths if len(lengths) == 1 else (0,)
    return length if length > 1 else None


def permuted(one: ForwardPass, backward: int, order: torch.Tensor) -> ForwardPass:
    """Return the pass with its rows in another order."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()[order.to(tensor.device)].requires_grad_(tensor.requires_grad)

    return replace(
        one,
        args=changed(one.args, rows),
        kwargs=changed(one.kwargs, rows),
        outputs=changed(one.outputs, rows),
        gradients={backward: changed(one.gradients[backward], rows)},
    )
