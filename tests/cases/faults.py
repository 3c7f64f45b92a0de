"""Every way a rank can fail, one arm each: what the fault tests run.

Which arms really fail is a parameter; the others run as `sound` does. All arms share their
processes, so each failure shows what becomes of the arms behind it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.scenario import Arm, Claim, Finding, Kind, Outcome, Role, Scenario, holds

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

FAULTS = ("raise", "exit", "exit0", "kill", "hang", "stuck", "flood")
STEPS, RANK, STEP = 3, 1, 2
"""How many steps an arm has, who goes wrong, and after which step."""


@dataclass(frozen=True, kw_only=True)
class Params:
    """What the tests turn."""

    active: list[str]


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """All-reduce a one per rank, until the fault."""
    import torch
    import torch.distributed as dist

    for step in range(1, STEPS + 1):
        total = torch.ones(1)
        dist.all_reduce(total)
        rank.log(step=step, phase="after", total=total)
        if arm.name in p.active and rank.rank == RANK and step == STEP:
            _go_wrong(arm.name)


def _go_wrong(fault: str) -> None:
    if fault == "raise":
        raise ValueError("a fault on purpose")
    if fault == "exit":
        os._exit(7)
    if fault == "exit0":
        os._exit(0)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        threading.Event().wait()
    if fault == "stuck":
        _enter_a_collective_alone()
    if fault == "flood":
        print("x" * 5_000_000)


def _enter_a_collective_alone() -> None:
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1), src=0, tag=99)


def _through(arm: str) -> Claim:
    def judge(tables: Tables) -> Finding:
        tables.require(arm)
        return holds(f"the sum is {tables.last(arm, 'total')}")

    return Claim(
        name=arm,
        kind=Kind.SYMPTOM,
        text=f"Every rank of arm {arm} comes to its end.",
        expects=Outcome.HOLDS,
        judge=judge,
    )


def headline(findings: Mapping[str, Finding]) -> str:
    """Count who came through."""
    through = [name for name, finding in findings.items() if finding.outcome is Outcome.HOLDS]
    return f"{len(through)} of {len(findings)} arms came through."


SCENARIO = Scenario(
    title="Ranks that fail in every way there is",
    family="probe",
    cause="probe",
    claims=tuple(_through(name) for name in (*FAULTS, "sound")),
    arms=(
        *(Arm(name=fault, role=Role.FAULTY, about=f"rank {RANK}: {fault}") for fault in FAULTS),
        Arm(name="sound", role=Role.REFERENCE, about="nothing fails"),
    ),
    params=Params,
    run=run,
    headline=headline,
)
