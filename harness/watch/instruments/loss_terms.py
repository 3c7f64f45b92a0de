"""What a loss is made of: read from the graph that autograd has recorded, which changes nothing.

The graph says what a mean was divided by, which labels were ignored and which factors followed,
for functional losses and modules alike; where it leads into the model the reading stops.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import astuple, dataclass
from typing import Any

import torch

MOST_NODES = 48
MOST_TERMS = 8
_MOST_FACTORS = 6
_NO, _MEAN, _SUM = 0, 1, 2
"""How torch numbers reductions."""
_THROUGH = (
    "ToCopy",
    "View",
    "UnsafeView",
    "Squeeze",
    "Unsqueeze",
    "ReshapeAlias",
    "Clone",
    "Alias",
    "Stack",
    "Cat",
    "Add",
    "Sub",
    "Where",
)


@dataclass(frozen=True)
class Term:
    """A sum of losses of single units, such as tokens or samples."""

    name: str
    """The node of the graph in which it ends."""
    weight: float
    """Factor of each unit's loss in the loss that backward starts from."""
    count: float | None
    """How many units there are; None if the graph does not say."""
    factor: float
    """What a mean was multiplied by; the same as the weight for a sum."""
    mean: bool
    weighted: bool
    """Units have weights of their own, such as those of classes."""
    by: tuple[tuple[str, float], ...] = ()
    """What the loss was multiplied and divided by on the way, the last one first."""


def terms(loss: torch.Tensor) -> list[tuple[Any, ...]]:
    """Return the terms of a loss as JSON can hold them, at most a few."""
    found: list[Term] = []
    ahead: deque[tuple[Any, _Path]] = deque([(loss.grad_fn, _Path())])
    for _ in range(MOST_NODES):
        if not ahead or len(found) >= MOST_TERMS:
            break
        node, path = ahead.popleft()
        if node is None:
            continue
        name = _name(node)
        if name in ("Mul", "Div"):
            by = _scalar(node)
            if by == 0.0:
                continue
            if by is None:
                found.append(_uncounted(name, path))
                continue
            path = path.then(name, by)
        elif name == "Neg":
            path = path.then("Mul", -1.0)
        elif name == "Mean" and int(getattr(node, "_saved_self_sym_numel", 0)) == 1:
            pass
        elif name not in _THROUGH:
            found.append(_term(node, name, path))
            continue
        ahead.extend((following, path) for following, _ in node.next_functions)
    return [astuple(term) for term in found if math.isfinite(term.weight)]


def of_probabilities(loss: torch.Tensor) -> bool:
    """Say whether a cross entropy in the loss takes the log_softmax of a softmax's output."""
    ahead: deque[Any] = deque([loss.grad_fn])
    for _ in range(MOST_NODES):
        if not ahead:
            break
        node = ahead.popleft()
        name = _name(node)
        if name.startswith("NllLoss"):
            logits = _behind(node, "LogSoftmax")
            if logits is not None and _behind(logits, "Softmax") is not None:
                return True
        elif name in _THROUGH or name in ("Mul", "Div", "Neg", "Mean"):
            ahead.extend(following for following, _ in node.next_functions)
    return False


def _behind(node: Any, wanted: str) -> Any:
    """Return the first input of a node if it is of that name, past casts and other shapes."""
    for _ in range(_MOST_FACTORS):
        node = node.next_functions[0][0] if node.next_functions else None
        if _name(node) == wanted:
            return node
        if _name(node) not in (*_THROUGH, "Transpose", "Permute"):
            return None
    return None


def _name(node: Any) -> str:
    if node is None:
        return ""
    return str(node.name()).rpartition("::")[2].partition("Backward")[0].lstrip("_")


@dataclass(frozen=True)
class _Path:
    """The factors between a loss and a node of its graph."""

    factor: float = 1.0
    by: tuple[tuple[str, float], ...] = ()

    def then(self, name: str, by: float) -> _Path:
        factor = self.factor * by if name == "Mul" else self.factor / by
        return _Path(factor, (*self.by, (name, by))[:_MOST_FACTORS])


def _uncounted(name: str, path: _Path) -> Term:
    return Term(name, path.factor, None, path.factor, False, False, path.by)


def _term(node: Any, name: str, path: _Path) -> Term:
    factor, by = path.factor, path.by
    if name == "Mean" and hasattr(node, "_saved_self_sym_numel"):
        count = float(node._saved_self_sym_numel)
        return Term(name, factor / count, count, factor, True, False, by)
    if name == "Sum" and hasattr(node, "_saved_self_sym_sizes"):
        count = float(math.prod(node._saved_self_sym_sizes))
        return Term(name, factor, count, factor, False, False, by)
    reduction = getattr(node, "_saved_reduction", None)
    if reduction not in (_MEAN, _SUM):
        return _uncounted(name, path)
    weighted = False
    if name.startswith("NllLoss"):
        total = _saved(node, "total_weight")
        weighted = _saved(node, "weight") is not None
        found = None if total is None else float(total.tolist())
    else:
        of = _saved(node, "self")
        found = None if of is None else float(of.numel())
    if reduction == _SUM:
        return Term(name, factor, found, factor, False, weighted, by)
    weight = factor / found if found else math.nan
    return Term(name, weight, found, factor, True, weighted, by)


def _scalar(node: Any) -> float | None:
    """Return the number that a node multiplies or divides by, if it is one."""
    # What a division keeps of the numerator is no factor.
    for name in ("other", "self") if "Mul" in node.name() else ("other",):
        kept = _saved(node, name)
        if isinstance(kept, torch.Tensor):
            # Unlike `item`, this is no operation that a dispatch mode of the user's would see.
            number: Any = kept.tolist() if kept.dim() == 0 else None
            return None if number is None else float(number)
        if isinstance(kept, int | float):
            return float(kept)
    return None


def _saved(node: Any, name: str) -> Any:
    """Return what a node has kept; None where that would run a hook of the user's."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if getattr(raw, "unpack_hook", None) is not None:
        return None
    return getattr(node, f"_saved_{name}", None)
