"""Whole training scripts under the watcher: what it says of faulty ones, and of healthy ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from harness.causes import Strength, diagnose
from harness.watch.answers.gathering import gather
from harness.watch.divergence import from_json
from harness.watch.meeting.folder import Folder
from tests import watching
from tests.watched import by_hand, classifier, wide
from tests.watching import ROOT, environment, rank_files, torchrun

RANKS = 3
COMMON = {"steps": 5, "seed": 0, "bad_step": 2, "bad_rank": 1}
# Once large tensors are no longer read in full at every update.
LATER = {wide: {"steps": 14, "bad_step": 10}}
CASES = {
    f"{module.__name__.rpartition('.')[2]}-{fault}": {
        "script": module.__name__.rpartition(".")[2],
        "arguments": COMMON | LATER.get(module, {}) | {"fault": fault},
    }
    for module in (classifier, by_hand, wide)
    for fault in module.FAULTS
}
# The same fault where large tensors are read in full at every update.
CASES["wide-element-whole"] = CASES["wide-element"] | {"whole": True}
CASES["wide-none-whole"] = CASES["wide-none"] | {"whole": True}
BATCH_NORM = {"norm.running_mean", "norm.running_var"}
FAULTY = {
    # case: step, phase, kind, tensors, odd ranks
    "classifier-bit": (3, "parameters", "parameter", {"stem.weight"}, (1,)),
    "classifier-bypass": (2, "gradients", "gradient", {"head.bias", "head.weight"}, ()),
    "classifier-no_sync": (2, "gradients", "gradient", {"head.bias", "head.weight"}, ()),
    "classifier-replaced": (0, "gradients", "gradient", {"head.bias", "head.weight"}, ()),
    "classifier-buffers": (2, "evaluation", "buffer", BATCH_NORM, ()),
    "classifier-unsynced_eval": (2, "evaluation", "buffer", BATCH_NORM, ()),
    "classifier-lr": (0, "gradients", "setting", {"param_groups[0]['lr']"}, (1,)),
    # Written before update 10, in the last quarter of the tensor: that is read after update 11.
    "wide-element": (11, "parameters", "parameter", {"0.weight"}, (1,)),
    "wide-element-whole": (10, "parameters", "parameter", {"0.weight"}, (1,)),
    "wide-spread": (10, "parameters", "parameter", {"0.weight"}, (1,)),
    "by_hand-layer": (2, "gradients", "gradient", {"2.bias", "2.weight"}, ()),
    "by_hand-init": (0, "start", "parameter", {"0.weight", "4.bias"}, (1,)),
}
EXACT = {
    "classifier-bit",
    "classifier-buffers",
    "classifier-unsynced_eval",
    "classifier-replaced",
    "classifier-lr",
    "wide-element",
    "wide-element-whole",
    "wide-spread",
    "by_hand-layer",
}
"""Cases in which nothing but the tensors named may be reported."""
HEALTHY = {
    "classifier-none": 0,
    "classifier-wrapped_eval": 0,
    "classifier-average_on_rank_0": 0,
    "by_hand-none": 0,
    "wide-none": 0,
    "wide-none-whole": 0,
    "by_hand-unequal_updates": 0,
    "by_hand-parts": 0,
    # Each rank trains a model of its own: there is nothing to compare, which is said.
    "by_hand-own_models": 22,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    (out / "cases.json").write_text(json.dumps(CASES))
    ended = torchrun("-m", "tests.watched.driver", out, out / "cases.json", ranks=RANKS)
    assert ended.returncode == 0, ended.stderr
    return out


def findings(out, case):
    paths = (out / case).glob("attempt0-*/rank*.finding.json")
    return [from_json(json.loads(path.read_text())["found"]) for path in paths]


def codes(out, case):
    files = rank_files(out, RANKS, f"{case}.")
    assert [rank["failed"] for rank in files] == [None] * RANKS
    return sorted(rank["code"] for rank in files)


def test_no_case_is_forgotten():
    assert set(FAULTY) | set(HEALTHY) == set(CASES)


@pytest.mark.parametrize("case", FAULTY)
def test_a_fault_is_found_in_its_step_with_tensor_and_rank(runs, case):
    step, phase, kind, tensors, odd = FAULTY[case]
    found = min(findings(runs, case), key=lambda one: one.order)
    assert (found.step, found.phase, found.differences[0].kind) == (step, phase, kind)
    assert found.ranks == (0, 1, 2)
    names = {one.name for one in found.differences}
    assert names == tensors if case in EXACT else names >= tensors
    assert found.differences[0].odd == odd


@pytest.mark.parametrize(
    ("case", "steps"), [("element", [9, 10, 11]), ("spread", [9, 10]), ("element-whole", [10])]
)
def test_what_is_read_in_parts_is_dated_by_the_write_itself(runs, case, steps):
    found = min(findings(runs, f"wide-{case}"), key=lambda one: one.order)
    assert list(found.steps) == steps
    (folder,) = (runs / f"wide-{case}").glob("attempt0-*")
    source = "optimizer 0 (SGD)"
    (best, *_) = diagnose(
        gather(Folder(folder), range(RANKS), RANKS, divergence=found, source=source)
    )
    assert (best.cause, best.strength, best.ranks) == ("out_of_band_write", Strength.PROVEN, (1,))
    assert "was written between updates 9 and 10" in best.because[0]


@pytest.mark.parametrize("case", FAULTY)
def test_one_rank_ends_with_20_and_the_others_as_they_would(runs, case):
    assert codes(runs, case) == [0, 0, 20]


@pytest.mark.parametrize("case", HEALTHY)
def test_a_healthy_run_is_silent(runs, case):
    assert findings(runs, case) == []
    assert codes(runs, case) == [0, 0, HEALTHY[case]]


def test_the_wrong_lr_is_shown(runs):
    (one,) = min(findings(runs, "classifier-lr"), key=lambda one: one.order).differences
    assert one.values == {0: "0.1", 1: "0.2", 2: "0.1"}


def watched(*words, ranks, script="tests/watched/ends.py"):
    if ranks > 1:
        return torchrun("-m", "harness.watch", script, *words, ranks=ranks)
    command = [sys.executable, "-m", "harness.watch", script, *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100
    )


def said(ended):
    """The watcher's own lines."""
    lines = ended.stderr.splitlines()
    return [line.partition("crossrank: ")[2] for line in lines if "crossrank: " in line]


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("well", 0, "one process: there is no replica to compare"),
        ("exit3", 3, "one process"),
        ("exit_text", 1, "one process"),
    ],
)
def test_one_process_ends_as_it_would(end, code, says):
    ended = watched("--end", end, ranks=1)
    assert ended.returncode == code, ended.stderr
    assert "done" in ended.stdout
    assert ("a last word" in ended.stderr) == (end == "exit_text")
    assert [line for line in said(ended) if line.startswith(says)]


