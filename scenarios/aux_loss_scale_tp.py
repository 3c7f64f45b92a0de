"""A router's auxiliary loss counted on every tensor-parallel rank: N times as strong.

What flows back to a replicated router from split experts is a share, to be summed over the ranks.
The loss that balances the experts is computed by every rank from the same tokens: summed with the
rest it acts N times. Ranks agree, reported losses are right. From NVIDIA/Megatron-LM#5047.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import is_rounding, like_one_process, matches, negated, ranks_agree, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Scenario, at_least
from harness.tables import relative_l2
from scenarios._models import split_equally

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/aux_loss_scale_tp.yaml."""

    steps: int = field(metadata=at_least(1))
    tokens: int = field(metadata=at_least(2))
    experts: int = field(metadata=at_least(2))
    hidden: int = field(metadata=at_least(2))
    weight: float = field(metadata=at_least(1e-6))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a router and experts split by columns; what of the two losses is summed differs."""
    import torch
    import torch.distributed as dist

    from scenarios import _tensor_parallel as split
    from scenarios._models import FEATURES, gradients, mlp, rows, weights

    draw = rank.generator("net")
    router = mlp((FEATURES, p.experts), generator=draw).to(rank.device)
    drawn = torch.randn(2, p.experts, p.hidden, FEATURES, generator=draw).double() / FEATURES**0.5
    parts = drawn[:, :, rank.rank :: rank.world_size].to(rank.device)
    into, out = (part.clone().requires_grad_() for part in parts)
    optimizer = torch.optim.SGD([into, out, *router.parameters()], lr=p.lr)
    x, y = rows(rank, p.tokens, whole=True)
    for step in range(p.steps):
        optimizer.zero_grad()
        gates = router(x).softmax(dim=1)
        hidden = torch.einsum("tf,ehf->teh", x, into).tanh()
        shares = torch.einsum("te,teh,ehf->tf", gates, hidden, out)
        main = torch.nn.functional.mse_loss(split.summed(shares), y.expand_as(x))
        used = torch.nn.functional.one_hot(gates.argmax(dim=1), p.experts).double()
        balance = p.weight * p.experts * (used.mean(dim=0) * gates.mean(dim=0)).sum()
        alone = torch.autograd.grad(balance, list(router.parameters()), retain_graph=True)
        if arm["balance"] == "over N":
            balance = balance / rank.world_size
        if arm["balance"] == "summed apart":
            main.backward(retain_graph=True)
        else:
            (main + balance).backward()
        for gradient in (q.grad for q in router.parameters() if q.grad is not None):
            dist.all_reduce(gradient)
            if arm["balance"] == "averaged":
                gradient /= rank.world_size
        if arm["balance"] == "summed apart":
            balance.backward()
        of_balance = torch.cat([part.flatten() for part in alone])
        rank.snapshot(step=step, gradient=gradients(router), main=main[None], of_balance=of_balance)
        optimizer.step()
        rank.snapshot(step=step, router=weights(router))


@symptom(HOLDS, source="NVIDIA/Megatron-LM#5047")
def router_off(t: Tables) -> Finding:
    """Summed with the rest, the balancing loss trains another router than in one process."""
    return negated(matches(t, "summed", "one_process", "router"))


@mechanism(HOLDS, source="NVIDIA/Megatron-LM#5047")
def n_times_as_strong(t: Tables) -> Finding:
    """The balancing loss acts N times."""
    t.require("summed", "one_process")
    right, part = (t.snapshot("one_process", n, step=0) for n in ("gradient", "of_balance"))
    got = t.snapshot("summed", "gradient", step=0)
    times = 1 + float((got - right) @ part / (part @ part))
    gap = relative_l2(got, right + (len(t.ranks("summed")) - 1) * part)
    reason = f"it acts {times:.6g} times; but for that the gradient is {gap:.2g} off"
    floor = rounding(t, "one_process", "gradient", step=0)
    return is_rounding(gap, floor, reason, "relative L2 distance")


@symptom(REFUTED)
def ranks_part(t: Tables) -> Finding:
    """The router's replicas part."""
    return negated(ranks_agree(t, "summed", "router"))


@symptom(REFUTED)
def first_loss_shows(t: Tables) -> Finding:
    """The first loss is another one than that of one process."""
    return negated(matches(t, "summed", "one_process", "main", step=0))


@remedy(REFUTED)
def average(t: Tables) -> Finding:
    """Averaging the router's gradient over the ranks makes up for it."""
    return matches(t, "averaged", "one_process", "router")


@remedy(HOLDS)
def over_n(t: Tables) -> Finding:
    """With the balancing loss over N the ranks train the router of one process."""
    return like_one_process(t, "over_n", "router")


@remedy(HOLDS)
def apart(t: Tables) -> Finding:
    """With only the other loss's gradient summed they do, too."""
    return like_one_process(t, "apart", "router")


SCENARIO = Scenario(
    title="A balancing loss that every tensor-parallel rank adds: it acts N times",
    family="parallel layouts",
    cause="aux_loss_scale_tp",
    params=Params,
    run=run,
    check=split_equally("hidden"),
    headline=says(
        n_times_as_strong=("the balancing loss acts N times", "the balancing loss acts once"),
        ranks_part=("the ranks part", "the ranks agree"),
        average=("averaging helps", "averaging instead makes the other loss 1/N"),
    ),
    arms=(
        one_process("one process", balance="summed"),
        faulty("summed", "summed with the rest", balance="summed"),
        faulty("averaged", "averaged with the rest", balance="averaged"),
        fixed("over_n", "over N, summed with the rest", balance="over N"),
        fixed("apart", "added behind the sum", balance="summed apart"),
    ),
    claims=(router_off, n_times_as_strong, ranks_part, first_loss_shows, average, over_n, apart),
)
