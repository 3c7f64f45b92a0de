"""Runs the forward and backward passes of all ranks once more, in this process, on a copy.

Nothing of the program is touched: neither its modules, nor its gradients, nor its random numbers,
and no message is sent. Each pass of each rank is run with the buffers and the random numbers that
it had there, so that dropout drops the same and batch norm sees the same rows.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.watch.audit.forward_pass import ForwardPass, output_nodes
from harness.watch.audit.one_batch import Weighted, one_batch
from harness.watch.audit.random_state import random_state, set_random_state, undisturbed
from harness.watch.audit.trees import CannotModel, changed, tensors
from harness.watch.audit.variation import Variation, common_length, permuted

_MESSAGES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "c10d_functional")
_SAME = 1e4
"""Epsilons by which the outputs may differ from those recorded."""

Name = tuple[int, str]
"""Number of the module and name of the parameter in it."""


class _NoMessages(TorchDispatchMode):
    """Raises where something is about to be sent: the other ranks are elsewhere."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in _MESSAGES:
            raise CannotModel(f"the model communicates with the other ranks ({func})")
        return func(*args, **(kwargs or {}))


class Replay:
    """Copies of the modules whose gradients are to be had again."""

    def __init__(self, roots: Mapping[int, nn.Module]) -> None:
        """Copy the modules as they are.

        Raises:
            CannotModel: a module cannot be copied.
        """
        self._roots = roots
        self._copies: dict[int, nn.Module] = {}
        for number, root in roots.items():
            try:
                self._copies[number] = copy.deepcopy(root)
            except Exception as error:
                raise CannotModel(f"{type(root).__name__} cannot be copied: {error}") from error
            _strip(self._copies[number])
        self._parameters: dict[Name, torch.Tensor] = {
            (number, name): parameter
            for number, made in self._copies.items()
            for name, parameter in made.named_parameters()
        }
        self.random = False
        """Whether a forward pass drew random numbers."""
        self.batch_norm = False
        """Whether rows of a batch had an influence on each other through batch norm."""
        self.rows_permute = True
        """Whether other orders of the rows give the same rows in that order, as far as tried."""

    def gradients(
        self,
        passes: Sequence[Weighted],
        variation: Variation | None = None,
    ) -> tuple[dict[Name, torch.Tensor], dict[Name, torch.Tensor]]:
        """Return the sum of the gradients of all passes, as they were and each times its factor.

        The second is the first where all factors are 1, or the rounding is varied.

        Args:
            passes: forward passes with the number of the backward pass and its factor.
            variation: what to change in the rounding.

        Raises:
            CannotModel: something in a forward pass cannot be had again.
        """
        self._load(variation)
        plain: dict[Name, torch.Tensor] = {}
        weighted: dict[Name, torch.Tensor] = {}
        uneven = variation is None and any(factor != 1.0 for _, _, factor in passes)
        order = range(len(passes))
        if variation is not None:
            order = variation.order(len(passes), 0).tolist()  # type: ignore[assignment]
        # What the first replay has not sent the others will not send either.
        guard = _NoMessages() if variation is None else contextlib.nullcontext()
        with undisturbed(), torch.enable_grad(), _eager(), guard:
            for place in order:
                one, backward, factor = passes[place]
                self._run_in_some_order(one, backward, variation, place + 1)
                self._collect(plain, weighted if uneven else None, factor)
        return plain, weighted if uneven else plain

    def at_once(self, passes: Sequence[Weighted]) -> dict[Name, torch.Tensor]:
        """Return the gradients of one pass over the rows of all passes, each times its factor.

        Raises:
            CannotModel: the passes cannot be put together.
        """
        if self.random:
            raise CannotModel("the forward pass draws random numbers")
        whole = one_batch(passes)
        self._load(None)
        found: dict[Name, torch.Tensor] = {}
        with undisturbed(), torch.enable_grad(), _eager():
            self._run(*whole[:2], None, check=False)
            self._collect(found, None, 1.0)
        return found

    def _load(self, variation: Variation | None) -> None:
        with torch.no_grad():
            for number, root in self._roots.items():
                for place, (name, parameter) in enumerate(root.named_parameters()):
                    value = parameter if variation is None else variation.nudged(parameter, place)
                    self._parameters[number, name].copy_(value)
                    self._parameters[number, name].grad = None

    def _run_in_some_order(
        self, one: ForwardPass, backward: int, variation: Variation | None, place: int
    ) -> None:
        # The rows that dropout spares are chosen by their place.
        if variation is None or not self.rows_permute or self.random or not variation.seed % 2:
            self._run(one, backward, variation)
            return
        length = common_length(one, backward)
        if length is None:
            self.rows_permute = False
            self._run(one, backward, variation)
            return
        order = variation.order(length, place)
        try:
            self._run(permuted(one, backward, order), backward, variation)
        except CannotModel:
            # A dimension of the same length that is not the rows, such as that of a mask.
            self.rows_permute = False
            for parameter in self._parameters.values():
                parameter.grad = None
            self._run(one, backward, variation)

    def _run(
        self,
        one: ForwardPass,
        backward: int,
        variation: Variation | None,
        *,
        check: bool = True,
    ) -> None:
        root = self._copies[one.holder]
        evaluating = set(one.evaluating)
        for name, module in root.named_modules():
            module.training = name not in evaluating
            norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            self.batch_norm |= norm and module.training
        with torch.no_grad():
            for name, buffer in root.named_buffers():
                if name in one.buffers:
                    buffer.copy_(one.buffers[name])
        device = next(iter(root.parameters())).device
        args, kwargs = _inputs(one, device, variation)
        module = root.get_submodule(one.path)
        set_random_state(one.random)
        with _autocast(one.autocast):
            result = module(*args, **kwargs)
        self.random |= not _untouched(one.random)
        if check:
            _check(one, result)
        nodes = output_nodes(result, {id(t.grad_fn) for t in tensors([args, kwargs]) if t.grad_fn})
        # A compiled module has nodes of other names.
        if len(nodes) != len(one.nodes):
            raise CannotModel("the forward pass, run again, computes something else")
        arrived = one.gradients[backward]
        starts = []
        for (node, output), gradients in zip(nodes, arrived, strict=True):
            if gradients is None:
                continue
            _substitute(node, [None if g is None else g.to(output.device) for g in gradients])
            starts.append(output)
        torch.autograd.backward(starts, [torch.zeros_like(output) for output in starts])

    def _collect(
        self,
        plain: dict[Name, torch.Tensor],
        weighted: dict[Name, torch.Tensor] | None,
        factor: float,
    ) -> None:
        for name, parameter in self._parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            if weighted is not None:
                part = gradient * factor
                weighted[name] = weighted[name].add_(part) if name in weighted else part
            # In the precision of the program, as a sum in a finer one would hide its rounding.
            plain[name] = plain[name].add_(gradient) if name in plain else gradient


