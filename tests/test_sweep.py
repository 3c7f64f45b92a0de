"""`make sweep` as a person uses it: real ranks, failures, a second call, Ctrl-C, two at once."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.plan import Layout
from launch.runs import begun, read_json
from tests.launching import heed_ctrl_c

ROOT = Path(__file__).resolve().parent.parent
MODULE = '''
"""A loss that differs between ranks by `apart`, and a rank that raises or waits on demand."""
from __future__ import annotations
import os
from dataclasses import dataclass
from pathlib import Path
from harness.scenario import Arm, Claim, Kind, Outcome, Role, Scenario, holds, refuted

@dataclass(frozen=True, kw_only=True)
class Params:
    apart: float
    broken: str
    sizes: list[int]
    label: str | None

def run(rank, arm, p):
    for step in (1, 2):
        loss = 1.0 + step * p.apart * rank.rank + rank.repeat * 2.0**-40
        rank.log(step=step, loss=loss)
    if arm.name == "many" and rank.rank == 1:
        if p.broken.startswith("wait:"):
            import threading
            with open(p.broken[5:], "w") as pipe:
                pipe.write(f"{os.getpid()} {os.getppid()}")
            threading.Event().wait()
        elif p.broken and Path(p.broken).exists():
            raise ValueError("broken on purpose")

def judge(tables):
    gap = tables.last("many", "loss", rank=1) - tables.last("many", "loss", rank=0)
    return holds("apart", effect=gap, floor=2.0**-40) if gap else refuted("together", effect=0.0)

SCENARIO = Scenario(
    title="a loss", family="probe", cause="probe", params=Params, run=run, min_ranks=2,
    headline=lambda findings: "a headline",
    claims=(Claim(name="apart", kind=Kind.SYMPTOM, text="The ranks are apart.",
                  expects=Outcome.HOLDS, judge=judge),),
    arms=(Arm(name="one", role=Role.REFERENCE, about="", ranks=1, repeats=21),
          Arm(name="many", role=Role.FAULTY, about="")),
)
'''


@pytest.fixture
def sweep(tmp_path):
    """Return a function that runs one sweep of the scenario `swept` to its end."""
    (tmp_path / "cases" / "conf" / "scenario").mkdir(parents=True)
    (tmp_path / "cases" / "swept.py").write_text(MODULE)
    values = "apart: 0.25\nbroken: ''\nsizes: [1]\nlabel: null\n"
    (tmp_path / "cases" / "conf" / "scenario" / "swept.yaml").write_text(values)

    def start(*words: str) -> subprocess.Popen[str]:
        fixed = ["scenario=swept", f"results={tmp_path / 'results'}", "gpus=2", "device=cpu"]
        environment = os.environ | {"CROSSRANK_SCENARIOS": str(tmp_path / "cases")}
        return subprocess.Popen(
            [sys.executable, "-m", "launch", "-m", *fixed, *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )

    return start


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def table(root: Path, name: str = "table") -> list[dict[str, str]]:
    (path,) = (root / "results" / "sweeps").glob(f"*/{name}.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def directories(root: Path) -> list[Path]:
    runs = (path.parent for path in (root / "results" / "swept").glob("*/verdict.json"))
    return sorted(runs, key=begun)


def test_a_failed_and_a_refused_point_are_rows_and_only_the_missing_is_run_again(sweep, tmp_path):
    fault = tmp_path / "fault"
    fault.touch()
    words = ("scenario.apart=0.5,x,0.25", f"scenario.broken='',{fault}")
    code, out, err = end(sweep(*words))
    assert code == 11, err
    many = [row for row in table(tmp_path) if row["arm"] != "one"]
    states = ["as_expected", "failed", "refused", "refused", "as_expected", "failed"]
    assert [row["state"] for row in many] == states
    assert [row["scenario.apart"] for row in many] == ["0.5", "0.5", "x", "x", "0.25", "0.25"]
    assert [row["scenario.broken"] for row in many] == ["", str(fault)] * 3
    assert "broken on purpose" in many[1]["problem"]
    assert "scenario.apart='x' is not a number" in many[2]["problem"]
    assert many[2]["arm"] == many[2]["run"] == ""
    assert (many[0]["loss_gap_first"], many[0]["loss_gap_last"]) == ("0.5", "1.0")
    # the 20th repeat is 20 * 2^-40 away
    assert float(many[0]["loss_gap_last_floors"]) == 2.0**40 / 20
    assert (many[1]["loss_gap_last"], many[1]["exit_code"]) == ("", "11")
    assert len(directories(tmp_path)) == 4
    (page,) = (tmp_path / "results" / "sweeps").glob("*/sweep.html")
    assert "4 of 6 points have no sound run" in page.read_text()

    fault.unlink()
    before = directories(tmp_path)
    code, out, err = end(sweep(*words, "quiet=true"))
    assert code == 11, err
    assert out.strip() == str(page.with_name("table.csv"))
    assert len(set(directories(tmp_path)) - set(before)) == 2
    many = [row for row in table(tmp_path) if row["arm"] != "one"]
    assert [row["reused"] for row in many] == ["true", "false", "false", "false", "true", "false"]
    assert [row["state"] for row in many] == ["as_expected", "as_expected", *["refused"] * 2] + [
        "as_expected"
    ] * 2

    code, out, err = end(sweep("scenario.apart=0.5,0", "json=true"))
    assert code == 10, err
    told = json.loads(out)
    assert [point["state"] for point in told["points"]] == ["as_expected", "unexpected"]
    assert [point["reused"] for point in told["points"]] == [True, False]
    assert [row["outcome"] for row in told["findings"]] == ["holds", "refuted"]


def test_nothing_that_can_run_is_a_mistake_and_writes_nothing(sweep, tmp_path):
    code, _, err = end(sweep("gpus=0,1"))
    assert code == 2
    assert "gpus=0" in err
    assert "gpus=1" in err
    assert "Traceback" not in err
    assert not (tmp_path / "results").exists()


def test_a_dry_run_expands_every_form_of_values_and_writes_nothing(sweep, tmp_path):
    words = ("scenario.sizes=[1,2],[3]", "seed=range(1,3)", "scenario.label=choice(a,'b,c')")
    code, out, err = end(sweep(*words, "json=true", "dry_run=true"))
    assert code == 0, err
    points = json.loads(out)
    keys = ("scenario.sizes", "seed", "scenario.label")
    assert [tuple(point[key] for key in keys) for point in points] == [
        (sizes, seed, label) for sizes in ([1, 2], [3]) for seed in (1, 2) for label in ("a", "b,c")
    ]
    assert not (tmp_path / "results").exists()


def test_a_dry_run_says_which_points_exist(sweep, tmp_path):
    assert end(sweep("seed=1"))[0] == 0
    (run,) = directories(tmp_path)
    code, out, _ = end(sweep("seed=1,2", "dry_run=true"))
    assert code == 0
    first, second, counts = out.splitlines()[:3]
    assert str(run) in first
    assert second.endswith("to run")
    assert counts == "2 points: 1 exist, 1 to run, 0 cannot run"
    assert directories(tmp_path) == [run]


def alive(process: int) -> bool:
    """Say whether a process runs; one that has ended and is not yet collected does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which processes are left")
