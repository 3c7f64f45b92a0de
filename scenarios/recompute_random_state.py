"""Recomputed dropout that draws anew: the gradient is that of another network than the loss.

A checkpointed segment is run twice, and dropout has to zero the same units both times. With
`preserve_rng_state=False`, which saves a copy of the state, the second run draws other masks: the
loss belongs to the first, the gradient to a mixture of both. Without dropout inside it is free, and
right to the last bit. Whatever reproduces the first run by hand, such as a wrapper of one's own or
a generator that torch does not know, fails alike. One of the faults in NVIDIA/Megatron-LM#290.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.arms import control, faulty, fixed, reference
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import counts, negated, ranks_agree, repeats_records, same_by_rank, says
from harness.scenario import Arm, Finding, Plot, Scenario, at_least, between, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/recompute_random_state.yaml."""

    steps: int = field(metadata=at_least(1))
    batch: int = field(metadata=at_least(1))
    p: float = field(metadata=between(0.1, 0.9))
    lr: float = field(metadata=at_least(1e-6))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train through a segment with dropout; whether and how it is recomputed differs."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    from scenarios._models import FEATURES, gradients, mlp, rows, weights

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.segment = mlp((FEATURES, 24, 12), generator=rank.generator("net"))
            self.dropout = nn.Dropout(p.p if arm["drops"] else 0.0)
            self.head = mlp((12, 1), generator=rank.generator("head"))

        def dropped(self, x: torch.Tensor) -> Any:
            return self.dropout(self.segment(x)).tanh()

        def forward(self, x: torch.Tensor) -> Any:
            if arm["recomputes"] == "nothing":
                return self.head(self.dropped(x))
            if arm["recomputes"] == "segment":
                hidden = checkpoint(self.segment, x, use_reentrant=False)
                return self.head(self.dropout(hidden).tanh())
            restored = arm["recomputes"] == "all, restored"
            again = {"use_reentrant": False, "preserve_rng_state": restored}
            return self.head(checkpoint(self.dropped, x, **again))

    net, masks = Net().to(rank.device), list[torch.Tensor]()
    net.dropout.register_forward_hook(lambda _, __, output: masks.append(output.detach() == 0))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    torch.manual_seed(rank.seed * 1000 + rank.rank)
    for step in range(p.steps):
        masks.clear()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        other = sum(not torch.equal(masks[0], mask) for mask in masks[1:])
        rank.log(step=step, loss=loss, other=other, runs=len(masks))
        rank.snapshot(step=step, gradient=gradients(net), weights=weights(net))


@symptom(HOLDS, source="NVIDIA/Megatron-LM#290")
def gradient_off(t: Tables) -> Finding:
    """Without the random state the first gradient is not that of the loss."""
    t.require("anew", "kept")
    off = min(t.distance("anew", "kept", "gradient", step=0, rank=r) for r in t.ranks("anew"))
    reason = f"the first gradient is {off:.2g} of its norm off that of kept activations"
    return (holds if off else refuted)(reason, effect=off, unit="relative L2 distance")


@mechanism(HOLDS)
def masks_differ(t: Tables) -> Finding:
    """The second run drops other units than the first."""
    return counts(t, "anew", "other", 1, "second runs that drop other units")


@symptom(REFUTED)
def loss_shows_it(t: Tables) -> Finding:
    """The first loss is another one than with kept activations."""
    return negated(same_by_rank(t, "anew", "kept", "loss"))


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The ranks' weights part."""
    return negated(ranks_agree(t, "anew", "weights"))


@symptom(HOLDS)
def no_dropout(t: Tables) -> Finding:
    """Without dropout it is right bit for bit, and a test of it passes."""
    return repeats_records(t, "no_dropout", "no_dropout_kept", "weights")


@remedy(HOLDS)
def restore(t: Tables) -> Finding:
    """With the random state restored, which is the default, nothing changes by a bit."""
    return repeats_records(t, "restored", "kept", "weights")


@remedy(HOLDS)
def leave_out(t: Tables) -> Finding:
    """With the dropout left out of the segment, its state may be left out as well."""
    return repeats_records(t, "outside", "kept", "weights")


SCENARIO = Scenario(
    title="Dropout recomputed without its random state: the gradient of another network",
    family="random numbers",
    cause="recompute_random_state",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        gradient_off=("recomputed without its random state, dropout is wrong", "dropout is right"),
        loss_shows_it=("the loss shows it", "the first loss is right"),
        ranks_part=("the ranks part", "the ranks agree"),
        no_dropout=("without dropout it is right", "even without dropout"),
    ),
    arms=(
        reference("kept", "activations kept", recomputes="nothing", drops=True),
        reference("no_dropout_kept", "kept, no dropout", recomputes="nothing", drops=False),
        faulty("anew", "preserve_rng_state=False", recomputes="all", drops=True),
        control("no_dropout", "the same, no dropout", recomputes="all", drops=False),
        fixed("restored", "state restored", recomputes="all, restored", drops=True),
        fixed("outside", "dropout behind it", recomputes="segment", drops=True),
    ),
    claims=(gradient_off, masks_differ, loss_shows_it, ranks_part, no_dropout, restore, leave_out),
    plots=(Plot(metric="loss", title="Loss of each rank's rows", log=True),),
)
