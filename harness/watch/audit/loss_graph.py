"""How much each row of a loss weighs, read from the graph that the loss was computed with.

Whatever a script calls, its loss ends in a few kinds of nodes which reduce many numbers to one. A
node knows how many it reduces, and the gradient that arrives at it in the script's own backward
pass is the factor that the script gave to it. No function of torch has to be replaced for that.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

OUTPUT = "crossrank output"
"""Key in the metadata of a node that a recorded forward pass ended in."""
_MOST = 20_000
"""Nodes between a loss and the outputs of the model; a graph with more is given up."""
_NONE, _MEAN, _SUM = 0, 1, 2
_HOW = {_NONE: "none", _MEAN: "mean", _SUM: "sum"}
_LOSSES = frozenset(
    f"{name}Backward0"
    for name in (
        "NllLoss",
        "NllLoss2D",
        "MseLoss",
        "SmoothL1Loss",
        "HuberLoss",
        "BinaryCrossEntropy",
        "BinaryCrossEntropyWithLogits",
        "SoftMarginLoss",
        "MultiMarginLoss",
        "MultilabelMarginLoss",
    )
)
_OF_LOSSES = ("StackBackward0", "CatBackward0")
"""What is reduced above these are losses already."""


@dataclass(eq=False)
class Reduction:
    """A node that turns many numbers into one loss, or a loss for each of many rows."""

    kind: str
    how: str
    """mean, sum, or none (a loss for each row)."""
    count: float
    """Rows that count; for class weights, the sum of the weights; nan where a node cannot tell."""
    above: bool = False
    """There is a loss for each row below it, which says more as long as all rows weigh alike."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """What arrived at it."""

    def weight(self) -> tuple[float, float, bool]:
        """Return the weight of each row that counts, how many count, and whether all weigh alike.

        The weight is the derivative of what backward was called on by the row's own loss.
        """
        if not self.gradients:
            return 0.0, self.count, True
        arrived = torch.stack([g.detach().double() for g in self.gradients]).sum(0)
        if self.how != "none":
            factor = float(arrived)
            if self.how == "mean":
                factor = factor / self.count if self.count else 0.0
            return factor, self.count, True
        rows = arrived[arrived != 0]
        if not rows.numel():
            return 0.0, 0.0, True
        low, high = float(rows.min()), float(rows.max())
        alike = high - low <= 1e-5 * max(abs(low), abs(high))
        return float(rows.mean()), float(rows.numel()), alike


@dataclass(kw_only=True)
class LossGraph:
    """What lies between a scalar and the outputs of the forward passes that it was made from."""

    reductions: list[Reduction]
    past: bool
    """Parameters are reached without passing an output, such as by a penalty on them."""
    complete: bool
    """False where the graph was too large to be walked through."""


def loss_graph(roots: Iterable[torch.Tensor], parameters: Collection[int]) -> LossGraph:
    """Walk from what backward is called on to the outputs; listen at the nodes that reduce.

    Args:
        roots: the tensors that backward is called on.
        parameters: ids of the parameters in question.
    """
    found = LossGraph(reductions=[], past=False, complete=True)
    starts = [root.grad_fn for root in roots if root.grad_fn is not None]
    scalars: list[Any] = []
    order, found.complete = _postorder(starts, lambda node: OUTPUT not in node.metadata)
    covers: set[int] = set()
    rows: set[int] = set()
    for node in order:
        parents = [id(parent) for parent, _ in node.next_functions]
        mark = node.metadata.get(OUTPUT)
        if mark is not None:
            scalars += [node] if mark == "scalar" else []
            continue
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.past |= id(variable) in parameters
        elif node.name() in _LOSSES:
            found.reductions += (known := _listening(node))
            into = rows if all(one.how == "none" for one in known) else covers
            into.add(id(node))
        else:
            covers |= {id(node)} if any(p in covers for p in parents) else set()
            rows |= {id(node)} if any(p in rows for p in parents) else set()
    # A mean of losses is no loss; what has no loss of torch's below it is one by itself.
    covers.update(id(node) for node in order if OUTPUT in node.metadata)
    found.reductions += _outermost(starts, covers, above=rows)
    found.reductions += _outermost(scalars, set(), losses=True)
    return found


def _outermost(
    starts: list[Any],
    covers: set[int],
    *,
    above: Collection[int] = (),
    losses: bool = False,
) -> list[Reduction]:
    """Return the first nodes below `starts` that reduce to one number, no deeper ones.

    Args:
        starts: nodes to begin with.
        covers: nodes that are no reduction themselves, as they have a loss of torch's below.
        above: nodes with a loss of torch's for each row below.
        losses: losses of torch's count too, wherever they are.
    """
    found: list[Reduction] = []
    seen: set[int] = set()
    keep: list[Any] = []
    waiting = list(reversed(starts))
    while waiting and len(keep) < _MOST:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        keep.append(node)
        if id(node) not in covers and (losses or node.name() not in _LOSSES):
            one = _listening(node)
            for reduction in one:
                reduction.above = id(node) in above
            found += one
            if one:
                continue
        elif OUTPUT in node.metadata or node.name() in _LOSSES:
            continue
        waiting += [parent for parent, _ in reversed(node.next_functions) if parent is not None]
    return found


def _postorder(starts: list[Any], deeper: Callable[[Any], bool]) -> tuple[list[Any], bool]:
    """Return the nodes below, each after those that it was computed from."""
    order: list[Any] = []
    seen: set[int] = set()
    stack: list[tuple[Any, bool]] = [(node, False) for node in reversed(starts)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if id(node) in seen:
            continue
        if len(seen) >= _MOST:
            return order, False
        seen.add(id(node))
        stack.append((node, True))
        if deeper(node):
            stack += [(p, False) for p, _ in reversed(node.next_functions) if p is not None]
    return order, True


def _listening(node: Any) -> list[Reduction]:
    """Return the reduction that a node makes, if it makes one, listening to what arrives there."""
    try:
        reduction = _reduction(node)
    except (AttributeError, RuntimeError):
        # Another version of torch may save less; backward may have freed what was saved.
        return []
    if reduction is None:
        return []

    def arrived(gradients: tuple[torch.Tensor | None, ...]) -> None:
        if gradients[0] is not None:
            reduction.gradients.append(gradients[0].detach().clone())

    node.register_prehook(arrived)
    return [reduction]


def _reduction(node: Any) -> Reduction | None:
    name = node.name()
    if name in _LOSSES:
        return _known(node, name)
    if any(p is not None and p.name() in _OF_LOSSES for p, _ in node.next_functions):
        return None
    if name == "MeanBackward0":
        return Reduction("mean", "mean", float(node._saved_self_sym_numel))
    if name == "MeanBackward1" and len(node._saved_dim) in (0, len(_sizes(node))):
        return Reduction("mean", "mean", float(math.prod(_sizes(node))))
    if name == "SumBackward0":
        return Reduction("sum", "sum", _summed(node))
    return None


def _known(node: Any, name: str) -> Reduction:
    how = _HOW[node._saved_reduction]
    kind = name.removesuffix("Backward0")
    if not kind.startswith("NllLoss"):
        return Reduction(kind, how, float(node._saved_self.numel()))
    if how == "mean":
        return Reduction(kind, how, float(node._saved_total_weight))
    target, ignored = node._saved_target, node._saved_ignore_index
    # A negative number comes back as one without a sign.
    counted = target != (ignored - 2**64 if ignored >= 2**63 else ignored)
    weights = node._saved_weight
    if weights is None:
        return Reduction(kind, how, float(counted.sum()))
    return Reduction(kind, how, float(weights[target[counted]].sum()))


def _sizes(node: Any) -> tuple[int, ...]:
    return tuple(node._saved_self_sym_sizes)


def _summed(node: Any) -> float:
    """Return how many numbers are summed, without those that a mask has set to zero."""
    count = float(math.prod(_sizes(node)))
    for parent, _ in node.next_functions:
        if parent is None or parent.name() != "MulBackward0":
            continue
        for name in ("_saved_other", "_saved_self"):
            with contextlib.suppress(RuntimeError, AttributeError):
                mask = getattr(parent, name)
                if mask is None or mask.requires_grad or mask.numel() != count:
                    continue
                if mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all()):
                    return float((mask != 0).sum())
    return count
