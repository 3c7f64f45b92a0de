"""L1 clipping of a recurrent net: not another kind of clip, only a bound several times tighter.

The L1 norm of a gradient is many times its L2 norm, so that at one max_norm the step under L1 is
many times shorter. With the bound that makes the steps equally long both give the same vector. An
article recommends L1 for recurrent nets: one exploding dimension would not dominate it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy
from harness.findings import is_rounding, mean_exceeds, says
from harness.floor import EPS, dtype_floor
from harness.scenario import Arm, Finding, Scenario, at_least, between, unknown

if TYPE_CHECKING:
    import torch

    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/clip_norm_rnn.yaml."""

    seeds: int = field(metadata=at_least(8))
    steps: int = field(metadata=at_least(10))
    length: int = field(metadata=at_least(4))
    gain: float = field(metadata=between(0.1, 3.0))
    max_norm: float = field(metadata=at_least(1e-3))
    lr: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train recurrent nets, one for each seed side by side; the norm that is bounded differs."""
    import torch
    from torch.nn.utils import clip_grad_norm_

    draw = rank.generator("nets")

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return std * torch.randn(p.seeds, *shape, generator=draw, dtype=torch.float64)

    width = 16
    x = normal(p.length, 32, 1)
    target = x.mean(dim=1) * p.length**0.5
    # A matrix of its own for each seed, all of them multiplied at once.
    start = (normal(1, width), normal(width, width, std=p.gain * width**-0.5), normal(width, 1))
    nets = [tuple(w[seed].clone().requires_grad_() for w in start) for seed in range(p.seeds)]
    optimizer = torch.optim.SGD([w for net in nets for w in net], lr=p.lr)
    for step in range(p.steps):
        optimizer.zero_grad()
        enter, again, leave = (torch.stack(same) for same in zip(*nets, strict=True))
        state = torch.zeros(p.seeds, 32, width, dtype=torch.float64)
        for moment in range(p.length):
            state = torch.tanh(x[:, moment] @ enter + state @ again)
        losses = (state @ leave / width**0.5 - target).square().mean(dim=(1, 2))
        losses.sum().backward()
        rank.snapshot(step=step, losses=losses)
        for seed, net in enumerate(nets):
            before = torch.cat([w.grad.flatten() for w in net if w.grad is not None])
            tighter = float(before.norm(1) / before.norm(2))
            if arm["norm"] == "l2":
                clip_grad_norm_(net, p.max_norm)
            elif arm["norm"] == "l1":
                clip_grad_norm_(net, p.max_norm, norm_type=1)
            elif arm["norm"] == "l1_matched":
                clip_grad_norm_(net, p.max_norm * tighter, norm_type=1)
            after = torch.cat([w.grad.flatten() for w in net if w.grad is not None])
            turned = 1 - torch.nn.functional.cosine_similarity(before, after, dim=0)
            size = {"norm": before.norm(), "tighter": tighter, "turned": turned.abs()}
            rank.log(step=step, phase=f"seed {seed}", **size)
            if step == 0:
                rank.snapshot(step=0, phase=f"seed {seed}", clipped=after)
        optimizer.step()


def per_seed(t: Tables, arm: str, metric: str) -> list[dict[int, float]]:
    """Return step -> value of a metric, for each seed."""
    t.require(arm)
    seeds = range(t.root_params["seeds"])
    return [t.series(arm, metric, phase=f"seed {seed}") for seed in seeds]


@remedy(REFUTED, settles="A15")
def l1_is_better(t: Tables) -> Finding:
    """For a recurrent net L1 clipping trains better, as one exploding dimension does not rule."""
    t.require("l1", "l2")
    largest = max(max(norms.values()) for norms in per_seed(t, "l2", "norm"))
    if largest < 10 * t.root_params["max_norm"]:
        return unknown(
            f"no gradient explodes: the largest norm is {largest:.3g}; type a larger gain"
        )
    last = t.root_params["steps"] - 1
    l2, l1 = (t.snapshot(arm, "losses", step=last) for arm in ("l2", "l1"))
    return mean_exceeds((l2 - l1).tolist(), 0.0, "loss under L2 less that under L1")


@mechanism(HOLDS, settles="~A15")
def l1_is_tighter(t: Tables) -> Finding:
    """At one bound L1 makes the step several times shorter."""
    found = [value for seed in per_seed(t, "l1", "tighter") for value in seed.values()]
    return mean_exceeds(found, 2.0, "L1 norm over L2 norm")


@mechanism(HOLDS, settles="~A15")
def l1_does_not_turn(t: Tables) -> Finding:
    """L1 clipping does not turn the gradient: no dimension is held back more than another."""
    turned = max(max(seed.values()) for seed in per_seed(t, "l1", "turned"))
    # The cosine sums up 288 products, and each addition is rounded.
    floor = dtype_floor(EPS["float64"] * 288**0.5)
    return is_rounding(turned, floor, f"1 - cosine is at most {turned:.2g}", "1 - cosine")


@mechanism(HOLDS)
def same_at_matched_bound(t: Tables) -> Finding:
    """With the bound times the ratio of the norms, L1 clips to the very vector of L2."""
    t.require("l2", "l1_matched")
    seeds = range(t.root_params["seeds"])
    off = max(t.distance("l1_matched", "l2", "clipped", step=0, phase=f"seed {s}") for s in seeds)
    # clip_grad_norm_ adds 1e-6 to either norm before it divides.
    floor = dtype_floor(1e-6 / min(seed[0] for seed in per_seed(t, "l2", "norm")))
    return is_rounding(off, floor, f"the clipped gradients are {off:.2g} apart", "relative L2")


SCENARIO = Scenario(
    title="L1 clipping of a recurrent net is L2 clipping with a bound several times tighter",
    family="clipping",
    cause="",
    params=Params,
    run=run,
    min_ranks=1,
    headline=says(
        l1_is_better=("L1 clipping trains better", "L1 clipping trains no better"),
        same_at_matched_bound=("it is L2 with a tighter bound", "it is not L2 with another bound"),
    ),
    arms=(
        reference("l2", "clip_grad_norm_", ranks=1, norm="l2"),
        control("l1", "norm_type=1", ranks=1, norm="l1"),
        control("l1_matched", "norm_type=1, bound matched", ranks=1, norm="l1_matched"),
    ),
    claims=(l1_is_better, l1_is_tighter, l1_does_not_turn, same_at_matched_bound),
)