def test_ctrl_c_keeps_what_is_done_and_the_next_call_goes_on(sweep, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    words = ("seed=1,2", f"scenario.broken='','wait:{pipe}'")
    process = sweep(*words)
    with pipe.open() as told:  # opens when the rank does
        pids = [int(word) for word in told.read().split()]
    process.send_signal(signal.SIGINT)
    code, out, err = end(process)
    assert code == 130, err
    assert "the same command runs what is left" in out
    assert not [pid for pid in pids if alive(pid)]
    many = [row for row in table(tmp_path) if row["arm"] != "one"]
    assert [row["state"] for row in many] == ["as_expected", "interrupted", "not run", "not run"]
    assert len(table(tmp_path, "findings")) == 1
    (first, second) = directories(tmp_path)
    assert "interrupted" in read_json(Layout(second).verdict)["failures"][0]

    code, _, err = end(sweep("seed=1,2"))
    assert code == 0, err
    assert len(directories(tmp_path)) == 3
    assert first in directories(tmp_path)


def test_two_sweeps_at_once_do_not_hurt_each_other(sweep, tmp_path):
    words = ("seed=1,2,3",)
    processes = [sweep(*words), sweep(*words)]
    for code, _, err in [end(process) for process in processes]:
        assert code == 0, err
    rows = [row for row in table(tmp_path) if row["arm"] == "many"]
    assert [row["seed"] for row in rows] == ["1", "2", "3"]
    assert {row["loss_gap_last"] for row in rows} == {"0.5"}
    for run in directories(tmp_path):
        assert read_json(Layout(run).verdict)["conclusion"] == "as_expected"
    assert 3 <= len(directories(tmp_path)) <= 6
    assert not list((tmp_path / "results").rglob(".*"))


def test_engines_are_points_of_their_own(sweep, tmp_path):
    assert end(sweep("seed=1"))[0] == 0
    code, out, err = end(sweep("launch=warm,torchrun", "seed=1", "json=true"))
    assert code == 0, err
    engines = [
        json.loads((run / "plan.json").read_text())["engine"] for run in directories(tmp_path)
    ]
    assert engines == ["warm", "torchrun"]
    gaps: list[Any] = [row["loss_gap_last"] for row in json.loads(out)["arms"]]
    assert gaps == [None, 0.5] * 2


def test_a_prepared_sweep_brings_its_scenario_and_the_command_line_wins(tmp_path):
    words = ["sweep=logsoftmax_imbalance", "scenario.imbalance=0.1", "dry_run=true", "json=true"]
    answer = subprocess.run(
        [sys.executable, "-m", "launch", "-m", *words, f"results={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    points = json.loads(answer.stdout)
    assert [(point["gpus"], point["seed"]) for point in points] == [
        (gpus, seed) for gpus in (2, 4) for seed in (1, 2, 3)
    ]
    assert not any("scenario.imbalance" in point for point in points)


@pytest.mark.parametrize("path", sorted((ROOT / "conf" / "sweep").glob("*.yaml")), ids=str)
def test_every_prepared_sweep_validates(path):
    answer = subprocess.run(
        [sys.executable, "-m", "launch", "-m", f"sweep={path.stem}", "dry_run=true", "device=cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    assert "0 cannot run" in answer.stdout


def test_a_prepared_sweep_is_not_for_a_single_run():
    answer = subprocess.run(
        [sys.executable, "-m", "launch", "sweep=logsoftmax_imbalance"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 2
    assert "type make sweep sweep=logsoftmax_imbalance" in answer.stderr
