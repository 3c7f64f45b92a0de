"""Backward passes: how many between two updates, from which loss, on gradients in which state."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import ALL_OF, Context
from harness.watch.instruments.patches import Patches
from harness.watch.modules import local_part, parameters_of

_ELEMENTS = 16


class _Gradient:
    """The gradient of one parameter of an optimizer, looked at between backward passes."""

    def __init__(self, number: int, parameter: torch.Tensor) -> None:
        self.name = f"gradients of optimizer {number}"
        self.parameter = weakref.ref(parameter)
        self.before_backward = "none"
        """Its state when the backward pass began that is under way."""
        self._seen: tuple[int, int] | None = None
        self.stays = False
        """Whether nothing took it away before the last backward pass."""
        self._began_with: list[float] | None = None
        self._parameter_was: list[float] | None = None
        """The first elements of the parameter after the last backward pass, while they are read."""
        self._was_something = False
        self._zeroed = False
        """Whether it was all zeros at the last update that was looked at closely."""

    def look(self) -> None:
        """Remember it as it is."""
        self._seen = self._now()
        self._began_with = None

    def look_closer(self) -> None:
        """Remember its first elements too: `grad.data.mul_(0.9)` raises no version."""
        self.look()
        self._began_with = self._first_elements()

    def look_at_parameter(self) -> None:
        """Remember the parameter as this backward pass has left it."""
        self._parameter_was = self._elements(self.parameter())

    def forget_parameter(self) -> None:
        """Compare it with nothing: an update was made."""
        self._parameter_was = None

    def state(self) -> str:
        """Say what happened to it since: none (taken away), used, elsewhere, touched, or kept."""
        now = self._now()
        if now is not None:
            return "kept" if now == self._seen else "touched"
        parameter = self.parameter()
        if parameter is not None and hasattr(parameter, "device_mesh"):
            # Fully sharded: what is added up without a reduction is kept in whole tensors.
            return "elsewhere"
        if self.parameter_changed():
            # As the first of two passes that look around a point: it was not to be added to.
            return "used"
        return "none"

    def parameter_changed(self) -> bool:
        """Say whether the parameter was written since the last backward pass, as far as is known.

        `p.data` raises no version.
        """
        was = self._parameter_was
        return was is not None and was != self._elements(self.parameter())

    def _now(self) -> tuple[int, int] | None:
        parameter = self.parameter()
        gradient = None if parameter is None else parameter.grad
        # Whoever writes to a tensor raises its version.
        return None if gradient is None else (id(gradient), gradient._version)

    def look_for_zeros(self) -> None:
        """Remember whether the backward pass has left anything but zeros."""
        gradient = self._gradient()
        self._was_something = gradient is not None and bool(gradient.any())

    def was_zeroed(self, *, closely: bool) -> bool:
        """Say whether zeros were written to it since, where backward had left something.

        Args:
            closely: look at what was not zeroed the last time, too.
        """
        if closely or self._zeroed:
            gradient = self._gradient()
            written = gradient is not None and self.state() == "touched"
            known = self._was_something or not closely
            self._zeroed = bool(written and known and gradient is not None and not gradient.any())
        return self._zeroed

    def changed_unseen(self) -> bool:
        """Say whether it was written through `grad.data`, which raises no version."""
        gradient = self._gradient()
        if gradient is None:
            return False
        other = self._began_with is not None and self._first_elements() != self._began_with
        return other or not gradient.any()

    def _gradient(self) -> torch.Tensor | None:
        parameter = self.parameter()
        gradient = None if parameter is None else parameter.grad
        return None if gradient is None or gradient.layout != torch.strided else gradient

    def _first_elements(self) -> list[float] | None:
        gradient = self._gradient()
        if gradient is None:
            return None
        return self._elements(gradient)

    @staticmethod
    def _elements(tensor: torch.Tensor | None) -> list[float] | None:
        if tensor is None or tensor.layout != torch.strided:
            return None
        elements: list[float] = local_part(tensor).detach().reshape(-1)[:_ELEMENTS].tolist()
        return elements


class _Without:
    """The parameters of an optimizer whose last update found no gradient at all."""

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        self._held = [weakref.ref(parameter) for parameter in held]
        self._began_with = self._beginnings()

    def has_gradient(self) -> bool:
        return any((p := one()) is not None and p.grad is not None for one in self._held)

    def unchanged(self) -> bool:
        """Say whether no script has made the update by hand: `p.data` raises no version.

        On a GPU this waits for it: ask only where no gradient is left of those that there were.
        """
        now = self._beginnings()
        same = len(now) == len(self._began_with)
        return same and all(map(torch.equal, now, self._began_with))

    def _beginnings(self) -> list[torch.Tensor]:
        alive = [p for one in self._held[:_ELEMENTS] if (p := one()) is not None]
        return [local_part(p).detach().reshape(-1)[:_ELEMENTS].clone() for p in alive]


class Backward:
    """Observes `torch.autograd.backward`, through which `Tensor.backward` goes as well."""

    def __init__(self, context: Context) -> None:
        """Put a function around torch's own."""
        self._context = context
        self._patches = Patches()
        self._gradients: dict[int, _Gradient] = {}
        self._without: dict[int, _Without] = {}
        """Optimizers of torch's own whose last update found no gradient at all."""
        self._patches.around(
            torch.autograd,
            "backward",
            before=context.safely("backward passes", self._before),
            after=context.safely("backward passes", self._after),
        )

    def close(self) -> None:
        """Put torch's own function back."""
        self._patches.close()

    def before_update(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Note an update without a gradient, or from zeros, although backward had left some."""
        known, window = self._without.get(number), self._context.window
        if known is not None and window.so_far().get(_left_for(number)):
            cleared = not known.has_gradient() and known.unchanged()
        else:
            cleared = self._zeroed(number, optimizer)
        if cleared:
            window.count(f"cleared_before_step of optimizer {number}")

    def _zeroed(self, number: int, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether zeros were written to all gradients since the last backward pass."""
        known = self._gradients.get(number)
        if known is None or optimizer._optimizer_step_pre_hooks or not self._may_read(known):
            return False
        closely = self._context.window.is_sparse(self._context.updates)
        if not known.was_zeroed(closely=closely) or known.parameter_changed():
            return False
        # One parameter may be frozen in this way, and the others not.
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        plain = [local_part(g) for g in gradients if g.layout == torch.strided]
        return len(plain) == len(gradients) and not any(bool(g.any()) for g in plain)

    def after_update(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Remember the gradients that an update was made from."""
        self._without.pop(number, None)
        known = self._gradients.get(number)
        if known is None or (parameter := known.parameter()) is None or parameter.grad is None:
            held = parameters_of(optimizer)
            first = next((p for p in held if p.grad is not None), None)
            if first is None:
                # Other classes may take gradients from elsewhere, and so may a hook bring them.
                own = type(optimizer).__module__.startswith("torch.optim.")
                if own and not optimizer._optimizer_step_pre_hooks:
                    self._without[number] = _Without(held)
                return
            known = self._gradients[number] = _Gradient(number, first)
        known.forget_parameter()
        # Where nothing takes the gradients away, whether somebody shrinks them is worth a look.
        if known.stays and self._may_read(known):
            known.look_closer()
        else:
            known.look()

    def _before(self, tensors: Any, *_: Any, **__: Any) -> None:
        window = self._context.window
        window.count("backwards")
        if torch._C._current_graph_task_id() >= 0:
            # A reentrant checkpoint makes one inside the backward pass that reaches it.
            window.count("backwards_inside_backward")
        for number, reference in self._context.wrappers.items():
            wrapper = reference()
            if wrapper is not None and not wrapper.require_backward_grad_sync:
                window.count(f"backwards_without_sync of module {number}")
        for gradient in self._gradients.values():
            state = gradient.state()
            gradient.stays = state != "none"
            if state == "kept" and not window.has(gradient.name) and self._may_read(gradient):
                state = "touched" if gradient.changed_unseen() else state
            gradient.before_backward = state
        if self._context.updates < ALL_OF:
            window.add("backward_at", call_site())
        loss = loss_of(tensors)
        if loss is not None and (loss.is_cpu or window.is_sparse(self._context.updates)):
            window.add("losses", float(loss.item()))

    def _may_read(self, gradient: _Gradient) -> bool:
        parameter = gradient.parameter()
        sparse = self._context.window.is_sparse(self._context.updates)
        return parameter is not None and (parameter.is_cpu or sparse)

    def _after(self, *_: Any, **__: Any) -> None:
        updates = self._context.updates
        sparse, early = self._context.window.is_sparse(updates), updates < ALL_OF
        for gradient in self._gradients.values():
            state = gradient.before_backward
            # Made from other gradients, such as a part of them, after backward: nothing was added.
            if state == "kept" and gradient.state() == "kept":
                state = "touched"
            self._context.window.add(gradient.name, state)
            gradient.look()
            if (sparse or early) and self._may_read(gradient):
                if sparse:
                    gradient.look_for_zeros()
                if early:
                    gradient.look_at_parameter()
        for number, known in self._without.items():
            if known.has_gradient():
                self._context.window.count(_left_for(number))


def _left_for(number: int) -> str:
    """Return the name of the counter of backward passes that leave an optimizer gradients."""
    return f"backwards_with_gradients of optimizer {number}"


def loss_of(tensors: Any) -> torch.Tensor | None:
    """Return the one number that backward starts from, if that is what it was given."""
    if isinstance(tensors, list | tuple):
        tensors = tensors[0] if len(tensors) == 1 else None
    if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
        return tensors
    return None
