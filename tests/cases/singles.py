"""Two arms of one process side by side: one dies while the other, innocent one is half through."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.scenario import Arm, Claim, Finding, Kind, Outcome, Role, Scenario, holds

if TYPE_CHECKING:
    from harness.rank import Rank
    from harness.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Params:
    """What the tests turn."""

    flag: str


def run(rank: Rank, arm: Arm, p: Params) -> None:
    """Be cut off at the first attempt, die, or run through."""
    flag = Path(p.flag)
    rank.log(step=1, start=time.time())
    if arm.name == "innocent" and not flag.exists():
        flag.touch()
        threading.Event().wait()
    if arm.name == "guilty":
        while not flag.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    rank.log(step=2, end=time.time())


def _through(tables: Tables) -> Finding:
    tables.require("innocent", "after")
    return holds("both came through")


def headline(findings: Mapping[str, Finding]) -> str:
    """Say what is true."""
    return f"Innocent arms come through: {findings['through'].outcome.value}."


SCENARIO = Scenario(
    title="One arm dies beside another one",
    family="probe",
    cause="probe",
    claims=(
        Claim(
            name="through",
            kind=Kind.SYMPTOM,
            text="Arms that did not fail come through.",
            expects=Outcome.HOLDS,
            judge=_through,
        ),
    ),
    arms=(
        Arm(name="innocent", role=Role.REFERENCE, about="cut off once", ranks=1),
        Arm(name="guilty", role=Role.FAULTY, about="dies", ranks=1),
        Arm(name="after", role=Role.CONTROL, about="all ranks"),
    ),
    params=Params,
    run=run,
    headline=headline,
)
