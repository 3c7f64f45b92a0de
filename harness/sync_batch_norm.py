"""SyncBatchNorm where it is refused: CPU kernels for the stock autograd function, and a module.

`torch.nn.modules._functions.SyncBatchNorm` is what nn.SyncBatchNorm runs on a GPU: one all-gather
of (mean, inverse deviation, count) in forward, one all-reduce of two sums in backward. It is plain
Python and works over gloo; only the five operators it calls have no CPU kernel, and the module
and DistributedDataParallel refuse CPU tensors by type. `register_cpu_kernels` adds the operators,
`SyncBatchNorm` calls the function. So control flow, collectives and running statistics are torch's
own; the arithmetic of the five operators is ours, and a report has to say so.

Sums run in float64 about the mean, never as E[x^2] - E[x]^2: with a mean of 1e4 and a deviation of
1e-2 the difference of the two squares has no digit left in float32. What ranks exchange has the
dtype of torch's own protocol, so a mean is rounded to it once before the ranks' means are merged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as _Function
from torch.nn.modules.batchnorm import _BatchNorm

_LIBRARIES: list[torch.library.Library] = []
"""Keeps the registrations alive: they end with the object."""
_HALVES = (torch.float16, torch.bfloat16)


def register_cpu_kernels() -> None:
    """Register the CPU kernels that torch lacks; those it has stay. May be called repeatedly."""
    missing = [
        kernel
        for kernel in _KERNELS
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{kernel.__name__}", "CPU")
    ]
    if missing:
        library = torch.library.Library("aten", "IMPL")
        for kernel in missing:
            library.impl(kernel.__name__, kernel, "CPU")
        _LIBRARIES.append(library)


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation over the batches of all ranks, for CPU tensors over gloo.

    Behaves as nn.SyncBatchNorm does on a GPU: any input of shape (N, C, ...), uneven and empty
    batches per rank, `momentum=None`, no collective in eval mode or alone.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take what nn.SyncBatchNorm takes; `process_group` None = all ranks."""
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.process_group = process_group
        register_cpu_kernels()

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, shape (N, C, ...), with the statistics of all ranks while training.

        Raises:
            ValueError: fewer than two dimensions, or fewer than two values a channel in all.
        """
        group = None
        if self.training and dist.is_available() and dist.is_initialized():
            group = self.process_group or dist.group.WORLD
        if group is None or dist.get_world_size(group) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        if input.dtype in _HALVES:
            # The stock function sends an empty batch in the input's dtype and every other batch
            # in the statistics' dtype: gloo would abort on the mixture.
            return self.forward(input.float()).to(input.dtype)
        factor, mean, var = 0.0, None, None
        if self.track_running_stats:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            mean, var = self.running_mean, self.running_var
            factor = self.momentum or 0.0
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        output: Tensor = _Function.apply(
            input,
            self.weight,
            self.bias,
            mean,
            var,
            self.eps,
            factor,
            group,
            dist.get_world_size(group),
        )
        return output


def convert_sync_batch_norm(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, *, device: str = "cpu"
) -> nn.Module:
    """Return `module` with every BatchNorm*d in it made synchronised; weights and buffers stay.

    On an accelerator this is nn.SyncBatchNorm.convert_sync_batchnorm, elsewhere the same with the
    class of this file.

    Args:
        module: changed in place, except that a bare BatchNorm is replaced.
        process_group: the ranks to synchronise with; None = all.
        device: where the module will run.
    """
    if not device.startswith("cpu"):
        stock: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(module, process_group)
        return stock
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return _converted(module, process_group)
    for name, child in module.named_children():
        module.add_module(name, convert_sync_batch_norm(child, process_group))
    return module


def _converted(norm: _BatchNorm, process_group: dist.ProcessGroup | None) -> SyncBatchNorm:
    synced = SyncBatchNorm(
        norm.num_features,
        norm.eps,
        norm.momentum,
        norm.affine,
        norm.track_running_stats,
        process_group,
    )
    # The tensors themselves move over: an optimizer or a tied layer may already hold them.
    synced._parameters = norm._parameters
    synced._buffers = norm._buffers
    synced.training = norm.training
    if hasattr(norm, "qconfig"):
        synced.qconfig = norm.qconfig
    return synced


def _over(input: Tensor) -> list[int]:
    """Dimensions a channel's statistics run over: all but the second."""
    return [0, *range(2, input.dim())]


