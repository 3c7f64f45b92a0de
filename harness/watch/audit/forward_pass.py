"""One forward pass of this rank: what it was made from, and what arrived at its outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from harness.watch.audit.loss_graph import OUTPUT
from harness.watch.audit.random_state import random_state
from harness.watch.audit.trees import changed, kept, tensors


@dataclass(eq=False, kw_only=True)
class ForwardPass:
    """A call of a module, or of a part of one, while gradients are recorded."""

    holder: int
    """Number of the module whose parameters it uses."""
    path: str
    """The part of it that was called; empty for all of it."""
    args: Any
    kwargs: Any
    evaluating: list[str]
    """Names of the modules in it that were not in training mode."""
    buffers: dict[str, torch.Tensor]
    random: dict[str, Any]
    autocast: list[tuple[str, torch.dtype]]
    version: int
    """Of all parameters together; whoever writes to one raises it."""
    entered: set[int] = field(default_factory=set)
    """Nodes that its arguments came from."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    """Kinds of the nodes that its outputs came from."""
    gradients: dict[int, list[list[torch.Tensor | None] | None]] = field(default_factory=dict)
    """Backward pass -> node -> what arrived there."""

    updates: int = 0
    """Updates of any optimizer since it was made."""

    @property
    def rows(self) -> int:
        """Length of the first dimension of the first tensor."""
        found = next((t for t in tensors([self.args, self.kwargs]) if t.dim()), None)
        return 0 if found is None else len(found)

    def nbytes(self) -> int:
        """Return how much memory it keeps."""
        held = [self.args, self.kwargs, self.outputs, self.buffers, list(self.gradients.values())]
        return sum(tensor.nbytes for tensor in tensors(held))

    def to_plain(self) -> dict[str, Any]:
        """Return it as plain containers and tensors."""
        left_out = ("entered", "version", "updates")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> ForwardPass:
        """Read what `to_plain` returned."""
        return cls(**plain, version=0)


def begin(
    holder: int, root: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ForwardPass:
    """Return what a forward pass is about to be made from.

    Raises:
        CannotModel: it is called with something that cannot be kept.
    """
    used = list(tensors([args, kwargs]))
    return ForwardPass(
        holder=holder,
        path=path,
        args=changed(args, kept),
        kwargs=changed(kwargs, kept),
        evaluating=[name for name, module in root.named_modules() if not module.training],
        buffers={name: kept(buffer) for name, buffer in root.named_buffers()},
        random=random_state(),
        autocast=[
            (kind, torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ],
        version=version(root),
        entered={id(tensor.grad_fn) for tensor in used if tensor.grad_fn is not None},
    )


def version(root: nn.Module) -> int:
    """Return a number that grows whenever a parameter is written to."""
    return sum(parameter._version for parameter in root.parameters())


def output_nodes(result: Any, entered: set[int]) -> list[tuple[Any, torch.Tensor]]:
    """Return the nodes that the outputs came from, each once, with one of its outputs.

    What was passed through unchanged is no output.
    """
    found: dict[int, tuple[Any, torch.Tensor]] = {}
    for tensor in tensors(result):
        node = tensor.grad_fn
        if node is not None and id(node) not in entered:
            found.setdefault(id(node), (node, tensor))
    return list(found.values())


def mark(node: Any, output: torch.Tensor) -> None:
    """Say in the graph itself that a forward pass ends here; nothing keeps the graph alive."""
    node.metadata[OUTPUT] = "scalar" if output.dim() == 0 else "tensor"
