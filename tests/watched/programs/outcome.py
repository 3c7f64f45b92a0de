"""What programs left behind, read and compared: between ranks, and with one process."""

import math

import pytest
import torch

from tests.watched.programs.bare import WRONG, hangs

PARTS = {
    "right_tensor_parallel": {"mlp.up_weight", "mlp.up_bias", "mlp.down_weight"},
    "wrong_sequence_parallel": {"up", "down"},
}
"""Parameters that are different on every rank because each has a part."""


class Runs:
    """What `bare` wrote, read when asked for."""

    def __init__(self, out, seed=0, ranks=3):
        self.ranks = ranks
        self.shared = [self.read(out / f"seed{seed}-world{ranks}", r) for r in range(ranks)]
        self.single = self.read(out / f"seed{seed}-world1", 0)
        self.own = {
            name: [
                self.read(out / f"seed{seed}-world{ranks}-{name}", r)[name] for r in range(ranks)
            ]
            for name in WRONG
            if hangs(name)
        }

    @staticmethod
    def read(folder, rank):
        return torch.load(folder / f"rank{rank}.pt", weights_only=True)

    def of(self, title):
        return [rank[title] for rank in self.shared]


def distance(a, b, leave_out=()):
    """The greatest relative distance of two tensors of the same name.

    What is next to nothing, like a gradient in which all terms cancel, is measured by the others.
    """
    assert a.keys() == b.keys()
    least = 1e-3 * max([float(v.double().norm()) for v in b.values() if v is not None] + [1e-9])
    gaps = [0.0]
    for name, value in a.items():
        if value is None or b[name] is None:
            gaps.append(0.0 if value is b[name] else math.inf)
        elif not str(name).endswith(tuple(leave_out)):
            left, right = value.double(), b[name].double()
            gaps.append(float((left - right).norm()) / max(float(right.norm()), least))
    return max(gaps)


def parameters(result, leave_out=frozenset()):
    return {n: result["final"][n] for n in result["parameters"] if n not in leave_out}


def groups_of(values):
    """Ranks by equal value."""
    groups = []
    for rank, value in enumerate(values):
        for group in groups:
            if same(values[group[0]], value):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return sorted(groups, key=len, reverse=True)


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return a is b if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) else a == b


def differing(name, results, step, kind):
    """Name -> odd ranks (none without a majority), of what is unequal there."""
    if step >= min(len(result["updates"]) for result in results):
        return {}
    rows = [result["updates"][step][kind] for result in results]
    if kind == "lr":
        rows = [{f"param_groups[{i}]['lr']": lr for i, lr in enumerate(row)} for row in rows]
    found = {}
    for key in rows[0]:
        groups = groups_of([row[key] for row in rows])
        if len(groups) > 1 and key not in PARTS.get(name, ()):
            majority = len(groups[0]) * 2 > len(rows)
            odd = (rank for group in groups[1:] for rank in group)
            found[key] = tuple(sorted(odd)) if majority else ()
    return found


def first_difference(name, results):
    """Step, phase and {tensor: odd ranks} of the first inequality between replicas."""
    for step in range(max(len(result["updates"]) for result in results)):
        if step == 0 and (start := differing(name, results, 0, "before")):
            return 0, "start", start
        for kind in ("lr", "grads"):
            if before := differing(name, results, step, kind):
                return step, "gradients", before
        if after := differing(name, results, step, "values"):
            return step, "parameters", after
    return None


def first_gap(many, single):
    """Step and phase in which a run leaves the way of one correct process."""
    for step, (a, b) in enumerate(zip(many["updates"], single["updates"], strict=False)):
        # By place: what was left by an error has no names.
        of = {k: [dict(enumerate(row[k].values())) for row in (a, b)] for k in ("grads", "values")}
        if a["lr"] != pytest.approx(b["lr"]) or distance(*of["grads"]) > 1e-3:
            return step, "gradients"
        if distance(*of["values"]) > 1e-3:
            return step, "parameters"
    return None


def same_masks(results):
    masks = [result["masks"] for result in results]
    assert all(masks)
    return all(
        torch.equal(a, b) for other in masks[1:] for a, b in zip(masks[0], other, strict=True)
    )