def test_a_rank_that_raises_keeps_its_own_excepthook_and_the_answer_is_still_given():
    ended = watched("--end", "diverges_and_raises", ranks=2)
    assert ended.returncode == 1
    assert "own hook: ValueError" in ended.stdout
    assert "harness/watch" not in ended.stdout
    assert said(ended)[-1].startswith("step 3: ranks 0 and 1 differ in parameter weight")
    assert "exitcode  : 1 (pid" in ended.stderr
    # The code is the script's own, and no answer.
    assert "  exit     " not in ended.stderr


def test_no_rank_is_cut_off_at_exit_because_another_one_has_found_something():
    ended = watched("--end", "slow_exit", ranks=2)
    assert "exitcode  : 20 (pid" in ended.stderr
    assert said(ended)[-1].startswith("step 4: ranks 0 and 1 differ in parameter weight, 1 of 2")
    assert ended.stdout.count("finished at exit") == 2
    answer, _, launcher = ended.stderr.partition("  exit     20; torchrun reports it next")
    assert "step 4: ranks" in answer
    assert "ChildFailedError" not in answer
    assert "ChildFailedError" in launcher


def test_a_killed_rank_ends_the_run_as_without_the_watcher():
    ended = watched("--end", "killed", ranks=2)
    assert ended.returncode == 1
    assert "Signal 9 (SIGKILL)" in ended.stderr
    assert not [line for line in said(ended) if "stopped watching" in line]
    assert not [line for line in said(ended) if line.startswith("step")]


