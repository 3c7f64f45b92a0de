"""A scenario that can be told to go wrong: what the launcher's own tests run.

Two ranks all-reduce their rank numbers; the faulty arm leaves one of them out. `fault` makes one
rank raise, exit, die, or stand still at a chosen step, as programs do.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.scenario import (
    Arm,
    Claim,
    Finding,
    Kind,
    Outcome,
    Plot,
    Role,
    Scenario,
    at_least,
    holds,
    one_of,
    refuted,
    unknown,
)

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables

FAULTS = ("none", "raise", "exit", "kill", "hang", "exit0", "flood", "judge")
SET = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
"""Variables whose values every launcher must agree on."""


@dataclass(frozen=True, kw_only=True)
class Params:
    """What the tests turn."""

    steps: int = field(metadata=at_least(1))
    fault: str = field(metadata=one_of(*FAULTS))
    fault_rank: int
    fault_step: int
    scale: float
    sizes: list[int] = field(metadata=at_least(1))
    label: str | None


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """All-reduce the rank numbers."""
    import torch
    import torch.distributed as dist

    if arm.isolated:
        rank.log(step=0, phase="environment", **{name: os.environ.get(name) for name in SET})
        rank.log(step=0, phase="environment", names=" ".join(sorted(os.environ)))
    for step in range(1, p.steps + 1):
        value = torch.tensor([float(rank.rank) * p.scale])
        total = value.clone()
        if arm.role is Role.FAULTY and rank.rank == 0:
            total += 1.0
        dist.all_reduce(total)
        rank.log(step=step, total=total, mine=value)
        if arm.name == "sum" and rank.rank == p.fault_rank and step == p.fault_step:
            _go_wrong(p.fault)
    rank.digest(step=p.steps, phase="end", total=total)


def _go_wrong(fault: str) -> None:
    import threading

    if fault == "raise":
        raise ValueError("a fault on purpose")
    if fault == "exit":
        os._exit(1)
    if fault == "exit0":
        os._exit(0)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        threading.Event().wait()
    if fault == "flood":
        print("x" * 5_000_000)


def _sum(tables: Tables) -> Finding:
    tables.require("sum")
    if tables.plan.params["fault"] == "judge":
        raise ZeroDivisionError("a judge on purpose")
    count = tables.plan.world_size
    expected = count * (count - 1) / 2 * tables.plan.params["scale"]
    got = tables.last("sum", "total")
    evidence = {"expected": expected, "got": got}
    if got != expected:
        return refuted(
            f"the sum is {got}, not {expected}", effect=abs(got - expected), evidence=evidence
        )
    return holds(f"the sum is {got}", effect=0.0, evidence=evidence)


def _agree(tables: Tables) -> Finding:
    tables.require("sum", "faulty")
    if tables.plan.params["scale"] == 0.0:
        return unknown("scale=0 makes every sum zero: nothing can differ")
    first = tables.first_divergence("faulty")
    if first:
        return refuted(f"ranks {first.ranks} differ at step {first.step}")
    return holds("all ranks hold the same sum")


def headline(findings: Mapping[str, Finding]) -> str:
    """Say what is true."""
    return f"An all-reduce sums: {findings['sums'].outcome.value}."


SCENARIO = Scenario(
    title="An all-reduce of rank numbers, with faults on demand",
    family="probe",
    cause="probe",
    claims=(
        Claim(
            name="sums",
            kind=Kind.MECHANISM,
            text="An all-reduce gives the sum of what the ranks put in.",
            expects=Outcome.HOLDS,
            judge=_sum,
        ),
        Claim(
            name="agree",
            kind=Kind.SYMPTOM,
            text="All ranks hold the same sum, even a wrong one.",
            expects=Outcome.HOLDS,
            judge=_agree,
        ),
    ),
    arms=(
        Arm(name="alone", role=Role.REFERENCE, about="one process", ranks=1, repeats=2),
        Arm(name="sum", role=Role.FIXED, about="every rank's number"),
        Arm(name="faulty", role=Role.FAULTY, about="rank 0 adds one too many"),
        Arm(name="isolated", role=Role.CONTROL, about="the same in new processes", isolated=True),
    ),
    params=Params,
    run=run,
    headline=headline,
    min_ranks=1,
    plots=(Plot(metric="total", title="Sum by step"),),
)
