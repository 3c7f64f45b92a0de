"""Expert gradients reduced over the dense layers' group: unlike experts get each other's gradient.

With experts spread over ranks there are two data-parallel groups: dense layers are replicated on
all ranks, an expert on those only that hold the same one. Made before the mesh was cut, or taken
for the other, the dense group adds up the gradients of unlike experts: shapes fit, nothing hangs,
and every rank gets the same sum. Reported in NVIDIA/Megatron-LM#1628.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, is_rounding, matches, negated, ranks_agree, says
from harness.rounding import rounding
from harness.scenario import Arm, Finding, Scenario, at_least
from harness.tables import relative_l2
from scenarios._models import FEATURES, split_equally

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables, Vector


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/wrong_group_after_remesh.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(2))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a dense layer and two experts, each on every second rank; their group differs."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from scenarios._models import gradients, mlp, rows, weights

    draw, world = rank.generator("net"), rank.world_size
    dense = mlp((FEATURES, FEATURES), generator=draw).to(rank.device)
    experts = [mlp((FEATURES, 1), generator=draw).to(rank.device) for _ in range(2)]
    # Even ranks hold expert 0, odd ones expert 1; one process holds both.
    held = [0, 1] if world == 1 else [rank.rank % 2]
    mine = nn.ModuleList(experts[number] for number in held)
    alike = [dist.new_group(list(range(number, world, 2))) for number in range(min(world, 2))]
    optimizer = torch.optim.SGD([*dense.parameters(), *mine.parameters()], lr=p.lr)
    data = [rows(rank, p.batch, name=f"expert {number}", whole=True) for number in range(2)]
    # Those that hold an expert share its rows.
    share = slice(rank.rank // 2, None, len(range(held[0], max(world, 2), 2)))
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = torch.zeros((), device=rank.device)
        for number in held:
            x, y = (part[share] for part in data[number])
            output = experts[number](torch.tanh(dense(x)))
            loss = loss + ((output - y) ** 2).sum() / p.batch
        loss.backward()
        for gradient in (q.grad for q in dense.parameters() if q.grad is not None):
            dist.all_reduce(gradient)
        for gradient in (q.grad for q in mine.parameters() if q.grad is not None):
            if arm["group"] == "of all ranks":
                dist.all_reduce(gradient)
            else:
                dist.all_reduce(gradient, group=alike[rank.rank % 2])
        rank.snapshot(step=step, dense_grad=gradients(dense), expert_grad=gradients(mine))
        optimizer.step()
        rank.snapshot(step=step, dense=weights(dense), expert=weights(mine))


def experts_of(t: Tables, arm: str, name: str, step: int) -> Vector:
    """Return what both experts have, wherever they live, one behind the other."""
    import numpy as np

    t.require(arm)
    return np.concatenate([t.snapshot(arm, name, step=step, rank=r) for r in t.ranks(arm)[:2]])


def near(t: Tables, found: Vector, due: Vector, name: str, step: int) -> Finding:
    """Say whether what both experts have is what is due, up to rounding."""
    gap = relative_l2(found, due)
    floor = rounding(t, "one_process", name, step=step)
    return is_rounding(gap, floor, f"{name} after step {step} is {gap:.2g} off", "relative L2")


def like_one(t: Tables, arm: str) -> Finding:
    """Say whether both experts of an arm end as in one process."""
    last = t.root_params["steps"] - 1
    found, due = (experts_of(t, a, "expert", last) for a in (arm, "one_process"))
    return near(t, found, due, "expert", last)


@symptom(HOLDS, source="NVIDIA/Megatron-LM#1628")
def experts_off(t: Tables) -> Finding:
    """Reduced over all ranks the experts end other than in one process."""
    return negated(like_one(t, "all_ranks"))


@mechanism(HOLDS)
def sum_of_both(t: Tables) -> Finding:
    """Each expert's first gradient is the sum of both."""
    import numpy as np

    first, second = np.split(experts_of(t, "one_process", "expert_grad", 0), 2)
    found = experts_of(t, "all_ranks", "expert_grad", 0)
    return near(t, found, np.tile(first + second, 2), "expert_grad", 0)


@symptom(HOLDS)
def all_ranks_equal(t: Tables) -> Finding:
    """All ranks then have the same gradient of whatever expert they hold."""
    return ranks_agree(t, "all_ranks", "expert_grad")


@symptom(REFUTED)
def dense_shows_it(t: Tables) -> Finding:
    """The first gradient of the dense layer is off as well."""
    return negated(matches(t, "all_ranks", "one_process", "dense_grad", step=0))


@remedy(HOLDS, source="NVIDIA/Megatron-LM#1628")
def group_of_alike(t: Tables) -> Finding:
    """Reduced over the ranks that hold the same expert, everything is one process."""
    return all_of(like_one(t, "alike"), matches(t, "alike", "one_process", "dense"))


SCENARIO = Scenario(
    title="Expert gradients reduced over the dense layers' group: unlike experts are added up",
    family="parallel layouts",
    cause="wrong_group_after_remesh",
    params=Params,
    run=run,
    check=split_equally("batch"),
    headline=says(
        sum_of_both=("each expert gets the gradients of both", "each expert gets another gradient"),
        all_ranks_equal=("all ranks get the same", "ranks differ"),
        dense_shows_it=("the dense layer shows it", "the dense layer is right at first"),
    ),
    arms=(
        one_process("one process, both experts", group="of alike"),
        faulty("all_ranks", "the group of all ranks", group="of all ranks"),
        fixed("alike", "the group of one expert", group="of alike"),
    ),
    claims=(experts_off, sum_of_both, all_ranks_equal, dense_shows_it, group_of_alike),
)
