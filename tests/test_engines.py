"""The same plan on every engine: same environment, same records, same verdict, no abort at exit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from harness import record
from harness.plan import Layout, Plan
from launch import runs
from tests.launching import GIVE_UP_S, ROOT, assert_no_orphans, environment, launch, metrics

ARMS = {"alone": 1, "sum": 3, "faulty": 3, "isolated": 3}
ONCE_PER_LAUNCH = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    return launch("scenario=probe", "gpus=3", "launch=warm", results=tmp_path_factory.mktemp("w"))


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory):
    results = tmp_path_factory.mktemp("a results directory")
    return launch("scenario=probe", "gpus=3", "launch=torchrun", results=results)


@pytest.fixture(scope="module")
def by_hand(warm, tmp_path_factory):
    """Run the plan of the warm run as a person would, into a directory of its own."""
    out = tmp_path_factory.mktemp("hand") / "run"
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    done = subprocess.run(
        [*argv, "-m", "launch.rank", str(warm.layout.plan), "--out", str(out)],
        cwd=ROOT,
        env=environment(GLOO_SOCKET_IFNAME="lo"),
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert done.returncode == 0, done.stderr
    return Layout(out)


def found(layout, arms=ARMS):
    return [row for row in metrics(layout, arms) if "environment" not in row]


def variables(layout, rank):
    stream = record.read(layout, "isolated", rank)
    assert stream is not None
    values, names = (row.metrics for row in stream.rows if row.phase == "environment")
    return dict(values), set(str(names["names"]).split())


def test_both_engines_come_to_the_same_verdict(warm, torchrun):
    for run in (warm, torchrun):
        assert (run.code, run.verdict["conclusion"]) == (0, "as_expected")
        assert run.verdict["failures"] == []
    for key in ("findings", "headline", "scenario"):
        assert warm.verdict[key] == torchrun.verdict[key]


def test_both_engines_give_the_same_records(warm, torchrun):
    rows = found(warm.layout)

    assert len(rows) == sum(ARMS.values()) * (3 + 1 + 1) + 4
    assert rows == found(torchrun.layout)


def test_a_launch_by_hand_gives_the_same_records(warm, by_hand):
    assert found(warm.layout) == found(by_hand)


def test_a_launch_by_hand_leaves_the_run_it_repeats_alone(warm, by_hand):
    assert runs.differences(runs.judge(warm.layout)) == []
    assert not (by_hand.root / "plan.json").exists()


@pytest.mark.parametrize("rank", range(3))
def test_warm_ranks_see_the_variables_torchrun_sets(warm, torchrun, rank):
    (ours, names), (theirs, legal) = (variables(run.layout, rank) for run in (warm, torchrun))

    assert ours == theirs | {"MASTER_ADDR": ours["MASTER_ADDR"]}
    assert ours["RANK"] == ours["LOCAL_RANK"] == str(rank)
    assert ours["MASTER_ADDR"] in ("127.0.0.1", "localhost", theirs["MASTER_ADDR"])
    assert legal - names == set()
    # Set by torch itself, when the server imports what ranks would import lazily.
    assert {name for name in names - legal if not name.startswith("TORCHINDUCTOR_")} == set()


def test_each_arm_ran_in_the_processes_it_should(warm):
    pids = {
        arm: [record.read(warm.layout, arm, rank).header.pid for rank in range(ranks)]
        for arm, ranks in ARMS.items()
    }

    assert pids["sum"] == pids["faulty"]
    assert pids["alone"] == [pids["sum"][0]]
    assert len(set(pids["sum"])) == 3
    assert set(pids["isolated"]) & set(pids["sum"]) == set()


def test_the_batches_are_on_record_with_the_command_of_each(warm, torchrun):
    for run in (warm, torchrun):
        batches = json.loads(run.layout.ranks.read_text())
        assert [batch["arms"] for batch in batches] == [["alone", "sum", "faulty"], ["isolated"]]
        assert all("launch.rank" in batch["command"] for batch in batches)
        assert all(batch["exits"] == [] for batch in batches)


def test_torchrun_prints_the_command_it_runs(torchrun):
    plan = Plan.read(torchrun.layout.plan)
    line = next(line for line in torchrun.out.splitlines() if "torch.distributed.run" in line)

    assert f"--nproc-per-node={plan.world_size}" in line
    assert "--arms alone,sum,faulty --batch 0" in line
    assert f"'{torchrun.layout.plan}'" in line


def test_one_rank_is_enough_where_the_scenario_allows_it(tmp_path):
    run = launch("scenario=probe", "gpus=1", "launch=warm", results=tmp_path)

    assert run.code == 0, run.out
    assert record.read(run.layout, "isolated", 0).header.world_size == 1


def test_a_plan_for_three_ranks_refuses_two(warm, tmp_path):
    done = by_itself(warm.layout, tmp_path, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0")

    assert done.returncode == 2
    assert "the plan is for 3 ranks, this launch has 2" in done.stderr
    assert "--nproc-per-node=3" in done.stderr
    assert "Traceback" not in done.stderr


def test_records_are_never_overwritten_by_a_second_launch(warm):
    before = found(warm.layout)

    done = by_itself(warm.layout, warm.layout.root, RANK="0", WORLD_SIZE="3", LOCAL_RANK="0")

    assert done.returncode == 2
    assert f"{warm.layout.root} holds records of arm alone already" in done.stderr
    assert "type --out DIR" in done.stderr
    assert "Traceback" not in done.stderr
    assert found(warm.layout) == before


def test_an_arm_that_is_not_in_the_plan_is_named(warm, tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}

    done = by_itself(warm.layout, tmp_path, "--arms", "faluty", **place)

    assert done.returncode == 2
    assert "no arm 'faluty' in this plan; nearest: faulty" in done.stderr


def test_half_of_torchruns_variables_are_not_enough(warm, tmp_path):
    done = by_itself(warm.layout, tmp_path, RANK="0")

    assert done.returncode == 2
    assert (
        "RANK is set but WORLD_SIZE, LOCAL_RANK not: start the ranks with torchrun" in done.stderr
    )


def by_itself(layout, out, *arguments, **more):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    return subprocess.run(
        [sys.executable, "-m", "launch.rank", str(layout.plan), "--out", str(out), *arguments],
        cwd=ROOT,
        env=environment(**place, **more),
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )


MANY = """
import json, sys, tempfile
from pathlib import Path
from harness.plan import ArmPlan, Layout, Plan
from launch.engine import Progress, carry_out
from launch.warm import Warm

