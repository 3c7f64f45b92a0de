"""Dropout in PPO: the ratio of the first epoch is not 1, and that is what goes wrong.

PPO divides the probability of an action under the updated policy by the one stored with the
rollout. Before the first update both are the same policy, and the ratio is 1; with dropout active
they are two policies, one for each mask, and the clip acts on their difference. An article fears
for the value network instead, with 37 % of error in the advantages: on average over masks dropout
leaves the value about where it is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, remedy, symptom
from harness.findings import counts, mean_is, negated, says
from harness.scenario import Arm, Finding, Scenario, at_least, between

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/ppo_dropout_ratio.yaml."""

    states: int = field(metadata=at_least(64))
    hidden: int = field(metadata=at_least(4))
    p: float = field(metadata=between(0.02, 0.5))
    clip: float = field(metadata=between(0.01, 1.0))
    masks: int = field(metadata=at_least(16))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Collect a rollout and take PPO's first ratio; where dropout is active is what differs."""
    import torch
    from torch import nn
    from torch.distributions import Categorical

    def net(outputs: int) -> nn.Sequential:
        drop = nn.Dropout(p.p)
        first, second = nn.Linear(8, p.hidden), nn.Linear(p.hidden, p.hidden)
        last = nn.Linear(p.hidden, outputs)
        layers = first, nn.Tanh(), drop, second, nn.Tanh(), drop, last
        return nn.Sequential(*layers).to(rank.device, torch.float64)

    policy, value = net(4), net(1)
    states = torch.randn(p.states, 8, dtype=torch.float64).to(rank.device)

    policy.train(arm["rollout"] == "train")
    torch.manual_seed(rank.seed)
    with torch.no_grad():
        collected = Categorical(logits=policy(states))
    actions = collected.sample()
    stored = collected.log_prob(actions)

    policy.train(arm["update"] == "train")
    if arm.get("masks") == "stored":
        torch.manual_seed(rank.seed)
    ratio = (Categorical(logits=policy(states)).log_prob(actions) - stored).exp()
    outside = ((ratio - 1.0).abs() > p.clip).double().mean()
    rank.log(step=0, changed=int((ratio != 1.0).sum()), spread=ratio.std(), outside=outside)

    with torch.no_grad():
        clean = value.eval()(states)
        value.train(arm["rollout"] == "train")
        for mask in range(p.masks):
            off = value(states) - clean
            rank.log(step=mask, value_off=(off * clean).sum() / (clean * clean).sum())


def ratio_is_one(t: Tables, arm: str) -> Finding:
    """Decide: before the first update the ratio of every action is 1, to the last bit."""
    return counts(t, arm, "changed", 0, "actions whose ratio is not 1")


@symptom(HOLDS)
def ratio_is_not_one(t: Tables) -> Finding:
    """With dropout active the ratio is not 1 before any update, and some actions are clipped."""
    t.require("train")
    outside, spread = (t.value("train", name, step=0) for name in ("outside", "spread"))
    said = f"deviation of the ratio {spread:.3g}, {outside:.1%} of actions beyond the clip"
    return dataclasses.replace(negated(ratio_is_one(t, "train")), reason=said, effect=spread)


@symptom(REFUTED, settles="A43")
def value_is_biased(t: Tables) -> Finding:
    """Dropout biases the value network, and with it the advantages, by 37 %."""
    t.require("train")
    found = list(t.series("train", "value_off").values())
    return mean_is(found, 0.37, "share by which values with dropout are too large")


@remedy(REFUTED)
def eval_in_the_rollout(t: Tables) -> Finding:
    """It is enough to collect the rollout in eval mode."""
    return ratio_is_one(t, "eval_rollout")


@remedy(HOLDS)
def eval_in_both(t: Tables) -> Finding:
    """In eval mode in the rollout and in the update the ratio is 1 exactly."""
    return ratio_is_one(t, "eval_both")


@remedy(HOLDS)
def one_mask_for_both(t: Tables) -> Finding:
    """With the masks of the rollout in the update it is 1 exactly, dropout and all."""
    return ratio_is_one(t, "same_masks")


SCENARIO = Scenario(
    title="Dropout in PPO: the first ratio is not 1, and the clip acts before any update",
    family="random numbers",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        ratio_is_not_one=("dropout moves the first ratio off 1", "the first ratio is 1"),
        value_is_biased=("and biases the values", "and does not bias the values"),
    ),
    arms=(
        reference("eval_both", "eval mode throughout", ranks=1, rollout="eval", update="eval"),
        faulty("train", "train mode throughout", ranks=1, rollout="train", update="train"),
        faulty("eval_rollout", "eval in the rollout", ranks=1, rollout="eval", update="train"),
        fixed("same_masks", "same masks", ranks=1, rollout="train", update="train", masks="stored"),
    ),
    claims=(
        ratio_is_not_one,
        value_is_biased,
        eval_in_the_rollout,
        eval_in_both,
        one_mask_for_both,
    ),
)
