"""The torchrun command line is a pure function of the plan, checked against files."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.plan import ArmPlan, Layout, Plan
from launch import torchrun

GOLDEN = Path(__file__).parent / "golden"
ACCEPT = "CROSSRANK_ACCEPT"
PLAN = Plan(
    run_id="20260101T000000Z-abcdef",
    scenario="probe",
    params={"steps": 3},
    arms=(
        ArmPlan(name="alone", ranks=1, repeats=2, isolated=False),
        ArmPlan(name="sum", ranks=4, repeats=1, isolated=False),
    ),
    world_size=4,
    device="cpu",
    backend="gloo",
    seed=0,
    engine="torchrun",
    collective_timeout_s=60.0,
    arm_timeout_s=120.0,
)
PLAIN = Layout(Path("results/probe/20260101T000000Z-abcdef"))
SPACED = Layout(Path("my results/it's $HOME/run 1"))


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("free_port", torchrun.command(PLAN, PLAIN, ["alone", "sum"], 0)),
        ("fixed_port", torchrun.command(PLAN, PLAIN, ["alone", "sum"], 0, port=29500)),
        ("later_batch", torchrun.command(PLAN, PLAIN, ["sum"], 2)),
        ("one_rank", torchrun.command(replace(PLAN, world_size=1), PLAIN, ["alone"], 0)),
        ("spaces", torchrun.command(PLAN, SPACED, ["sum"], 0, python="/opt/my python/bin/python")),
    ],
)
def test_the_command_is_the_accepted_one(name, argv):
    path = GOLDEN / f"torchrun_{name}.txt"
    text = "\n".join(argv) + "\n"
    if os.environ.get(ACCEPT):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    accepted = path.read_text(encoding="utf-8") if path.exists() else "(no such file)"
    assert text == accepted, (
        f"the command differs from {path}; if it is meant to, type\n"
        f"  {ACCEPT}=1 python -m pytest tests/test_torchrun.py\nand commit the file"
    )


@pytest.mark.parametrize("layout", [PLAIN, SPACED])
def test_what_is_printed_can_be_pasted_into_a_shell(layout):
    argv = torchrun.command(PLAN, layout, ["alone", "sum"], 0)

    assert shlex.split(torchrun.shown(argv)) == argv


def test_building_the_command_touches_nothing(tmp_path):
    before = dict(os.environ)

    torchrun.command(PLAN, Layout(tmp_path / "run"), ["sum"], 0, port=1)

    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before


AGENT = """
import subprocess, sys
ranks = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
print("started", flush=True)
sys.stdin.readline()
ranks[1].communicate()
print("one is gone", flush=True)
sys.stdin.readline()
ranks[0].communicate()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the children of the agent")
def test_a_rank_that_is_gone_before_anybody_asked_is_noticed(tmp_path):
    """The question is first put when records stop to grow, which is after a rank has died."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    ranks = torchrun.TorchrunRanks(agent, [], PLAN, Layout(tmp_path), ["sum"], 0)
    with agent:
        assert agent.stdout.readline() == "started\n"
        assert set(ranks.poll(0.0).values()) == {None}
        agent.stdin.write("\n")
        agent.stdin.flush()
        assert agent.stdout.readline() == "one is gone\n"
        assert ranks.leaving()
        agent.communicate("\n")