def _eager() -> contextlib.AbstractContextManager[object]:
    """Let nothing be compiled: it would take the place of what the program has compiled."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def _strip(module: nn.Module) -> None:
    """Take away hooks of the program, which may have effects outside; leave those of torch."""
    for part in module.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                if not type(hook).__module__.startswith("torch.nn.utils"):
                    del hooks[key]
        part._backward_hooks.clear()
        part._backward_pre_hooks.clear()
    for parameter in module.parameters():
        parameter.grad = None


def _inputs(
    one: ForwardPass, device: torch.device, variation: Variation | None
) -> tuple[Any, dict[str, Any]]:
    places = iter(range(1, 1_000_000))

    def own(tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
        return value if variation is None else variation.nudged(value, next(places))

    return changed(one.args, own), changed(one.kwargs, own)


def _substitute(node: Any, gradients: list[torch.Tensor | None]) -> None:
    """Let what arrived there in the program arrive here, whatever does."""
    node.register_prehook(lambda _: tuple(gradients))


def _untouched(state: dict[str, Any]) -> bool:
    now = random_state()
    same = all(torch.equal(now[k], state[k]) for k in ("torch", "cuda") if k in state and k in now)
    return same and all(now[k] == state[k] for k in ("python", "numpy") if k in state and k in now)


def _check(one: ForwardPass, result: Any) -> None:
    again = list(tensors(result))
    if len(again) != len(one.outputs):
        raise CannotModel("the forward pass, run again, returns something else")
    for new, old in zip(again, one.outputs, strict=True):
        if new.shape != old.shape or not old.is_floating_point():
            continue
        before = old.double().to(new.device)
        distance = float((new.detach().double() - before).norm())
        size = float(before.norm())
        if distance > _SAME * torch.finfo(old.dtype).eps * size:
            raise CannotModel(
                "the forward pass, run again, gives another output: it depends on something "
                f"outside of its arguments (relative distance {distance / (size or 1):.2g})"
            )


@contextlib.contextmanager
def _autocast(states: list[tuple[str, torch.dtype]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for kind, dtype in states:
            # Casts that are kept would be those of the parameters before the next variation.
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        yield
