"""A warm-up computed from the weights' deviation: a rule that misreads most models.

The rule takes the mean deviation of all weights with two dimensions and returns
base * (0.04 / deviation)^2 steps, 0.04 being what ViT is said to start from. A linear layer starts
at 0.021 by default, the truncated normal of ViT at 0.02, an embedding at 1: so the same model gets
four thousand steps or a handful. Convolutions are never read, not even the one that a ViT begins
with; where there is nothing else, or only zeros, the rule raises. From an article.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism, symptom
from harness.findings import OTHER_SE, says
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/warmup_rule.yaml."""

    base: int = field(metadata=at_least(100))
    width: int = field(metadata=between(96, 4096))


def warmup_steps(model: torch.nn.Module, base: int) -> int:
    """Return the length of the warm-up by the article's rule."""
    import torch

    deviations = [weight.detach().std() for weight in model.parameters() if weight.dim() == 2]
    return int(base * (0.04 / torch.tensor(deviations).mean()) ** 2)


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Compute the warm-up of the first layers of a ViT; what they hold is what differs."""
    import torch
    from torch import nn

    torch.manual_seed(rank.seed)
    patches, linear = nn.Conv2d(3, p.width, 8), nn.Linear(p.width, p.width, bias=False)
    model = nn.Sequential(patches, linear)
    if arm["weights"] == "vit":
        nn.init.trunc_normal_(linear.weight, std=0.02)
    elif arm["weights"] == "zeros":
        nn.init.zeros_(linear.weight)
    elif arm["weights"] == "small_patches":
        patches.weight.data *= 0.1
    elif arm["weights"] == "embedding":
        model.append(nn.Embedding(100, p.width))
    elif arm["weights"] == "convolutions":
        model = nn.Sequential(patches)
    try:
        steps, raised = warmup_steps(model, p.base), None
    except (ValueError, OverflowError) as error:
        steps, raised = None, f"{type(error).__name__}: {error}"
    rank.log(step=0, steps=steps, raised=raised, deviation=linear.weight.std())


def steps_of(t: Tables, arm: str) -> int:
    """Return the length that the rule gives for a model."""
    t.require(arm)
    return int(t.value(arm, "steps", step=0))


@symptom(REFUTED, settles="A32")
def vit_starts_there(t: Tables) -> Finding:
    """ViT starts from weights of deviation sqrt(2 / (width + width)), 0.04 for 768."""
    t.require("default", "vit")
    due = math.sqrt(1 / t.root_params["width"])
    default, vit = (t.value(arm, "deviation", step=0) for arm in ("default", "vit"))
    reason = f"it is {default:.4f} by default and {vit:.4f} as ViT draws it, against {due:.4f}"
    far = min(abs(default / due - 1), abs(vit / due - 1)) >= OTHER_SE / t.root_params["width"]
    return (refuted if far else holds)(reason, effect=vit / due, unit="of that deviation")


@symptom(REFUTED, settles="A35")
def gives_a_length(t: Tables) -> Finding:
    """The rule gives a length for any model."""
    t.require("convolutions", "zeros")
    raised = [t.value(arm, "raised", step=0) for arm in ("convolutions", "zeros")]
    reason = f"convolutions alone: {raised[0]}; a layer of zeros: {raised[1]}"
    return (refuted if any(raised) else holds)(reason)


@mechanism(REFUTED, settles="A35")
def reads_first_layer(t: Tables) -> Finding:
    """It reads the weights of a ViT's first layer, which cuts the image into patches."""
    without, plain = steps_of(t, "small_patches"), steps_of(t, "default")
    reason = f"{without} steps with patches a tenth as large, {plain} without"
    return (refuted if without == plain else holds)(reason, effect=float(without - plain))


@mechanism(HOLDS, settles="~A35")
def embedding_decides(t: Tables) -> Finding:
    """One embedding more, and the rule gives less than a hundredth of the steps."""
    more, plain = steps_of(t, "embedding"), steps_of(t, "default")
    reason = f"{more} steps with an embedding, {plain} without"
    return (holds if more * 100 < plain else refuted)(reason, effect=float(more), unit="steps")


SCENARIO = Scenario(
    title="A warm-up computed from the weights' deviation misreads most models",
    family="schedule",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        gives_a_length=("the rule gives a length for any model", "the rule raises for some models"),
        reads_first_layer=("it reads every layer", "it never reads a ViT's first layer"),
        embedding_decides=("an embedding decides it", "an embedding decides little"),
    ),
    arms=(
        reference("default", "weights as torch makes them", ranks=1, weights="default"),
        control("vit", "truncated normal, 0.02", ranks=1, weights="vit"),
        control("small_patches", "first layer / 10", ranks=1, weights="small_patches"),
        control("embedding", "with an embedding", ranks=1, weights="embedding"),
        control("convolutions", "no linear layer", ranks=1, weights="convolutions"),
        control("zeros", "linear layer of zeros", ranks=1, weights="zeros"),
    ),
    claims=(vit_starts_there, gives_a_length, reads_first_layer, embedding_decides),
)
