"""Clearing gradients: where zero_grad stands does not matter, zeros instead of None do.

First or last in the loop is the same to the last bit; between backward and step nothing is ever
learned. A bare zero_grad() has set gradients to None since torch 2.0, and an optimizer skips a
parameter without a gradient. With set_to_none=False the gradient is zero, and a zero gradient is
still a step for momentum, weight decay and Adam: a head that sits idle drifts away. From an
article whose comment says that its zero_grad() avoids set_to_none, and which gives two orders.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, reference
from harness.claims import HOLDS, REFUTED, cost, mechanism, symptom
from harness.findings import repeats_records, says, stands_still
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

OPTIMIZERS = ("momentum", "weight_decay", "adam", "adamw")


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/zero_grad_modes.yaml."""

    steps: int = field(metadata=at_least(2))
    idle: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train two heads, then only the first of them; where and how gradients are cleared differs."""
    import torch

    from scenarios._models import FEATURES, mlp, rows, weights

    x, y = rows(rank, 32)
    for number, name in enumerate(OPTIMIZERS):
        draw = rank.generator("heads")
        heads = torch.nn.ModuleList(mlp((FEATURES, 8, 1), generator=draw) for _ in range(2))
        heads.to(rank.device)
        held = list(heads.parameters())
        optimizer: torch.optim.Optimizer = {
            "momentum": torch.optim.SGD(held, lr=p.lr, momentum=0.9),
            "weight_decay": torch.optim.SGD(held, lr=p.lr, weight_decay=0.1),
            "adam": torch.optim.Adam(held, lr=p.lr),
            "adamw": torch.optim.AdamW(held, lr=p.lr),
        }[name]
        for step in range(p.steps + p.idle):
            if step == p.steps:
                left = weights(heads[1])
            if arm["clears"] == "first":
                optimizer.zero_grad()
            elif arm["clears"] == "first_to_zeros":
                optimizer.zero_grad(set_to_none=False)
            used = heads if step < p.steps else heads[:1]
            torch.stack([(head(x) - y).square().mean() for head in used]).sum().backward()
            if arm["clears"] == "between":
                optimizer.zero_grad()
            optimizer.step()
            if arm["clears"] == "last":
                optimizer.zero_grad()
            at = number * (p.steps + p.idle) + step
            rank.snapshot(step=at, weights=weights(heads))
            rank.log(step=at, without=sum(w.grad is None for w in heads[1].parameters()))
        rank.log(step=number, phase="idle", moved=(weights(heads[1]) - left).norm() / left.norm())


@mechanism(REFUTED, settles="B28")
def bare_keeps_zeros(t: Tables) -> Finding:
    """A bare zero_grad() avoids set_to_none=True: gradients stay, as zeros."""
    t.require("last")
    least = min(t.series("last", "without", phase="").values())
    reason = f"after zero_grad() {least} of the idle head's 4 parameters have no gradient"
    return (refuted if least == 4 else holds)(reason, effect=float(least), unit="parameters")


@cost(REFUTED, settles="B29")
def saves_memory_only(t: Tables) -> Finding:
    """set_to_none saves memory and changes nothing else."""
    return repeats_records(t, "first_to_zeros", "first", "weights")


@mechanism(HOLDS, settles="~B29")
def idle_head_moves(t: Tables) -> Finding:
    """With zeros an idle head moves under momentum, weight decay, Adam and AdamW; without not."""
    t.require("first", "first_to_zeros")
    none, zeros = (
        dict(zip(OPTIMIZERS, t.series(arm, "moved", phase="idle").values(), strict=True))
        for arm in ("first", "first_to_zeros")
    )
    said = ", ".join(f"{zeros[name]:.2g} under {name}" for name in OPTIMIZERS)
    reason = f"the idle head moves by {said}; by {max(none.values()):.2g} without gradients"
    moves = min(zeros.values()) > 0 and max(none.values()) == 0
    numbers = {"effect": min(zeros.values()), "unit": "share of the weights", "evidence": zeros}
    return (holds if moves else refuted)(reason, **numbers)


@mechanism(HOLDS, settles="B32")
def last_is_first(t: Tables) -> Finding:
    """zero_grad may stand first or last in the loop: the training is the same."""
    return repeats_records(t, "last", "first", "weights")


@symptom(HOLDS, settles="B32")
def between_stands_still(t: Tables) -> Finding:
    """Between backward and step it undoes the training: no weight ever moves."""
    return stands_still(t, "between", "first", "weights")


SCENARIO = Scenario(
    title="zero_grad: first or last is the same, zeros instead of None move what is not used",
    family="gradients",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        last_is_first=("zero_grad first or last is the same", "first and last differ"),
        saves_memory_only=("None and zero are the same", "zeros instead of None train otherwise"),
        between_stands_still=("before step it undoes everything", "before step it does no harm"),
    ),
    arms=(
        reference("first", "zero_grad() first", ranks=1, clears="first"),
        control("last", "zero_grad() last", ranks=1, clears="last"),
        faulty("first_to_zeros", "set_to_none=False", ranks=1, clears="first_to_zeros"),
        faulty("between", "between backward and step", ranks=1, clears="between"),
    ),
    claims=(
        bare_keeps_zeros,
        saves_memory_only,
        idle_head_moves,
        last_is_first,
        between_stands_still,
    ),
)