def _wide(channel: Tensor, like: Tensor) -> Tensor:
    """A (C,) tensor shaped to broadcast against (N, C, ...)."""
    return channel.view(1, -1, *[1] * (like.dim() - 2))


def _statistics_dtype(input: Tensor) -> torch.dtype:
    """What torch's CUDA kernels keep statistics in: float32 for the halves, else the input's."""
    return torch.float32 if input.dtype in _HALVES else input.dtype


def _average_into(running: Tensor | None, batch: Tensor, momentum: float) -> None:
    """Do running = (1 - momentum) * running + momentum * batch, rounded once."""
    if running is not None:
        running.copy_((1.0 - momentum) * running.to(torch.float64) + momentum * batch)


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return this rank's mean and 1/sqrt(biased variance + eps), each of shape (C,)."""
    over, kept = _over(input), _statistics_dtype(input)
    wide = input.to(torch.float64)
    mean = wide.mean(over)
    # Two passes: a running update of mean and squares loses digits where float64 is all there is.
    var = (wide - _wide(mean, input)).square().mean(over)
    return mean.to(kept), (var + eps).rsqrt().to(kept)


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Merge the ranks' statistics, shape (ranks, C), and update the running ones in place.

    Returns the mean and inverse deviation of all values of all ranks, each of shape (C,).

    Raises:
        ValueError: with fewer than two values a channel in all, on every rank alike.
    """
    count = counts.to(torch.float64).unsqueeze(1)
    total = float(count.sum())
    if total < 2:
        raise ValueError(
            "Expected more than 1 value per channel when training, "
            f"got {total:.0f} on all ranks together"
        )
    means, deviations = mean.to(torch.float64), invstd.to(torch.float64)
    merged = (count * means).sum(0) / total
    # Rounding of a transported invstd can put a variance just below 0; NaN passes the clamp.
    inner = (deviations.pow(-2) - eps).clamp_(min=0.0)
    squares = (count * (inner + (means - merged).square())).sum(0)
    _average_into(running_mean, merged, momentum)
    _average_into(running_var, squares / (total - 1), momentum)
    return merged.to(mean.dtype), (squares / total + eps).rsqrt().to(invstd.dtype)


def batch_norm_elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    """Return (input - mean) * invstd * weight + bias in the input's dtype and memory format."""
    scale = invstd if weight is None else invstd * weight
    # The mean goes first: folding it into the bias would lose the digits of a large mean.
    output = (input - _wide(mean, input)) * _wide(scale, input)
    if bias is not None:
        output = output + _wide(bias, input)
    return output.to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return this rank's sum of dy, of dy * (x - mean), and the gradients of weight and bias."""
    over, kept = _over(input), mean.dtype
    dy = grad_out.to(torch.float64)
    centred = input.to(torch.float64) - _wide(mean.to(torch.float64), input)
    sum_dy, sum_dy_xmu = dy.sum(over), (dy * centred).sum(over)
    affine = kept if weight is None else weight.dtype
    grad_weight = (sum_dy_xmu * invstd.to(torch.float64)).to(affine)
    return sum_dy.to(kept), sum_dy_xmu.to(kept), grad_weight, sum_dy.to(affine)


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Return the gradient of the input from sums over all ranks; `count` holds values a rank."""
    total = count.sum()
    scale = invstd if weight is None else invstd * weight
    slope = sum_dy_xmu / total * invstd.square()
    centred = input - _wide(mean, input)
    grad = (grad_out - _wide(sum_dy / total, input)) - centred * _wide(slope, input)
    return (grad * _wide(scale, input)).to(input.dtype)


_KERNELS: list[Any] = [
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
]
