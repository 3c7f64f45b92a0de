"""Warm-up in proportion to a model's width: what the rule behind it says of no ViT.

The rule is base * (0.04 / deviation)^2 steps, from which an article takes that half the deviation
needs twice the warm-up, and a model of another width steps in proportion to it. The rule itself
says four times for half the deviation. In proportion to the width it is only where weights are
drawn by Xavier, smaller the wider the layer; ViT draws them with one deviation for all widths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism
from harness.findings import OTHER_SE, SAME_SE, says
from harness.scenario import Arm, Finding, Scenario, at_least, between, holds, refuted, unknown

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/warmup_by_width.yaml."""

    base: int = field(metadata=at_least(100))
    width: int = field(metadata=between(192, 4096))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Compute the warm-up of a layer; how wide it is and how it is drawn differ."""
    import torch
    from torch import nn

    width = p.width * 4 // 3 if arm.get("wide") else p.width
    layer = nn.Linear(width, width)
    draw = rank.generator("layer")
    if arm["drawn"] == "xavier":
        nn.init.xavier_normal_(layer.weight, generator=draw)
    else:
        nn.init.trunc_normal_(layer.weight, std=arm["drawn"], generator=draw)
    deviation = layer.weight.detach().std()
    rank.log(step=0, steps=torch.floor(p.base * (0.04 / deviation) ** 2))


def longer(t: Tables, arm: str, than: str, times: float) -> Finding:
    """Decide: the rule gives so many times the steps, as near as drawn weights can tell."""
    t.require(arm, than)
    more, less = (t.value(name, "steps", step=0) for name in (arm, than))
    # The deviation of n draws is off by 1 / sqrt(2 n), its square by twice that, the ratio of two
    # squares by 2 / sqrt(n); and steps are whole.
    error = 2 / t.root_params["width"] + 1 / less
    away = abs(more / less / times - 1)
    reason = f"{more:.0f} steps for {arm}, {less:.0f} for {than}: {more / less:.4g} times"
    numbers = {"effect": away, "floor": error, "unit": "of the ratio"}
    if away <= SAME_SE * error:
        return holds(reason, **numbers)
    return (refuted if away >= OTHER_SE * error else unknown)(reason, **numbers)


@mechanism(REFUTED, settles="A34")
def half_is_twice(t: Tables) -> Finding:
    """By the rule weights of half the deviation need twice the steps."""
    return longer(t, "vit", "twice_vit", 2.0)


@mechanism(HOLDS, settles="~A34")
def half_is_four_times(t: Tables) -> Finding:
    """By the rule they need four times the steps."""
    return longer(t, "vit", "twice_vit", 4.0)


@mechanism(REFUTED, settles="A80")
def grows_with_width(t: Tables) -> Finding:
    """By the rule a ViT of another width needs steps in proportion to it."""
    return longer(t, "vit_wide", "vit", 4 / 3)


@mechanism(HOLDS, settles="A80")
def xavier_grows(t: Tables) -> Finding:
    """With Xavier's weights, which get smaller with the width, it does."""
    return longer(t, "xavier_wide", "xavier", 4 / 3)


SCENARIO = Scenario(
    title="Warm-up in proportion to the width: not what the rule behind it says of a ViT",
    family="schedule",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        half_is_twice=("half the deviation is twice the steps", "half the deviation is not twice"),
        grows_with_width=("steps grow with the width", "steps do not grow with a ViT's width"),
        xavier_grows=("they do with Xavier's weights", "nor with Xavier's weights"),
    ),
    arms=(
        reference("vit", "truncated normal, 0.02", ranks=1, drawn=0.02),
        control("twice_vit", "truncated normal, 0.04", ranks=1, drawn=0.04),
        control("vit_wide", "4/3 as wide, 0.02", ranks=1, drawn=0.02, wide=True),
        control("xavier", "Xavier", ranks=1, drawn="xavier"),
        control("xavier_wide", "4/3 as wide, Xavier", ranks=1, drawn="xavier", wide=True),
    ),
    claims=(half_is_twice, half_is_four_times, grows_with_width, xavier_grows),
)
