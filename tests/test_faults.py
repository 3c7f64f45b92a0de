"""Ranks, disks and users that fail: one clear message, the records so far, no orphan, a verdict."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from harness import record
from launch import runs
from tests.launching import (
    GIVE_UP_S,
    MARK,
    ROOT,
    assert_no_orphans,
    environment,
    heed_ctrl_c,
    launch,
    layouts,
    processes,
    verdict_of,
    wait_for,
)

AFTER = "after step 2, phase after"
SAID = {
    "raise": "arm raise: rank 1 raised ValueError: a fault on purpose at faults.py:",
    "exit": f"arm exit: rank 1 exited with code 7 {AFTER}",
    "exit0": f"arm exit0: rank 1 left with code 0 before its arm was through {AFTER}",
    "kill": f"arm kill: rank 1 was killed by signal 9 (SIGKILL) {AFTER}",
    "hang": "arm hang: nothing recorded for the set time limit (launch.arm_timeout_s); "
    f"rank 1 {AFTER} stands at threading.py:",
    "stuck": "arm stuck: nothing recorded for the set time limit (launch.arm_timeout_s); "
    f"rank 1 {AFTER} stands at torch/distributed/distributed_c10d.py:",
}
UNDER_TORCHRUN = ("raise", "kill", "hang")
CASES = [("warm", fault) for fault in SAID] + [("torchrun", fault) for fault in UNDER_TORCHRUN]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Return what each engine left of a run in which rank after rank fails."""
    kept = {}

    def run(engine):
        if engine not in kept:
            active = (*SAID, "flood") if engine == "warm" else UNDER_TORCHRUN
            results = tmp_path_factory.mktemp(engine)
            kept[engine] = launch(
                *("scenario=faults", "gpus=3" if engine == "warm" else "gpus=2"),
                *(f"launch={engine}", "launch.arm_timeout_s=3"),
                f"scenario.active=[{','.join(active)}]",
                results=results,
            )
            assert_no_orphans(results)
        return kept[engine]

    return run


@pytest.mark.parametrize(("engine", "fault"), CASES)
def test_the_message_names_rank_and_step_and_how(broken, engine, fault):
    failures = broken(engine).verdict["failures"]

    assert [line for line in failures if line.startswith(SAID[fault])] != [], failures
    assert len([line for line in failures if line.startswith(f"arm {fault}:")]) == 1


@pytest.mark.parametrize(("engine", "fault"), CASES)
def test_what_was_recorded_before_a_fault_is_kept(broken, engine, fault):
    stream = record.read(broken(engine).layout, fault, 1)

    assert [row.step for row in stream.rows] == [1, 2]
    assert stream.end == ("failed" if fault == "raise" else None)


@pytest.mark.parametrize("engine", ["warm", "torchrun"])
def test_arms_behind_a_fault_still_run(broken, engine):
    run = broken(engine)
    whole = ["flood", "sound"] if engine == "warm" else ["exit", "exit0", "stuck", "flood", "sound"]
    found = {item["claim"]: item["outcome"] for item in run.verdict["findings"]}

    assert [name for name, outcome in found.items() if outcome == "holds"] == whole
    for name in whole:
        assert record.read(run.layout, name, 1).end == "completed"


@pytest.mark.parametrize("engine", ["warm", "torchrun"])
def test_a_run_with_failed_ranks_is_inconclusive_and_judged_so_again(broken, engine):
    run = broken(engine)

    assert (run.code, run.verdict["exit_code"], run.verdict["conclusion"]) == (
        *(11, 11),
        "inconclusive",
    )
    assert run.verdict["headline"].endswith("of 8 arms came through.")
    assert runs.differences(runs.judge(run.layout)) == []
    assert runs.judge(run.layout).verdict.failures == tuple(run.verdict["failures"])
    assert "INCONCLUSIVE" in run.out


def test_exit_codes_and_last_words_of_every_rank_are_on_record(broken):
    layout = broken("warm").layout
    batches = {batch["arms"][0]: batch for batch in json.loads(layout.ranks.read_text())}
    codes = {name: [e["code"] for e in batch["exits"]] for name, batch in batches.items()}

    assert codes["exit"][1] == 7
    assert codes["exit0"][1] == 0
    assert codes["kill"][1] == -signal.SIGKILL
    assert codes["raise"][1] == 1
    assert codes["hang"] == [None, None, None]
    message = json.loads(layout.error(0, 1).read_text())["message"]
    assert "a fault on purpose" in message["message"]


