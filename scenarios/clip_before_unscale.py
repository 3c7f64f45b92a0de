"""Clipping gradients that still carry the loss scale: every update is cut to lr * max_norm / scale.

GradScaler multiplies the loss by 65536, and with it every gradient. `clip_grad_norm_` called before
`scaler.unscale_` compares that norm with a threshold meant for the true one, so it clips always,
and `scaler.step` divides what is left by 65536 again. Hardly anything is learned, without an error,
and all ranks agree. Reported in milesial/Pytorch-UNet#468, pytorch/examples#1196,
rwth-i6/returnn#1590, huggingface/accelerate#641.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, holds, refuted, unknown
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/clip_before_unscale.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    max_norm: float = field(metadata=at_least(1e-6))
    log2_scale: int = field(metadata=at_least(1))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train with a loss scale and clipping; whether the gradients are unscaled first differs."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_

    from scenarios._models import net, rows, weights

    model = DistributedDataParallel(net(rank))
    kind = torch.optim.Adam if arm.get("adam") else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=p.lr)
    # A power of two: scaling and unscaling then change no bit.
    scaler = torch.amp.GradScaler(
        rank.device.partition(":")[0], init_scale=2.0**p.log2_scale, enabled=arm["scales"]
    )
    for step in range(p.steps):
        before = weights(model)
        x, y = rows(rank, p.batch, name=f"batch/{step}")
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if arm.get("unscales"):
            scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), p.max_norm)
        scaler.step(optimizer)
        scaler.update()
        rank.log(step=step, loss=loss, norm=norm, length=(weights(model) - before).norm())
        rank.snapshot(step=step, weights=weights(model))


@symptom(HOLDS, source="milesial/Pytorch-UNet#468")
def hardly_moves(t: Tables) -> Finding:
    """No update is longer than lr * max_norm / scale."""
    t.require("clip_first")
    p = t.root_params
    limit = p["lr"] * p["max_norm"] / 2.0 ** p["log2_scale"]
    found = [max(t.series("clip_first", "length", rank=r).values()) for r in t.ranks("clip_first")]
    # Weights near 1 are known to 1e-16: their difference to 1e-11 of so short an update.
    due = max(found) <= limit * (1 + 1e-9)
    reason = f"the longest of {p['steps']} updates is {max(found):.4g}, the limit {limit:.4g}"
    return (holds if due else refuted)(reason, effect=max(found), unit="length of an update")


@mechanism(HOLDS)
def norm_is_scaled(t: Tables) -> Finding:
    """What is compared with max_norm is the true norm times the scale, to the last bit."""
    arms = ("clip_first", "clip_first_adam")
    t.require(*arms, "unscale_first")
    true, scale = t.value("unscale_first", "norm", step=0), 2.0 ** t.root_params["log2_scale"]
    found = [t.value(arm, "norm", step=0, rank=rank) for arm in arms for rank in t.ranks(arm)]
    reason = f"norms {min(found):.6g} to {max(found):.6g}, where the true one is {true:.6g}"
    numbers = {"effect": max(found) / true, "unit": "times the true norm"}
    return (holds if set(found) == {true * scale} else refuted)(reason, **numbers)


@mechanism(REFUTED)
def short_ones_pass(t: Tables) -> Finding:
    """Gradients shorter than max_norm pass unchanged."""
    t.require("clip_first")
    p, lengths = t.root_params, t.series("clip_first", "length")
    true = {n: norm / 2.0 ** p["log2_scale"] for n, norm in t.series("clip_first", "norm").items()}
    left = [lengths[n] / (p["lr"] * norm) for n, norm in true.items() if norm < p["max_norm"]]
    if not left:
        return unknown("no gradient is so short; type a larger scenario.max_norm")
    reason = f"of {len(left)} gradients below max_norm {min(left):.2g} to {max(left):.2g} are left"
    numbers = {"effect": min(left), "unit": "share that is left of a short gradient"}
    return (refuted if min(left) < 1 - 1e-9 else holds)(reason, **numbers)


@symptom(REFUTED)
def ranks_differ(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "clip_first", "weights"))


@mechanism(REFUTED)
def adam_safe(t: Tables) -> Finding:
    """With Adam, which divides by the gradient's size, the order does not matter."""
    return matches(t, "clip_first_adam", "one_process_adam", "weights")


@remedy(HOLDS, source="pytorch/examples#1196")
def unscale_first(t: Tables) -> Finding:
    """scaler.unscale_(optimizer) first: N ranks train like one process without a loss scale."""
    return like_one_process(t, "unscale_first")


SCENARIO = Scenario(
    title="Clipping before scaler.unscale_: each update is cut to lr * max_norm / 65536",
    family="clipping",
    cause="clip_before_unscale",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        hardly_moves=("clipped while scaled, gradients move next to nothing", "updates are long"),
        short_ones_pass=("short ones pass", "short ones are clipped, too"),
        ranks_differ=("the ranks part", "all ranks agree"),
        adam_safe=("Adam does not care", "Adam comes out wrong as well"),
    ),
    arms=(
        one_process("one process, no loss scale", scales=False),
        one_process("the same with Adam", name="one_process_adam", scales=False, adam=True),
        faulty("clip_first", "clipped, then unscaled by scaler.step", scales=True),
        faulty("clip_first_adam", "the same with Adam", scales=True, adam=True),
        fixed("unscale_first", "unscale_, then clip", scales=True, unscales=True),
    ),
    claims=(hardly_moves, norm_is_scaled, short_ones_pass, ranks_differ, adam_safe, unscale_first),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
