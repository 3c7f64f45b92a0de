"""A bound of a tenth of the present gradient norm: a tenth of the learning rate, or nothing at all.

A clip whose bound follows the gradient acts at every step and by the same factor. Under SGD that
is lr / 10 exactly; Adam divides by the size of the gradient, and sees no clip at all. An article
advises it where the loss falls slowly, which it can only slow down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy
from harness.findings import is_rounding, says
from harness.floor import FAULT, Floor, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted, unknown

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/clip_fraction.yaml."""

    steps: int = field(metadata=at_least(5))
    share: float = field(metadata=between(0.001, 0.5))
    lr: float = field(metadata=at_least(1e-6))
    adam_lr: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Fit a small net; arms differ in the optimizer, and in clip and learning rate."""
    import torch

    from scenarios._models import gradients, net, rows, weights

    model = net(rank)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    if arm["optimizer"] == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=p.adam_lr)
    if arm["does"] == "lower_rate":
        optimizer.param_groups[0]["lr"] *= p.share
    x, y = rows(rank, 64)
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        norm = gradients(model).norm()
        if arm["does"] == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), p.share * norm.item())
        optimizer.step()
        rank.log(step=step, loss=loss, norm=norm)
    rank.snapshot(step=p.steps - 1, weights=weights(model))


@remedy(REFUTED, settles="A76")
def falls_faster(t: Tables) -> Finding:
    """Where the loss falls slowly, max_norm = 0.1 * the norm of all gradients makes it fall."""
    t.require("sgd", "sgd_rule")
    plain, rule = (list(t.series(arm, "loss").values()) for arm in ("sgd", "sgd_rule"))
    if plain[-1] >= plain[0]:
        return unknown("the loss does not fall slowly, it rises; type a smaller scenario.lr")
    reason = (
        f"the loss falls from {plain[0]:.3g} to {plain[-1]:.3g}, with the rule to {rule[-1]:.3g}"
    )
    gain = (plain[-1] - rule[-1]) / plain[0]
    return (holds if gain > 0 else refuted)(reason, effect=gain, unit="of the first loss")


def added_to_norms(t: Tables, *arms: str) -> Floor:
    """Return what the 1e-6 that clip_grad_norm_ adds to each norm can amount to over a run."""
    norms = [norm for arm in arms for norm in t.series(arm, "norm").values()]
    return dtype_floor(t.root_params["steps"] * 1e-6 / min(norms))


@mechanism(HOLDS, settles="~A76")
def sgd_is_lower_rate(t: Tables) -> Finding:
    """Under SGD the rule is a learning rate of that share, exactly."""
    t.require("sgd_rule", "sgd_lower_rate")
    last = t.root_params["steps"] - 1
    off = t.distance("sgd_rule", "sgd_lower_rate", "weights", step=last)
    reason = f"the weights are {off:.2g} from those of the learning rate times the share"
    return is_rounding(off, added_to_norms(t, "sgd_rule"), reason, "relative L2 distance")


@mechanism(HOLDS, settles="~A76")
def adam_sees_nothing(t: Tables) -> Finding:
    """Under Adam the rule does nothing: the step does not depend on the gradient's size."""
    t.require("adam", "adam_rule", "adam_lower_rate")
    last = t.root_params["steps"] - 1
    to_plain, to_lower = (
        t.distance("adam_rule", arm, "weights", step=last) for arm in ("adam", "adam_lower_rate")
    )
    reason = f"the weights are {to_plain:.2g} from plain Adam, {to_lower:.2g} from a lower rate"
    near = to_plain * FAULT <= to_lower
    return (holds if near else refuted)(reason, effect=to_plain, unit="relative L2 distance")


SCENARIO = Scenario(
    title="A bound of a tenth of the gradient norm is a tenth of the learning rate, or nothing",
    family="clipping",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        falls_faster=("the rule speeds SGD up", "the rule slows SGD down"),
        sgd_is_lower_rate=("it is a lower learning rate", "it is not a lower learning rate"),
        adam_sees_nothing=("Adam does not see it", "Adam sees it"),
    ),
    arms=(
        reference("sgd", "no clip", ranks=1, optimizer="sgd", does="nothing"),
        control("sgd_rule", "max_norm = 0.1 * norm", ranks=1, optimizer="sgd", does="clip"),
        control("sgd_lower_rate", "lr / 10", ranks=1, optimizer="sgd", does="lower_rate"),
        reference("adam", "Adam, no clip", ranks=1, optimizer="adam", does="nothing"),
        control("adam_rule", "Adam with it", ranks=1, optimizer="adam", does="clip"),
        control("adam_lower_rate", "Adam, lr / 10", ranks=1, optimizer="adam", does="lower_rate"),
    ),
    claims=(falls_faster, sgd_is_lower_rate, adam_sees_nothing),
)
