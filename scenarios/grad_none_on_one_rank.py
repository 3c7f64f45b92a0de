"""No gradient on one rank, zeros on another: an idle layer stays here and moves there.

`zero_grad()` takes gradients away, `zero_grad(set_to_none=False)` leaves zeros. For a layer that a
step does not use the optimizer then does nothing, or applies momentum and weight decay. One rank
that keeps zeros, say to log gradients, moves idle layers that all others leave alone; gradients,
None counted as zero, are equal all the while. As in pytorch/pytorch#115607.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import control, faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, between
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/grad_none_on_one_rank.yaml."""

    steps: int = field(metadata=at_least(4))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    momentum: float = field(metadata=between(0.1, 0.99))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train two heads in turns; which ranks keep the zeros of the idle one is what differs."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from scenarios._models import FEATURES, mlp, rows, weights

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            draw = rank.generator("two heads")
            self.body = mlp((FEATURES, 8), generator=draw)
            self.heads = nn.ModuleList(mlp((8, 1), generator=draw) for _ in range(2))

        def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
            output: torch.Tensor = self.heads[task](self.body(x).tanh())
            return output

    model = DistributedDataParallel(TwoHeads().to(rank.device), find_unused_parameters=True)
    momentum = 0.0 if arm.get("plain") else p.momentum
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr, momentum=momentum)
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        zeros = arm["keeps_zeros"] == "all" or (arm["keeps_zeros"] == "rank 0" and rank.rank == 0)
        optimizer.zero_grad(set_to_none=not zeros)
        nn.functional.mse_loss(model(x, step % 2), y).backward()
        held = [q.new_zeros(q.shape) if q.grad is None else q.grad for q in model.parameters()]
        rank.digest(step=step, gradients=torch.cat([gradient.flatten() for gradient in held]))
        optimizer.step()
        rank.snapshot(step=step, weights=weights(model))


@symptom(HOLDS)
def weights_part(t: Tables) -> Finding:
    """With zeros kept on rank 0 alone the ranks' weights part."""
    return negated(ranks_agree(t, "rank0", "weights"))


@symptom(REFUTED)
def gradients_show_it(t: Tables) -> Finding:
    """One sees it in the gradients, None taken as zero, which differ between ranks."""
    return negated(ranks_agree(t, "rank0", "gradients"))


@mechanism(HOLDS)
def without_momentum(t: Tables) -> Finding:
    """It takes momentum or weight decay: under plain SGD the ranks agree bit for bit."""
    return ranks_agree(t, "rank0_plain", "weights")


@remedy(HOLDS)
def all_alike(t: Tables) -> Finding:
    """The same on all ranks, zeros or None, keeps them together."""
    return all_of(*(ranks_agree(t, arm, "weights") for arm in ("all_zeros", "all_none")))


@remedy(REFUTED)
def zeros_are_none(t: Tables) -> Finding:
    """Which of the two does not matter: with zeros everywhere training is the same."""
    return matches(t, "all_zeros", "one_process", "weights")


@remedy(HOLDS)
def none_everywhere(t: Tables) -> Finding:
    """With None on all ranks N of them train like one process."""
    return like_one_process(t, "all_none")


SCENARIO = Scenario(
    title="No gradient on one rank, zeros on another: an idle layer stays here and moves there",
    family="optimizer state",
    cause="grad_none_on_one_rank",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        weights_part=("zeros kept on one rank part the weights", "zeros on one rank do no harm"),
        gradients_show_it=("gradients show it", "gradients do not show it"),
        zeros_are_none=("zeros train like None", "zeros on all ranks train something else"),
    ),
    arms=(
        one_process("one process, None", keeps_zeros="nobody"),
        faulty("rank0", "rank 0 keeps zeros", keeps_zeros="rank 0"),
        control("rank0_plain", "and no momentum", keeps_zeros="rank 0", plain=True),
        fixed("all_zeros", "all ranks keep zeros", keeps_zeros="all"),
        fixed("all_none", "zero_grad() on all ranks", keeps_zeros="nobody"),
    ),
    claims=(
        weights_part,
        gradients_show_it,
        without_momentum,
        all_alike,
        zeros_are_none,
        none_everywhere,
    ),
)