root, arms, ranks, times = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4]
params = {"steps": 3, "fault": "none", "fault_rank": 1, "fault_step": 2, "scale": 1.0}
params |= {"sizes": [1], "label": None}
engine, batches = Warm(), []
for number in range(int(times)):
    plan = Plan(
        run_id=f"r{number}", scenario="probe", params=params, world_size=ranks, device="cpu",
        arms=tuple(ArmPlan(name=a, ranks=1 if a == "alone" else ranks, repeats=1, isolated=False)
                   for a in arms),
        backend="gloo", seed=0, engine="warm", collective_timeout_s=60.0, arm_timeout_s=120.0,
    )
    layout = Layout(root / plan.run_id)
    layout.root.mkdir(parents=True)
    layout.plan.write_text(plan.to_json())
    batches += carry_out(plan, layout, engine, Progress(total=1))
engine.close()
print(json.dumps([len(batch.exits) for batch in batches]))
"""


@pytest.mark.parametrize("before", [None, "/somewhere/else"])
def test_the_warm_server_leaves_the_import_path_of_others_alone(before):
    program = """
import os
from launch.warm import Warm

engine = Warm()
before = os.environ.get("PYTHONPATH")
engine.heat()
print(os.environ.get("PYTHONPATH") == before)
engine.close()
"""
    kept = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=kept if before is None else kept | {"PYTHONPATH": before},
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert done.stdout.strip() == "True", done.stderr


def test_thirty_warm_runs_of_two_ranks_end_without_an_abort(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path), "sum", "2", "30"],
        cwd=ROOT,
        env=environment(CROSSRANK_TEST_MARK=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0] * 30
    logs = [path.read_text() for path in tmp_path.glob("*/logs/*.log")]
    assert len(logs) == 60
    assert [log for log in logs if log] == []
    assert_no_orphans(tmp_path)


def test_arms_of_one_process_are_dealt_over_the_ranks():
    names = ("a", "b", "all", "c", "d")
    plan = Plan.from_json(
        json.dumps(
            {
                **{"schema": 1, "run_id": "r", "scenario": "probe", "params": {}, "seed": 0},
                **{"world_size": 3, "device": "cpu", "backend": "gloo", "engine": "warm"},
                **{"collective_timeout_s": 1.0, "arm_timeout_s": 1.0},
                "arms": [
                    {"name": n, "ranks": 3 if n == "all" else 1, "repeats": 1, "isolated": False}
                    for n in names
                ],
            }
        )
    )

    assert plan.deal(names) == {"a": (0,), "b": (1,), "all": (0, 1, 2), "c": (2,), "d": (0,)}
    assert plan.deal(["c", "b"]) == {"c": (0,), "b": (1,)}
