"""A watched run and a bare run are the same bit for bit, in two real gloo ranks."""

from __future__ import annotations

import json
import sys

import pytest

from tests.watched.invisible import CONTROLS, MODES
from tests.watched.trainings import CASES
from tests.watching import rank_files, torchrun

RUNS = [(name, mode) for name in CASES for mode in MODES]
UPDATES = {
    "no_sync": ([2], [2]),
    "join": ([4], [3]),
    "two_models": ([4, 4], [4, 4]),
    "loader_workers": ([8], [8]),
}
"""Updates of each optimizer on each rank, where it is not one optimizer with 4."""
CALLS_AGAIN = {"audited": ["masks"]}
"""A replay calls the model once more, so dropout is called more often than in a bare run."""

NOT_AUDITED = {
    "fully_shard": "parameters are sharded (FSDP or tensor parallel)",
    "fsdp1": "parameters are sharded (FSDP or tensor parallel)",
    # Made in the step; traced along with the wrapper, so that no hook is called.
    **dict.fromkeys(
        ("closure", "compiled_eager", "compiled_aot_eager"),
        "no forward pass of the model with a backward pass was seen",
    ),
}
"""What a replay in one process cannot be made of, and the reason that is given."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    out = tmp_path_factory.mktemp("invisible")
    ended = torchrun("-m", "tests.watched.invisible", out, ranks=2, seconds=400)
    assert ended.returncode == 0, ended.stderr
    return out, rank_files(out, 2)


@pytest.fixture(scope="module")
def results(ran):
    return ran[1]


def each(results, name, mode):
    return [rank["cases"][name]["modes"][mode] for rank in results]


@pytest.mark.parametrize("name", CASES)
def test_a_bare_run_repeats_itself(results, name):
    # Or else that a watched one is like it would mean nothing.
    for rank in results:
        case = rank["cases"][name]
        assert case["repeatable"]
        assert case["things"] > 15


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_every_bit_is_the_same(results, name, mode):
    for run in each(results, name, mode):
        assert [key for key in run["different"] if key not in CALLS_AGAIN.get(mode, ())] == []


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_a_program_cannot_see_that_it_is_watched(results, name, mode):
    for run in each(results, name, mode):
        assert run["seen"] == []


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_it_was_watched_and_nothing_was_reported(results, name, mode):
    for rank, run in enumerate(each(results, name, mode)):
        assert run["failed"] is None
        assert run["notes"] == []
        assert run["code"] == 0
        assert run["thread"], "the thread that looks for hangs was not there"
        updates = UPDATES.get(name, ([4], [4]))[rank]
        assert [one["updates"] for one in run["optimizers"]] == updates


def test_nothing_is_imported_that_a_script_might_be_without(results):
    # The package for hashes is not asked for where it is not installed.
    ours = {"harness", "xxhash", *sys.stdlib_module_names}
    for rank in results:
        runs = [run for case in rank["cases"].values() for run in case["modes"].values()]
        loaded = {name for imported in (rank["imported"], *(r["imported"] for r in runs))
                  for name in imported}  # fmt: skip
        assert "harness.watch.watcher" in loaded
        assert [name for name in loaded if name.partition(".")[0] not in ours] == []


@pytest.mark.parametrize("name", CASES)
def test_it_was_audited(ran, name):
    events = []
    for path in (ran[0] / "audited" / name).glob("attempt0-*/rank*.journal.jsonl"):
        events += [json.loads(line) for line in path.read_text().splitlines()]
    found = [event for event in events if event["kind"] == "audit"]
    assert found
    for event in found:
        assert event["could_not"] == NOT_AUDITED.get(name)


def test_sharded_parameters_are_known_as_such(results):
    for name, sharded, parameters in (
        ("fully_shard", 6, 6),
        ("fsdp1", 1, 1),
        ("sgd_momentum", 0, 6),
    ):
        (one,) = each(results, name, "watched")[0]["optimizers"]
        assert (one["sharded"], one["parameters"]) == (sharded, parameters)


def test_the_comparison_sees_a_clumsy_watcher(results):
    draws, writes, traces = (each(results, name, "watched")[0] for name in CONTROLS)
    assert {"torch", "masks", "losses"} <= set(draws["different"])
    assert "model 0 module.embed.weight" in writes["different"]
    assert traces["different"] == []
    assert traces["seen"] == ["parameter 0 module.embed.weight", "warnings"]
