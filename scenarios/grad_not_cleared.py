"""Without zero_grad: gradients add up in place, so that values grow and memory does not.

backward adds to the gradient that is there. The update is made from the sum of all gradients so
far, and training goes wrong; but the sum takes the place of one, and not a byte is added. What does
grow is a list of outputs that are kept with their graph, every one of which holds its activations.
From an article that gives running out of memory as the symptom.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, matches, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/grad_not_cleared.yaml."""

    steps: int = field(metadata=at_least(3))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


class Saved:
    """An activation that a graph holds; `held` counts the bytes of all that are alive."""

    held = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        """Take the activation over from the graph, which keeps this instead."""
        # Detached, or what an operation gave would hold the graph that holds it.
        self.tensor = tensor.detach()
        Saved.held += tensor.nbytes

    def __del__(self) -> None:
        """Count it off once the graph lets it go."""
        Saved.held -= self.tensor.nbytes


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train and count the bytes that the loop holds; arms differ in what it never lets go."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from scenarios._models import gradients, net, rows, weights

    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    kept: list[torch.Tensor] = []
    with saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        for step in range(p.steps):
            if arm["clears"] == "first":
                optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            rank.log(step=step, norm=gradients(model).norm())
            optimizer.step()
            if arm.get("keeps") == "graph":
                kept.append(model(x))
            elif arm.get("keeps") == "values":
                kept.append(model(x).detach())
            tensors = [*model.parameters(), *(w.grad for w in model.parameters())]
            rank.log(step=step, bytes=Saved.held + sum(t.nbytes for t in tensors if t is not None))
            if arm["clears"] == "last":
                optimizer.zero_grad()
    rank.snapshot(step=p.steps - 1, weights=weights(model))


def grows(t: Tables, arm: str) -> Finding:
    """Decide: after the last step more bytes are held than after the first."""
    t.require(arm)
    held = list(t.series(arm, "bytes").values())
    reason = f"{arm}: {held[0]} bytes are held after the first step, {held[-1]} after the last"
    return (holds if held[-1] > held[0] else refuted)(
        reason, effect=float(held[-1] - held[0]), unit="bytes", evidence={"most": max(held)}
    )


@symptom(REFUTED, settles="B56")
def memory_grows(t: Tables) -> Finding:
    """Without zero_grad memory grows from step to step."""
    return grows(t, "never")


@symptom(HOLDS, settles="~B56")
def trains_otherwise(t: Tables) -> Finding:
    """Without zero_grad the weights become others: every update is of the sum of all gradients."""
    return negated(matches(t, "never", "first", "weights"))


@mechanism(HOLDS)
def kept_graphs_grow(t: Tables) -> Finding:
    """Outputs that are kept with their graph make memory grow, by the same bytes at every step."""
    held = list(t.series("keeps", "bytes").values())
    by = {later - earlier for earlier, later in pairwise(held)}
    return all_of(grows(t, "keeps"), (holds if len(by) == 1 else refuted)(f"by {by} a step"))


@remedy(HOLDS)
def clears_last(t: Tables) -> Finding:
    """zero_grad after the step does as well as before the forward pass."""
    return all_of(matches(t, "last", "first", "weights"), negated(grows(t, "last")))


@remedy(HOLDS)
def detached(t: Tables) -> Finding:
    """Outputs that are kept detached hold no graph, and nothing of its memory."""
    return all_of(matches(t, "detaches", "first", "weights"), negated(grows(t, "detaches")))


SCENARIO = Scenario(
    title="Without zero_grad gradients grow in value, not in memory; kept graphs grow in memory",
    family="gradients",
    cause="gradients_not_cleared",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        memory_grows=("memory grows without zero_grad", "not a byte is added without zero_grad"),
        trains_otherwise=("the training goes wrong", "the training is the same"),
        kept_graphs_grow=("kept graphs are what grows", "kept graphs do not grow either"),
    ),
    arms=(
        one_process("zero_grad() first", name="first", clears="first"),
        faulty("never", "no zero_grad", ranks=1, clears="never"),
        fixed("last", "zero_grad() last", ranks=1, clears="last"),
        control("keeps", "outputs kept with graph", ranks=1, clears="first", keeps="graph"),
        control("detaches", "outputs kept, detached", ranks=1, clears="first", keeps="values"),
    ),
    claims=(memory_grows, trains_otherwise, kept_graphs_grow, clears_last, detached),
)