def test_five_megabytes_of_output_go_into_the_log_of_their_rank(broken):
    layout = broken("warm").layout
    number = len(json.loads(layout.ranks.read_text())) - 1

    assert layout.log(number, 1).stat().st_size == 5_000_001
    assert layout.log(number, 0).stat().st_size == 0


def test_an_arm_cut_off_by_the_end_of_another_one_is_run_again(tmp_path):
    flag = tmp_path / "flag"

    run = launch("scenario=singles", f"scenario.flag={flag}", "gpus=2", results=tmp_path / "r")

    assert run.code == 11
    (said,) = run.verdict["failures"]
    assert said.startswith("arm guilty: rank 1 was killed by signal 9 (SIGKILL) after step 1;")
    for arm in ("innocent", "after"):
        stream = record.read(run.layout, arm, 0)
        assert ([row.step for row in stream.rows], stream.end) == ([1, 2], "completed")
    assert record.read(run.layout, "guilty", 0).end is None


def begin(results, *arguments, **more):
    """Start a launcher as a shell would, in a group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "launch", *arguments, f"results={results}"],
        cwd=ROOT,
        env=environment(**{MARK: str(results), **more}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )


def hanging(results, engine):
    """Start a run, and return it once its rank 1 hangs."""
    arguments = ("scenario=faults", "scenario.active=[hang]", f"launch={engine}", "gpus=2")
    parent = begin(results, *arguments)

    def hangs():
        assert parent.poll() is None, parent.communicate()
        found = layouts(results)
        stream = record.read(found[0], "hang", 1) if found else None
        return stream and [row.step for row in stream.rows] == [1, 2]

    wait_for(hangs, "rank 1 to hang")
    return parent


def test_ctrl_c_while_the_warm_server_imports_prints_no_traceback(tmp_path):
    # torch is a module that says it is being imported, and then never ends.
    (tmp_path / "torch.py").write_text(
        "import pathlib, signal\n"
        "pathlib.Path(__file__).with_name('there').touch()\n"
        "signal.pause()\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    code = "import launch.preload"
    server = subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    )
    wait_for((tmp_path / "there").exists, "the import to begin")

    server.send_signal(signal.SIGINT)
    _, err = server.communicate(timeout=GIVE_UP_S)

    assert server.returncode == -signal.SIGINT
    assert err == ""


@pytest.mark.parametrize(
    ("engine", "number", "whom"),
    [
        ("warm", signal.SIGINT, "group"),
        ("warm", signal.SIGTERM, "parent"),
        ("torchrun", signal.SIGINT, "group"),
    ],
)
def test_an_interrupted_run_says_so_and_leaves_nobody(tmp_path, engine, number, whom):
    parent = hanging(tmp_path, engine)

    (os.killpg if whom == "group" else os.kill)(parent.pid, number)
    _, err = parent.communicate(timeout=GIVE_UP_S)

    assert parent.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    (layout,) = layouts(tmp_path)
    verdict = verdict_of(layout)
    assert verdict["conclusion"] == "inconclusive"
    assert "interrupted" in verdict["failures"][0]
    outcomes = {item["claim"]: item["outcome"] for item in verdict["findings"]}
    assert (outcomes["raise"], outcomes["hang"], outcomes["sound"]) == (
        "holds",
        "unknown",
        "unknown",
    )
    assert_no_orphans(tmp_path)


@pytest.mark.parametrize("engine", ["warm", "torchrun"])
def test_ranks_and_servers_die_with_a_launcher_that_is_killed(tmp_path, engine):
    parent = hanging(tmp_path, engine)
    # The launcher, a server or an agent, and two ranks.
    assert len(processes(tmp_path)) >= 4

    parent.kill()
    parent.communicate(timeout=GIVE_UP_S)

    assert_no_orphans(tmp_path)
    (layout,) = layouts(tmp_path)
    assert not layout.verdict.exists()
    judged = runs.judge(layout)
    assert judged.verdict.conclusion.exit_code == 11
    assert "never came to its end" in judged.verdict.failures[0]


def test_two_runs_at_once_into_the_same_results_do_not_meet(tmp_path):
    pair = [begin(tmp_path, "scenario=probe", f"seed={seed}") for seed in (1, 2)]
    said = [run.communicate(timeout=GIVE_UP_S) for run in pair]

    assert [run.returncode for run in pair] == [0, 0], said
    found = layouts(tmp_path)
    assert len(found) == 2
    assert {json.loads(layout.plan.read_text())["seed"] for layout in found} == {1, 2}
    for layout in found:
        assert runs.differences(runs.judge(layout)) == []
    assert_no_orphans(tmp_path)


@pytest.mark.parametrize("engine", ["warm", "torchrun"])
def test_a_port_that_is_taken_is_named(tmp_path, engine):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = launch("scenario=probe", f"launch={engine}", f"launch.port={port}", results=tmp_path)

    assert run.code == 12
    assert f"crossrank: port {port} is taken on this machine" in run.err
    assert "type launch.port=0" in run.err
    assert run.verdict["conclusion"] == "inconclusive"
    assert f"port {port} is taken" in run.verdict["failures"][0]
    assert_no_orphans(tmp_path)


def test_a_free_port_that_was_chosen_is_used_again_and_again(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    for name in ("first", "while the connections of the first linger"):
        run = launch("scenario=probe", f"launch.port={port}", results=tmp_path / name)

        assert run.code == 0, run.err


def test_results_that_are_no_directory_are_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")

    run = launch("scenario=probe", results=file / "results")

    assert run.code == 12
    assert f"cannot make a run directory in {file}/results/probe: " in run.err
    assert "type results=DIR" in run.err
    assert file.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_results_without_write_permission_are_named(tmp_path):
    tmp_path.chmod(0o500)

    run = launch("scenario=probe", results=tmp_path)

    assert run.code == 12
    assert "Permission denied" in run.err


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own that a test can fill."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)], capture_output=True
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a small file system here: {mount.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk, *, leave=0):
    """Fill a disk up to `leave` bytes."""
    with (disk / "ballast").open("wb") as ballast:
        space = os.statvfs(disk)
        ballast.write(b"x" * max(0, space.f_bavail * space.f_bsize - leave))


def test_a_disk_that_is_full_while_recording(small_disk):
    run = launch("scenario=probe", "scenario.steps=20000", "gpus=2", results=small_disk)

    assert run.code in (11, 12), run.err
    said = run.out + run.err
    assert "No space left on device" in said
    layout = run.layout
    kept = record.read(layout, "alone", 0) or record.read(layout, "sum", 0)
    assert len(kept.rows) > 100
    assert [row.step for row in kept.rows] == list(range(1, len(kept.rows) + 1))
    assert_no_orphans(small_disk)


def test_a_disk_that_is_full_before_the_verdict(small_disk):
    parent = hanging(small_disk, "warm")
    fill(small_disk)

    os.kill(parent.pid, signal.SIGTERM)
    _, err = parent.communicate(timeout=GIVE_UP_S)

    assert parent.returncode in (12, 130)
    assert "No space left on device" in err
    assert "Traceback" not in err
    (layout,) = layouts(small_disk)
    assert not layout.verdict.exists()
    assert [row.step for row in record.read(layout, "hang", 1).rows] == [1, 2]
    assert [path.name for path in layout.root.glob(".*")] == []
    assert_no_orphans(small_disk)


def test_a_run_directory_that_is_removed_in_mid_run(tmp_path):
    parent = hanging(tmp_path, "warm")
    (layout,) = layouts(tmp_path)
    shutil.rmtree(layout.root)

    os.kill(parent.pid, signal.SIGTERM)
    _, err = parent.communicate(timeout=GIVE_UP_S)

    assert parent.returncode in (12, 130)
    assert "Traceback" not in err
    assert_no_orphans(tmp_path)


def test_a_judge_that_throws_makes_its_claim_unknown(tmp_path):
    run = launch("scenario=probe", "scenario.fault=judge", "gpus=2", results=tmp_path)

    assert run.code == 11
    found = {item["claim"]: item for item in run.verdict["findings"]}
    assert found["sums"]["outcome"] == "unknown"
    assert "ZeroDivisionError: a judge on purpose" in found["sums"]["reason"]
    assert found["agree"]["outcome"] == "holds"
    trace = run.layout.judge_errors.read_text()
    assert "claim sums" in trace
    assert "ZeroDivisionError: a judge on purpose" in trace
    assert "judge_errors.txt" in run.out
