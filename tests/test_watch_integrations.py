"""The watcher under Lightning, Transformers and Accelerate: the real packages, no stand-ins."""

from __future__ import annotations

import csv
import importlib.util
import json
import subprocess
import sys

import pytest

from tests.watching import ROOT, environment, rank_files, torchrun

CASES = {
    "lightning": ("edit", "data", "lr"),
    "transformers": ("edit", "data", "bypass", "dropout"),
    "accelerate": ("edit", "data", "bypass"),
}
"""Framework -> what is broken in it."""
NAMES = [f"{name}-{fault}" for name, faults in CASES.items() for fault in faults]
FAULTY = {
    # what is broken: step, phase, tensors, cause
    "edit": (4, "parameters", {"net.2.weight", "2.weight"}, "out_of_band_write"),
    "bypass": (3, "gradients", {"net.2.bias", "2.bias"}, "ddp_forward_bypassed"),
    "lr": (0, "gradients", {"param_groups[0]['lr']"}, "rank_dependent_schedule"),
    # Replicas are equal all the time.
    "data": (None, None, set(), "data_not_sharded"),
    "dropout": (None, None, set(), "rng_not_decorrelated"),
}


def is_installed(framework):
    """Say so without importing it, which takes seconds."""
    needs = {"transformers": ("transformers", "accelerate", "tensorboard")}
    needed = needs.get(framework, (framework, "tensorboard"))
    return all(importlib.util.find_spec(package) for package in needed)


def need(framework):
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed; type: make integrations")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All cases of all frameworks in one set of ranks; what each rank says of each."""
    present = [name for name in CASES if is_installed(name)]
    if not present:
        pytest.skip("no framework is installed; type: make integrations")
    out = tmp_path_factory.mktemp("frameworks")
    names = [f"{name}-none-{kind}" for name in present for kind in ("bare", "watched")]
    names += [
        f"{name}-watched" for name in (*NAMES, "lightning-norm") if name.split("-")[0] in present
    ]
    ended = torchrun("-m", "tests.watched.frameworks.driver", out, *names, ranks=2, seconds=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = {name: rank_files(out, 2, f"{name}.") for name in names}
    raised = [rank["raised"] for ranks in found.values() for rank in ranks if "raised" in rank]
    assert raised == []
    return found


def answer(ranks):
    """Return what the last rank answered; nobody may have stopped watching."""
    assert [rank["failed"] for rank in ranks] == [None, None]
    (given,) = [rank["answer"] for rank in ranks if rank["answer"]]
    assert given["notes"] == []
    return given


@pytest.mark.parametrize("framework", CASES)
def test_a_right_run_is_the_same_to_the_bit_and_nothing_is_said_of_it(framework, runs):
    need(framework)
    bare, watched = runs[f"{framework}-none-bare"], runs[f"{framework}-none-watched"]
    assert [rank["state"] for rank in watched] == [rank["state"] for rank in bare]
    given = answer(watched)
    assert given["exit_code"] == 0
    assert {one["strength"] for one in given["diagnoses"]} <= {"fact"}
    assert "4 replicated parameters, 6 updates, 2 ranks" in given["headline"]


def test_batch_norm_is_right_since_lightning_validates_through_the_wrapper(runs):
    need("lightning")
    given = answer(runs["lightning-norm-watched"])
    assert (given["exit_code"], given["diagnoses"]) == (0, [])


@pytest.mark.parametrize("framework", CASES)
def test_loggers_write_what_they_write_without_the_watcher(framework, runs):
    need(framework)
    bare, watched = runs[f"{framework}-none-bare"][0], runs[f"{framework}-none-watched"][0]
    assert len(bare["scalars"]["train/loss" if framework == "transformers" else "loss"]) == 6
    assert watched["scalars"] == bare["scalars"]
    assert watched.get("log") == bare.get("log")


@pytest.mark.parametrize("name", NAMES)
def test_a_faulty_run_is_named_with_its_step(name, runs):
    framework, fault = name.split("-")
    need(framework)
    step, phase, tensors, cause = FAULTY[fault]
    given = answer(runs[f"{name}-watched"])
    assert given["exit_code"] == 20
    found = given["divergence"] or {"step": None, "phase": None, "differences": []}
    assert (found["step"], found["phase"]) == (step, phase)
    differing = {one["name"] for one in found["differences"]}
    assert not tensors or differing & tensors
    assert fault != "edit" or len(differing) == 1
    assert given["diagnoses"][0]["cause"] == cause
    if fault == "bypass":
        script = {"transformers": "transformers_train.py", "accelerate": "accelerate_loop.py"}
        assert f"{script[framework]}:" in given["diagnoses"][0]["where"]
    if fault == "data":
        assert any("RandomSampler" in line for line in given["diagnoses"][0]["because"])


def test_the_trainer_seeds_all_ranks_alike_so_that_the_same_units_are_dropped(runs):
    need("transformers")
    first, second = (rank["masks"] for rank in runs["transformers-dropout-watched"])
    # The answer above is true: not the states alone, the masks are the same.
    assert first == second
    assert any(unit for mask in first for row in mask for unit in row)


def test_accelerate_launch_takes_the_watcher_as_a_module(runs):
    need("accelerate")
    read = runs["accelerate-none-bare"][0]["launched"]
    assert read == [True, "harness.watch", "--quiet", "train.py", "--lr", "1"]


def run(*words):
    more = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=environment() | more,
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_ranks_that_lightning_starts_itself_are_watched_without_an_edit(tmp_path):
    need("lightning")
    pytest.importorskip("wandb", reason="wandb is not installed; `make test` has it")
    ended = run(
        "-m", "harness.watch", "--json", tmp_path / "answer.json",
        "tests/watched/frameworks/lightning_fit.py", tmp_path, "--fault=edit", "--wandb",
    )  # fmt: skip
    assert ended.returncode == 20, ended.stderr
    assert ended.stdout.count("fitted") == 2
    given = json.loads((tmp_path / "answer.json").read_text())
    assert given["headline"].startswith("step 4: ranks 0 and 1 differ in parameter net.2.weight")
    assert given["headline"] in ended.stderr
    rows = list(csv.DictReader((tmp_path / "csv/version_0/metrics.csv").open()))
    assert sum(bool(row["loss"]) for row in rows) == 6
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert kept.stat().st_size > 0


def test_the_callback_of_lightning_watches_ranks_that_are_spawned(tmp_path):
    need("lightning")
    script = "tests/watched/frameworks/lightning_fit.py"
    ended = run(script, tmp_path, "--fault=edit", "--callback", "--strategy=ddp_spawn")
    assert ended.returncode == 0, ended.stderr
    assert "crossrank: step 4: ranks 0 and 1 differ in parameter net.2.weight" in ended.stderr


def test_the_callback_of_transformers_needs_no_other_command(tmp_path):
    need("transformers")
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    script = "tests/watched/frameworks/transformers_train.py"
    ended = run(*launch, script, tmp_path, "--fault=bypass", "--callback")
    assert ended.returncode == 0, ended.stderr
    assert "crossrank: step 3: ranks 0 and 1 differ in gradient" in ended.stderr
    assert "ddp_forward_bypassed at" in ended.stderr
    assert ended.stdout.count("trained\n") == 2
