"""Two scenarios that differ in the number of arms only: each trains a small net under DDP."""

from __future__ import annotations

from pathlib import Path

ARMS = 21
MODULE = '''
"""A small net under DDP, {arms} times."""
from __future__ import annotations

from dataclasses import dataclass

from harness.scenario import Arm, Claim, Kind, Outcome, Role, Scenario, holds, refuted


@dataclass(frozen=True, kw_only=True)
class Params:
    steps: int


def run(rank, arm, p):
    import torch
    from torch.nn.parallel import DistributedDataParallel

    net = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(p.steps):
        optimizer.zero_grad()
        loss = net(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        rank.log(step=step, loss=loss)
    rank.digest(step=p.steps, weight=net.module.weight)


def judge(tables):
    for number in range({arms}):
        tables.require(f"arm{{number}}")
        if tables.first_divergence(f"arm{{number}}"):
            return refuted("the ranks differ")
    return holds("the ranks are equal")


SCENARIO = Scenario(
    title="bench",
    family="bench",
    cause="bench",
    claims=(
        Claim(name="equal", kind=Kind.SYMPTOM, text="equal", expects=Outcome.HOLDS, judge=judge),
    ),
    arms=tuple(Arm(name=f"arm{{n}}", role=Role.FIXED, about="the same") for n in range({arms})),
    params=Params,
    run=run,
    headline=lambda findings: "",
)
'''


def write_scenario(folder: Path) -> None:
    """Write the scenarios `one_arm` and `many_arms` into a folder for CROSSRANK_SCENARIOS."""
    conf = folder / "conf" / "scenario"
    conf.mkdir(parents=True)
    for name, arms in (("one_arm", 1), ("many_arms", ARMS)):
        (folder / f"{name}.py").write_text(MODULE.format(arms=arms))
        (conf / f"{name}.yaml").write_text("steps: 4\n")
