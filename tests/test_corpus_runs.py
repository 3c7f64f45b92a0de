"""A corpus with real ranks: what breaks stops nobody, and Ctrl-C keeps what is done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from harness.plan import Layout
from tests.launching import (
    CASES,
    GIVE_UP_S,
    MARK,
    ROOT,
    assert_no_orphans,
    environment,
    heed_ctrl_c,
    wait_for,
)

THROWS = """
from dataclasses import dataclass
from harness.arms import faulty, fixed, reference
from harness.claims import HOLDS, symptom
from harness.findings import counts, says
from harness.scenario import Scenario

@dataclass(frozen=True, kw_only=True)
class Params:
    steps: int

def run(rank, arm, p):
    if arm["throws"]:
        raise ValueError("thrown on purpose <&>")
    rank.log(step=0, loss=1.0)

@symptom(HOLDS)
def it_runs(t):
    \"\"\"It runs.\"\"\"
    return counts(t, "thrower", "loss", 1, "losses")

SCENARIO = Scenario(
    title="It throws <here>", family="probe", cause="", params=Params, run=run,
    headline=says(it_runs=("it runs", "it does not")),
    arms=(reference("sound", "does not throw", ranks=1, throws=False),
          faulty("thrower", "throws", throws=True), fixed("other", "does not", throws=False)),
    claims=(it_runs,),
)
"""


@pytest.fixture
def folder(tmp_path):
    """Scenarios of which one cannot be imported and one throws."""
    mine = tmp_path / "scenarios"
    (mine / "conf" / "scenario").mkdir(parents=True)
    (mine / "torn.py").write_text("SCENARIO = None +\n")
    (mine / "throws.py").write_text(THROWS)
    (mine / "conf" / "scenario" / "throws.yaml").write_text("steps: 1   # of them\n")
    return mine


def start(results, mine, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "launch.corpus", *words, f"results={results}", "device=cpu"],
        cwd=ROOT,
        env=environment(
            CROSSRANK_SCENARIOS=os.pathsep.join(map(str, (CASES, mine))), **{MARK: str(results)}
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )


def finish(process):
    out, err = process.communicate(timeout=GIVE_UP_S)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def states(results):
    (path,) = (results / "corpus").glob("*/corpus.json")
    entries = json.loads(path.read_text())["entries"]
    return {entry["scenario"]: entry for entry in entries}, path.parent


def test_what_breaks_stops_nobody_and_is_run_again_when_it_is_mended(folder, tmp_path):
    results = tmp_path / "results"
    chosen = "scenarios=throws,torn,metric_average,gradient_self_test"
    code, out, err = finish(start(results, folder, chosen, "gpus=2"))
    found, root = states(results)

    assert code == 11, err
    assert {name: entry["state"] for name, entry in found.items()} == {
        "metric_average": "as_expected",
        "gradient_self_test": "as_expected",
        "throws": "failed",
        "torn": "failed",
    }
    assert "thrown on purpose" in found["throws"]["problem"]
    assert "SyntaxError" in found["torn"]["problem"]
    for word in ("2 as expected", "2 failed", "FAILED", "thrown on purpose", "SyntaxError"):
        assert word in out, word

    page = (root / "index.html").read_text()
    assert "It throws &lt;here&gt;" in page
    assert "thrown on purpose <" not in page
    assert f'href="{found["metric_average"]["run"]}/report.html"' in page
    assert (root / found["metric_average"]["run"] / "report.html").exists()
    suites = {suite.get("name"): suite for suite in ElementTree.parse(root / "junit.xml").getroot()}
    assert set(suites) == {f"{name}[gpus=2]" for name in found}
    assert suites["metric_average[gpus=2]"].get("tests") == str(
        len(found["metric_average"]["findings"])
    )
    broken = ("torn[gpus=2]", "throws[gpus=2]")
    assert [int(suites[name].get("errors")) > 0 for name in broken] == [True, True]

    (folder / "torn.py").write_text(THROWS.replace("raise ValueError", "print"))
    (folder / "conf" / "scenario" / "torn.yaml").write_text("steps: 1   # of them\n")
    code, out, err = finish(start(results, folder, "continue=latest"))
    again, _ = states(results)
    assert code == 11, err
    assert again["torn"]["state"] == "as_expected", again["torn"]
    assert again["throws"]["state"] == "failed"
    assert again["throws"]["run"] != found["throws"]["run"]
    for name in ("metric_average", "gradient_self_test"):
        assert again[name] == found[name], "what was through is not run again"
    assert_no_orphans(results)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which processes are left")
def test_ctrl_c_keeps_what_is_done_and_leaves_nobody(folder, tmp_path):
    results = tmp_path / "results"
    # Arms of `faults` hang far longer than this test has.
    process = start(results, folder, "scenarios=faults,metric_average", "gpus=2")

    def through():
        written = list((results / "corpus").glob("*/corpus.json"))
        if process.poll() is not None:
            raise AssertionError(finish(process))
        return written and states(results)[0]["metric_average"]["state"] == "as_expected"

    wait_for(through, "the end of metric_average")
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = finish(process)
    found, root = states(results)

    assert code == 130, err
    assert "continue=" in out
    assert found["metric_average"]["state"] == "as_expected"
    assert found["faults"]["state"] == "interrupted"
    assert (root / "index.html").exists()
    (run,) = (root / "faults").iterdir()
    assert json.loads(Layout(run).verdict.read_text())["failures"]
    assert_no_orphans(results)
