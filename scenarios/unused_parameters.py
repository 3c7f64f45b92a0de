"""A layer that no forward pass uses: one update without any averaging, and only then an error.

DDP waits for a gradient of every parameter that it was given. Of a head that is kept for later none
comes, its bucket is never complete, and no gradient at all is averaged: not in that bucket, not in
any other. Backward ends without a word and the optimizer makes its update. The next forward raises
"Expected to have finished reduction", which training scripts that save after every step, or make
one step in a test, never reach. Reported in pytorch/pytorch#112152, catalyst-team/catalyst#1110,
facebookresearch/fairseq2#484.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.arms import faulty, fixed, one_process
from harness.claims import HOLDS, REFUTED, mechanism, remedy, symptom
from harness.findings import all_of, counts, like_one_process, matches, negated, ranks_agree, says
from harness.scenario import Arm, Finding, Scenario, at_least, holds, refuted
from scenarios._models import equal_shares

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """Types only; values and what they mean are in conf/scenario/unused_parameters.yaml."""

    steps: int = field(metadata=at_least(2))
    batch: int = field(metadata=at_least(1))
    lr: float = field(metadata=at_least(1e-6))
    permutations: int = field(metadata=at_least(0))


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Train a net with a head that is not used yet; what is done about the head differs."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from harness.collectives import count_collectives
    from scenarios._models import FEATURES, gradients, mlp, net, rows, weights

    spare = mlp((FEATURES, 3), generator=rank.generator("spare")).to(rank.device)

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = net(rank), spare

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.used(x)
            if arm["spare"] == "touched":
                output = output + 0.0 * sum(q.sum() for q in self.spare.parameters())
            return output

    spare.requires_grad_(arm["spare"] != "frozen")
    flags = {"flag": {"find_unused_parameters": True}, "static": {"static_graph": True}}
    model = DistributedDataParallel(TwoHeads(), **flags.get(arm["spare"], {}))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=p.lr)
    x, y = rows(rank, p.batch)
    for step in range(p.steps):
        optimizer.zero_grad()
        try:
            output = model(x)
        except RuntimeError as error:
            rank.log(step=step, phase="raised", error=str(error).partition(". ")[0])
            return
        with count_collectives() as calls:
            torch.nn.functional.mse_loss(output, y).backward()
        rank.snapshot(step=step, gradients=gradients(model.module.used))
        optimizer.step()
        rank.log(step=step, reductions=calls.count("all_reduce"))
        rank.snapshot(step=step, weights=weights(model.module.used))


@symptom(HOLDS, source="pytorch/pytorch#112152")
def update_is_local(t: Tables) -> Finding:
    """The first update uses each rank's own gradients, also of the layers that are used."""
    away = negated(matches(t, "unused", "one_process", "weights", step=0))
    return all_of(negated(ranks_agree(t, "unused", "gradients")), away)


@mechanism(HOLDS)
def nothing_is_reduced(t: Tables) -> Finding:
    """Its backward issues no all-reduce."""
    return counts(t, "unused", "reductions", 0, "all-reduces in backward")


@symptom(REFUTED)
def raises_first(t: Tables) -> Finding:
    """An error comes before a wrong update is made."""
    t.require("unused")
    errors = [t.series("unused", "error", phase="raised", rank=r) for r in t.ranks("unused")]
    updates = [len(t.series("unused", "weights.digest", rank=r)) for r in t.ranks("unused")]
    reason = (
        f"the forward of step {min(errors[0])} raises on {len(errors)} ranks, not the one before"
    )
    return (refuted if min(updates) else holds)(reason, effect=float(min(updates)), unit="updates")


@remedy(HOLDS)
def flag(t: Tables) -> Finding:
    """find_unused_parameters=True: N ranks train like one process."""
    return like_one_process(t, "flag")


@remedy(HOLDS)
def static_graph(t: Tables) -> Finding:
    """static_graph=True, which finds out in the first pass what is used: the same."""
    return like_one_process(t, "static")


@remedy(HOLDS)
def touch_or_freeze(t: Tables) -> Finding:
    """Adding 0 * each unused parameter to the output, or freezing them first: the same."""
    return all_of(*(like_one_process(t, arm) for arm in ("touched", "frozen")))


SCENARIO = Scenario(
    title="A layer that no forward pass uses: an update without averaging, and then the error",
    family="synchronisation",
    cause="unused_parameters",
    params=Params,
    run=run,
    check=equal_shares,
    headline=says(
        update_is_local=("the first update is each rank's own", "all updates are averaged"),
        nothing_is_reduced=("nothing is reduced", "some of it is reduced"),
        raises_first=("an error prevents it", "the error comes a step too late"),
        flag=("find_unused_parameters helps", "find_unused_parameters does not help"),
    ),
    arms=(
        one_process("one process, flag", spare="flag"),
        faulty("unused", "DDP(net)", spare="unused"),
        fixed("flag", "find_unused_parameters=True", spare="flag"),
        fixed("static", "static_graph=True", spare="static"),
        fixed("touched", "plus 0 * all parameters", spare="touched"),
        fixed("frozen", "the unused head is frozen", spare="frozen"),
    ),
    claims=(update_is_local, nothing_is_reduced, raises_first, flag, static_graph, touch_or_freeze),
)