def test_without_an_optimizer_it_says_that_it_saw_nothing():
    ended = watched("--end", "no_optimizer", ranks=2)
    assert ended.returncode == 1
    assert "exitcode  : 22 (pid" in ended.stderr
    assert said(ended) == ["could not observe: no optimizer made a step"]


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (None, 2, "cannot read the script"),
        ("def broken(:\n", 1, "SyntaxError"),
        ("\x00\x01binary", 1, "null bytes"),
        ("print('no torch')\n", 22, "could not observe: torch was not imported"),
        ("import sys\nsys.exit(5)\n", 5, "torch was not imported"),
        ("1 / 0\n", 1, "ZeroDivisionError"),
    ],
)
def test_scripts_that_are_none(tmp_path, content, code, says):
    script = tmp_path / "train.py"
    if content is not None:
        script.write_text(content)
    ended = watched(ranks=1, script=str(script))
    assert ended.returncode == code
    assert says in ended.stderr
    assert "harness/watch" not in ended.stderr.replace(str(tmp_path), "")


def test_two_lines_in_a_script_do_the_same_and_runs_of_one_parent_do_not_mix(tmp_path):
    command = [sys.executable, "-m", "tests.watched.attached", tmp_path]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    first, second = (part.splitlines() for part in ended.stderr.split("turn 1")[0].split("turn 0"))
    answers = [line for line in first if line.startswith("crossrank: ")]
    found = "step 1: rank 2 differs from the others in gradient 1.bias, 1 of 4; "
    assert len(answers) == 2
    for answer in answers:
        assert answer.startswith(f"crossrank: {found}")
        assert "cause: gradient_changed_on_one_rank" in answer
    (answer,) = [line for line in second if line.startswith("crossrank: ")]
    assert answer == "crossrank: no divergence: 4 replicated parameters, 4 updates, 3 ranks"


WITHOUT = """
import os, sys
if os.environ.get("RANK") in os.environ["WITHOUT_XXHASH"].split(","):
    sys.modules["xxhash"] = None  # as if it were not installed
"""
FLIPPED = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(5):
    model(torch.randn(4, 6, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and dist.get_rank() == int(sys.argv[1]):
        with torch.no_grad():
            model.module.weight[1, 2] += 1e-3
dist.destroy_process_group()
"""
APART = (
    "ranks 0 and 1: not compared with rank 2: some compute digests with the package xxhash and "
    "some without it; pip install xxhash for all"
)


@pytest.mark.parametrize(
    ("without", "odd", "code", "says"),
    [
        pytest.param("2", -1, 0, APART, id="one rank, nothing is wrong"),
        pytest.param("2", 1, 20, "ranks 0 and 1 differ in parameter weight, 1 of 2", id="one rank"),
        pytest.param("0,1,2", -1, 0, "no divergence: 2 replicated", id="all, nothing is wrong"),
        pytest.param("0,1,2", 1, 20, "step 3: rank 1 differs from the others", id="all"),
    ],
)
def test_ranks_that_lack_the_package_for_hashes(tmp_path, without, odd, code, says, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    (tmp_path / "train.py").write_text(FLIPPED)
    monkeypatch.setenv("WITHOUT_XXHASH", without)
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    monkeypatch.setattr(watching, "environment", lambda: environment() | paths)
    ended = torchrun("-m", "harness.watch", tmp_path / "train.py", odd, ranks=RANKS)
    # torchrun's own code is 1 if any is not 0.
    assert ended.returncode == (1 if code else 0), ended.stderr
    assert says in ended.stderr
    assert ("not compared with" in ended.stderr) == (without == "2")
