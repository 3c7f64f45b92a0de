"""Is N ranks the same training as one: recorded runs, and the first place where they part."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.floor import Size
from harness.watch.twin.comparison import compare
from harness.watch.twin.estimates import distance, factor
from harness.watch.twin.projection import project
from harness.watch.twin.recording import Recording, RecordingError, read
from tests.watching import ROOT, environment, torchrun

NUDGES = 3
TENSORS = {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("twins")
    for ranks, nudges in ((1, NUDGES), (3, 0)):
        ended = torchrun("-m", "tests.watched.twin_driver", out / str(ranks), nudges, ranks=ranks)
        assert ended.returncode == 0, ended.stderr
    return out


def compared(runs, case):
    nudged = [read(runs / "1" / f"{case}-nudged{k}") for k in range(1, NUDGES + 1)]
    return compare(read(runs / "1" / case), read(runs / "3" / case), nudged)


def test_the_same_global_batch_is_the_same_training(runs):
    found = compared(runs, "none")
    assert found.compared == 4
    assert found.updates == (6, 6)
    assert not found.first
    assert not found.equal
    assert {one.size for one in found.places} == {Size.CLEAN}


def test_a_loss_times_world_size_is_that_factor_from_the_first_gradient_on(runs):
    found = compared(runs, "times_world")
    assert {one.name for one in found.first} == TENSORS
    assert (found.first[0].update, found.first[0].phase) == (0, "gradients")
    for one in found.first:
        assert one.factor == pytest.approx(3.0, rel=1e-5)
        assert one.residual < 1e-5
        assert one.distance > 0.5


def test_a_fault_that_begins_later_is_found_there(runs):
    found = compared(runs, "late")
    assert (found.first[0].update, found.first[0].phase) == (3, "gradients")
    before = [one for one in found.places if one.update < 3]
    assert before
    assert all(one.size is Size.CLEAN for one in before)


def test_means_over_unequal_numbers_of_labels_are_no_constant_factor(runs):
    found = compared(runs, "valid_labels")
    assert (found.first[0].update, found.first[0].phase) == (0, "gradients")
    assert all(one.residual > one.distance / 3 for one in found.first)


def test_another_global_batch_is_another_training(runs):
    assert (compared(runs, "per_rank_batch").first[0].update) == 0


def recording(*values):
    """A run with one tensor of one number, whose values are given update by update."""
    places = {(u, 0, "gradients"): {"w": (x * x, x)} for u, x in enumerate(values)}
    return Recording(folder=Path("run"), world_size=1, torch="2.13.0", values=places)


def test_the_floor_of_an_update_is_the_highest_up_to_it():
    # A repeat crosses the reference by luck, the run beside it does not.
    nudged = [recording(1 + 1e-6, 1.0), recording(1 + 1e-7, 1 + 1e-12)]
    found = compare(recording(1.0, 1.0), recording(1.0, 1 + 2e-6), nudged)
    assert [one.floor for one in found.places] == pytest.approx([1e-6, 1e-6], rel=1e-3)
    assert {one.size for one in found.places} == {Size.CLEAN}
    assert not found.first


def test_a_run_is_equal_to_itself_and_needs_a_floor_against_others(runs):
    one, other = read(runs / "1" / "none"), read(runs / "3" / "none")
    assert compare(one, one).equal
    unjudged = compare(one, other)
    assert not unjudged.equal
    assert not unjudged.first
    assert {place.size for place in unjudged.places} == {None}


def test_a_tensor_of_one_run_only_is_named(runs):
    a, b = read(runs / "1" / "none"), read(runs / "3" / "none")
    for tensors in b.values.values():
        tensors.pop("2.bias")
    found = compare(a, b)
    assert found.only == (("2.bias",), ())
    assert found.compared == 3


def test_a_missing_rank_is_said(runs, tmp_path):
    for rank in (0, 2):
        name = f"rank{rank}.projections.jsonl"
        (tmp_path / name).write_text((runs / "3" / "none" / name).read_text())
    with pytest.raises(RecordingError, match="2 ranks of 3"):
        read(tmp_path)
    with pytest.raises(RecordingError, match="--record"):
        read(tmp_path / "nothing")


@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (4096,), (3, 5000), (64, 64, 5)])
def test_distance_and_factor_are_those_of_the_tensors(shape):
    generator = torch.Generator().manual_seed(1)
    estimates = []
    for _ in range(60):
        a = torch.randn(shape, generator=generator, dtype=torch.float64)
        b = a + 1e-6 * torch.randn(shape, generator=generator, dtype=torch.float64)
        (square, of_a), (_, of_b) = project(a), project(b)
        assert square == pytest.approx(float(a.square().sum()))
        true = float((a - b).norm())
        estimates.append(distance(of_a, of_b) / true)
        assert factor(of_a, of_b) == pytest.approx(1.0, abs=1e-4)
        assert factor(of_a, [3 * x for x in of_a]) == pytest.approx(3.0)
    assert math.sqrt(sum(x * x for x in estimates) / 60) == pytest.approx(1.0, abs=0.15)
    assert all(0.2 < estimate < 3 for estimate in estimates)


def test_parts_add_up_to_the_whole_wherever_it_is_cut():
    whole = torch.randn(13, 1000, generator=torch.Generator().manual_seed(2))
    square, projections = project(whole)
    for rows in (1, 5, 12):
        parts = [project(whole[:rows]), project(whole[rows:], first=rows * 1000)]
        assert sum(part[0] for part in parts) == pytest.approx(square)
        for i, number in enumerate(projections):
            assert sum(part[1][i] for part in parts) == pytest.approx(number, abs=1e-8)


def test_a_change_of_place_is_a_distance():
    a = torch.arange(10000.0)
    b = a.clone()
    b[17], b[9000] = a[9000], a[17]
    assert distance(project(a)[1], project(b)[1]) == pytest.approx(
        math.sqrt(2) * (9000 - 17), rel=0.7
    )


def command(*words, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-m", "harness.watch", *map(str, words)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_twin_runs_the_script_and_names_update_tensor_and_factor(tmp_path):
    ended = command(
        "twin", "--nproc", "1,2", "--floor-runs", "1", "--folder", tmp_path / "kept",
        "--json", tmp_path / "found.json", "tests/watched/twins.py", "--fault", "times_world",
        "--steps", "3",
    )  # fmt: skip
    assert ended.returncode == 20, ended.stderr
    own, first, *_ = ended.stdout.splitlines()
    assert own.startswith("2 ranks: the run itself: ")
    assert "loss_scaled_by_world" in own
    assert first.startswith("2 ranks: update 0, gradient 0.weight and 3 more of 4")
    assert "loss_scaled_by_world" in first
    (content,) = json.loads((tmp_path / "found.json").read_text())
    assert content["ranks"] == [1, 2]
    assert {one["name"] for one in content["first"]} == TENSORS
    assert "rank 1" in (tmp_path / "kept" / "ranks2" / "output.txt").read_text()
    again = command(
        "diff", tmp_path / "kept/ranks1", tmp_path / "kept/ranks2",
        "--floor", tmp_path / "kept/ranks1-nudged1",
    )  # fmt: skip
    assert again.returncode == 20
    unjudged = command("diff", tmp_path / "kept/ranks1", tmp_path / "kept/ranks2")
    assert unjudged.returncode == 22
    assert "--nudge 1" in unjudged.stdout
    same = command("diff", tmp_path / "kept/ranks1", tmp_path / "kept/ranks1")
    assert (same.returncode, same.stdout.count("\n")) == (0, 1)


def test_what_a_run_itself_was_found_to_be_comes_first(tmp_path):
    ended = command(
        "twin", "--nproc", "1,2", "--floor-runs", "1", "--folder", tmp_path / "kept",
        "tests/watched/twins.py", "--fault", "bypassed", "--steps", "3",
    )  # fmt: skip
    assert ended.returncode == 20, ended.stderr
    first, second, *_ = ended.stdout.splitlines()
    assert first.startswith("2 ranks: the run itself: step 0")
    assert "ddp_forward_bypassed" in first
    assert second.startswith("2 ranks: ")
    assert "ranks2 ended with exit code 1" in ended.stderr


def test_a_script_that_fails_was_not_observed(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import sys; sys.path.insert(0, '.'); from tests.watched import twins\n"
        "sys.argv = ['late.py', '--steps', '2']; twins.main(); sys.exit(3)\n"
    )
    ended = command(
        "twin", "--nproc", "1,2", "--floor-runs", "1", "--folder", tmp_path / "kept", script
    )
    assert ended.returncode == 22, ended.stdout
    assert ended.stderr.count("ended with exit code 1") == 3
    assert "the run itself" not in ended.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("twin", "--nproc", "2", "x.py"), "two or more"),
        (("twin", "--nproc", "1,x", "x.py"), "two or more"),
        (("twin", "--nproc", "1,2", "missing.py"), "missing.py"),
        (("twin", "--floor-runs", "0", "tests/watched/twins.py"), "--floor-runs"),
        (("diff", "nowhere", "nowhere"), "--record"),
    ],
)
def test_bad_input_is_one_message(words, said):
    ended = command(*words)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_dry_run_prints_the_commands_and_runs_none(tmp_path):
    ended = command(
        "twin", "--dry-run", "--nproc", "1,4", "--folder", tmp_path / "kept",
        "tests/watched/twins.py", "--seed", "3",
    )  # fmt: skip
    lines = ended.stdout.splitlines()
    assert len(lines) == 5
    assert all(line.endswith("tests/watched/twins.py --seed 3") for line in lines)
    assert sum("--nproc-per-node=4" in line for line in lines) == 1
    assert sum("--nudge" in line for line in lines) == 3
    assert not (tmp_path / "kept").exists()
