"""Listens to forward and backward passes before an audited update, and keeps what a replay needs.

Between audited updates it has no hook on any module.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from harness.watch.audit.forward_pass import ForwardPass, begin, mark, output_nodes
from harness.watch.audit.loss_graph import LossGraph, loss_graph
from harness.watch.audit.trees import CannotModel, tensors
from harness.watch.instruments.call_site import call_site
from harness.watch.instruments.context import Context
from harness.watch.instruments.forward_hooks import after_forward, before_forward
from harness.watch.instruments.patches import Patches

NAME = "replay audit"
MOST_PASSES = 256
MOST_BYTES = 1 << 30
"""What is kept before one update; a script that makes more is not audited."""
_LATEST = 4
"""Updates after which the backward pass of a forward pass is no longer expected."""


@dataclass(kw_only=True)
class BackwardPass:
    """A backward pass: what it was called on, and the losses below that."""

    value: torch.Tensor | None
    at: str | None
    graph: LossGraph


@dataclass(eq=False)
class Holder:
    """A module with parameters of an optimizer: the inner one of a wrapper, or one without."""

    reference: weakref.ref[nn.Module]
    averaged: bool
    """DistributedDataParallel averages its gradients."""
    kept_gradient: bool = False
    """The window began with gradients that were left from before."""
    handles: list[Any] = field(default_factory=list)

    @property
    def module(self) -> nn.Module:
        """The module, while somebody has it."""
        module = self.reference()
        assert module is not None
        return module

    def parameters(self) -> list[nn.Parameter]:
        """Return its parameters; none where it is gone."""
        module = self.reference()
        return [] if module is None else list(module.parameters())


class Recorder:
    """What happened since the last update, as far as an audit is due."""

    def __init__(self, context: Context) -> None:
        """Listen to backward passes; to modules as soon as they are known."""
        self.holders: list[Holder] = []
        self.passes: list[ForwardPass] = []
        self.backwards: dict[int, BackwardPass] = {}
        self.reasons: list[str] = []
        """Why the update cannot be audited."""
        self.before_clip: dict[int, torch.Tensor] = {}
        """Parameter, by id -> its gradient when clipping was called first."""
        self.after_backward: dict[int, torch.Tensor] = {}
        """The same after the last backward pass, below a wrapper that synchronises in it."""
        self._context = context
        self._armed = False
        self._open: ForwardPass | None = None
        self._current: int | None = None
        self._count = 0
        self._bytes = 0
        self._patches = Patches()
        safely = context.safely
        self._patches.around(
            torch.autograd,
            "backward",
            before=safely(NAME, self._before_backward),
            after=safely(NAME, self._after_backward),
        )
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm"):
                clip = safely(NAME, self._before_clip)
                self._patches.around(owner, name, before=clip)

    def close(self) -> None:
        """Remove every hook."""
        self.arm(False)
        self._patches.close()

    def add(self, root: nn.Module, *, averaged: bool) -> None:
        """Listen to a module from now on."""
        if any(holder.reference() is root for holder in self.holders):
            return
        self.holders.append(Holder(weakref.ref(root), averaged))
        if self._armed:
            self._hook(len(self.holders) - 1)

    def arm(self, armed: bool) -> None:
        """Begin or cease to keep what happens."""
        if armed == self._armed:
            return
        self._armed = armed
        self.passes.clear()
        self.backwards.clear()
        for number, holder in enumerate(self.holders):
            if armed:
                self._hook(number)
            else:
                for handle in holder.handles:
                    handle.remove()
                holder.handles.clear()

    def forget(self, holders: Collection[int]) -> None:
        """Drop what was kept for modules whose optimizer has made its update."""
        # A pass without a backward pass so far may be meant for the next optimizer.
        self.passes = [
            one
            for one in self.passes
            if (one.gradients and one.holder not in holders)
            or (not one.gradients and one.updates < _LATEST)
        ]
        for one in self.passes:
            one.updates += 1
        used = {number for one in self.passes for number in one.gradients}
        self.backwards = {n: one for n, one in self.backwards.items() if n in used}
        for number in holders:
            self.holders[number].kept_gradient = False
        self._bytes = sum(one.nbytes() for one in self.passes)
        self.before_clip.clear()
        self.after_backward.clear()
        self.reasons.clear()
        self._open = None

    def _hook(self, number: int) -> None:
        holder = self.holders[number]
        root = holder.reference()
        waiting = [] if root is None else [("", root)]
        while waiting:
            path, module = waiting.pop()
            holder.handles += self._hooks(number, path, module)
            # What is compiled is called as a whole, and must not be compiled once more for us.
            if type(module).__name__ != "OptimizedModule":
                prefix = f"{path}." if path else ""
                waiting += [(prefix + name, part) for name, part in module.named_children()]

    def _hooks(self, number: int, path: str, module: nn.Module) -> list[Any]:
        context = self._context

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._before_forward(number, path, args, kwargs)

        def after(_: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            self._after_forward(number, path, result)

        return [
            before_forward(context, module, NAME, before),
            after_forward(context, module, NAME, after),
        ]

    def _before_forward(
        self, number: int, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # Checkpointing calls modules again from within a backward pass.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        # The same one again: its last call has raised, and the script has caught that.
        if self._open is not None and (self._open.holder, self._open.path) != (number, path):
            return
        if len(self.passes) >= MOST_PASSES or self._bytes > MOST_BYTES:
            self._cannot("there are too many forward passes, or too large ones, to be kept")
            return
        try:
            self._open = begin(number, self.holders[number].module, path, args, kwargs)
        except CannotModel as reason:
            self._cannot(str(reason))

    def _after_forward(self, number: int, path: str, result: Any) -> None:
        made = self._open
        if made is None or (made.holder, made.path) != (number, path):
            return
        if torch._C._current_graph_task_id() != -1:
            return
        self._open = None
        nodes = output_nodes(result, made.entered)
        if not nodes:
            return
        made.nodes = [node.name() for node, _ in nodes]
        made.outputs = [tensor.detach().clone() for tensor in tensors(result)]
        for place, (node, output) in enumerate(nodes):
            mark(node, output)
            self._listen(node, made, place)
        self.passes.append(made)
        self._bytes += made.nbytes()

    def _listen(self, node: Any, made: ForwardPass, place: int) -> None:
        def arrived(gradients: tuple[torch.Tensor | None, ...]) -> None:
            # torch.autograd.grad comes by as well, and changes no gradient of a parameter.
            if self._current is None:
                return
            there = made.gradients.setdefault(self._current, [None] * len(made.nodes))
            there[place] = [None if g is None else g.detach().clone() for g in gradients]

        safe = self._context.safely(NAME, arrived)
        node.register_prehook(lambda gradients: safe(gradients))

    def _before_backward(self, roots: Any, *_: Any, **__: Any) -> None:
        if not self._armed or torch._C._current_graph_task_id() != -1:
            return
        self._open = None
        # A step that a scaler has skipped was clipped as well.
        self.before_clip.clear()
        for number, holder in enumerate(self.holders):
            mine = [one for one in self.passes if one.holder == number and one.gradients]
            if _cleared(holder.parameters()):
                holder.kept_gradient = False
                for one in mine:
                    one.gradients.clear()
            elif not mine:
                holder.kept_gradient = True
        of_interest = {id(p) for holder in self.holders for p in holder.parameters()}
        made_from = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        self._current = self._count
        self._count += 1
        self.backwards[self._current] = BackwardPass(
            value=made_from[0].detach().clone() if made_from[0].numel() == 1 else None,
            at=call_site(),
            graph=loss_graph(made_from, of_interest),
        )

    def _after_backward(self, *_: Any, **__: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        self._current = None
        if self._armed:
            self.after_backward = _gradients(self.holders, averaged=True)

    def _before_clip(self, parameters: Any, *_: Any, **__: Any) -> None:
        if not self._armed or self.before_clip:
            return
        self.before_clip = _gradients(self.holders, averaged=False)

    def _cannot(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)


def _cleared(parameters: Sequence[nn.Parameter]) -> bool:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return not gradients or not any(bool(gradient.any()) for gradient in gradients)


def _gradients(holders: Sequence[Holder], *, averaged: bool) -> dict[int, torch.Tensor]:
    return {
        id(p): p.grad.detach().clone()
        for holder in holders
        if holder.averaged or not averaged
        for p in holder.parameters()
        if p.grad is not None
    }
