"""The programs of tests/watched/programs do what their names say: all of it without a watcher."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys

import pytest
import torch

from tests.watched.programs.bare import RIGHT, WRONG, hangs, stated
from tests.watched.programs.outcome import (
    PARTS,
    Runs,
    distance,
    first_difference,
    first_gap,
    groups_of,
    parameters,
    same_masks,
)
from tests.watching import ROOT, environment

RANKS = 3
FAULTS = [name for name in WRONG if not hangs(name)]
HANGS = [name for name in WRONG if hangs(name)]

NOT_AS_ONE = {
    "right_argparse_classifier": "batch norm",
    "right_bf16_autocast": "rounding to 8 bits",
    "right_checkpointing": "dropout",
    "right_compressed": "gradients rounded to 11 bits",
    "right_distillation": "batch norm",
    "right_dropout_per_rank": "dropout",
    "right_federated": "every rank has data of its own",
    "right_finetuning": "batch norm",
    "right_gan": "noise",
    "right_grad_scaler": "rounding to 11 bits",
    "right_iterable_dataset": "batches are put together by workers",
    "right_join": "every rank has data of its own",
    "right_policy_gradient": "every rank plays games of its own",
    "right_local_sgd": "replicas are averaged now and then",
    "right_post_local_sgd": "replicas are averaged now and then",
    "right_resume": "dropout",
    "right_seeded_samples": "noise",
    "right_sam": "every rank looks around a point of its own",
    "right_tensor_parallel": "every rank has a part",
    "right_unused_branches": "every rank has a task of its own",
    "wrong_clip_before_unscale": "rounding to 8 bits",
    "wrong_ema_buffers": "batch norm",
    "wrong_evaluation_on_rank0": "batch norm",
    "wrong_local_statistics": "batch norm",
    "wrong_same_dropout": "dropout",
    "wrong_schedule_per_shard": "every rank has data of its own",
    "wrong_sequence_parallel": "every rank has a part",
    "wrong_token_budget": "every rank has data of its own",
    "wrong_uneven_shards": "every rank has data of its own",
    "wrong_unreadable_sample": "every rank has data of its own",
    "wrong_workers_seeded_alike": "augmentation",
}
"""Programs whose result rightly depends on the number of ranks."""
ROUNDING_ONLY = {"right_language_model": ".qkv.bias"}
"""The gradient of a key's bias is zero but for rounding, and Adam makes steps of a size from it."""
SHARDED = ("right_fsdp2", "wrong_optimizer_before_sharding")
TWICE = {"rng_not_decorrelated"}
"""Causes of two programs: layers draw the same numbers, or workers of loaders do."""
METRICS = {"eval_padding": "count", "mean_of_means": "error"}
"""Causes whose trace is a number that the script reports, and not a parameter."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # One run for all workers of pytest: the first one to come makes it, the others wait.
        folder = folder.parent
    out = folder / "programs"
    with (folder / "programs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "ends.pt").exists():
            command = [sys.executable, "-m", "tests.watched.programs.bare", str(out)]
            ended = subprocess.run(
                [*command, "--worlds", "1", str(RANKS)],
                cwd=ROOT,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert ended.returncode == 0, ended.stderr
    return Runs(out, ranks=RANKS)


def arms():
    return [*RIGHT, *(f"{name} --fixed" for name in WRONG)]


def test_there_are_enough_and_every_one_says_what_it_is():
    assert len(RIGHT) >= 20
    assert len(WRONG) >= 20
    assert set(NOT_AS_ONE) <= {*RIGHT, *WRONG}
    causes = [stated(name)["CAUSE"] for name in WRONG]
    assert len(set(causes)) == len(causes) - len(TWICE)
    assert all((causes.count(cause) == 2) is (cause in TWICE) for cause in causes)
    keys = {"step", "phase", "tensor", "odd_ranks"}
    for name in WRONG:
        assert set(stated(name)["EXPECTED"]) == keys | ({"stuck"} if name in HANGS else set())


@pytest.mark.parametrize("title", arms())
def test_correct_programs_and_repaired_ones_end_well(runs, title):
    for result in [*runs.of(title), runs.single[title]]:
        assert result["error"] is None
        assert 4 <= len(result["updates"]) <= 12
        assert all(
            torch.isfinite(value).all()
            for value in result["final"].values()
            if value.is_floating_point()
        )


@pytest.mark.parametrize("title", arms())
def test_their_replicas_are_equal_in_the_end(runs, title):
    parts = PARTS.get(title.split()[0], frozenset())
    first, *others = (parameters(result, parts) for result in runs.of(title))
    assert first
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("title", [t for t in arms() if t.split()[0] not in NOT_AS_ONE])
def test_they_train_as_one_process_does(runs, title):
    leave_out = [end for name, end in ROUNDING_ONLY.items() if title.startswith(name)]
    many, one = runs.of(title)[0], runs.single[title]
    assert distance(parameters(many), parameters(one), leave_out) < 1e-5
    assert len(many["updates"]) == len(one["updates"])
    if not leave_out and title.split()[0] not in SHARDED:
        assert first_gap(many, one) is None
    for name, value in one["metrics"].items():
        assert many["metrics"][name] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        ("right_federated", "values"),
        ("right_local_sgd", "values"),
        ("right_post_local_sgd", "values"),
        ("right_tensor_parallel", "values"),
        ("right_fsdp2", "values"),
        ("right_join", "updates"),
        ("right_argparse_classifier", "buffers"),
        ("right_gan", "buffers"),
        ("right_dropout_per_rank", "masks"),
        ("right_checkpointing", "masks"),
        ("right_resume", "masks"),
    ],
)
def test_the_ranks_of_some_correct_programs_differ_on_purpose(runs, title, kind):
    results = runs.of(title)
    if kind == "updates":
        assert [len(result["updates"]) for result in results] == [
            5 + rank for rank in range(runs.ranks)
        ]
    elif kind == "values":
        rows = [[row["values"] for row in result["updates"]] for result in results]
        unequal = [
            step
            for step, (a, b) in enumerate(zip(*rows[:2], strict=True))
            if any(
                a[name].shape != b[name].shape or not torch.equal(a[name], b[name]) for name in a
            )
        ]
        assert len(unequal) >= 4
    elif kind == "masks":
        assert not same_masks(results)
    else:
        buffers = set(results[0]["final"]) - set(results[0]["parameters"])
        assert any(
            not torch.equal(results[0]["final"][name], results[1]["final"][name])
            for name in buffers
        )


def test_compression_and_an_overflow_are_really_there(runs):
    gap = distance(*(parameters(r["right_compressed"]) for r in (runs.shared[0], runs.single)))
    assert 1e-6 < gap < 1e-2
    assert runs.of("right_grad_scaler")[0]["metrics"]["skipped"] >= 1


@pytest.mark.parametrize(
    "name", [n for n in FAULTS if stated(n)["EXPECTED"]["odd_ranks"] is not None]
)
def test_replicas_differ_where_a_faulty_program_says(runs, name):
    expected = stated(name)["EXPECTED"]
    results = runs.of(name)
    if expected["phase"] == "evaluation":
        assert expected["odd_ranks"] == ()
        # The wrapper may have to be told apart from what it holds.
        found = {
            end: tuple(len(group) for group in groups_of([r["final"][key] for r in results]))
            for key in results[0]["final"]
            for end in expected["tensor"]
            if key.endswith(end)
        }
        assert found == dict.fromkeys(expected["tensor"], (1,) * runs.ranks)
        assert {result["evaluated"] for result in results} == {expected["step"]}
        return
    step, phase, tensors = first_difference(name, results)
    assert (step, phase) == (expected["step"], expected["phase"])
    named = {tensor: odd for tensor, odd in tensors.items() if tensor in expected["tensor"]}
    # None that is not named comes before them: backward begins with the last layer.
    assert set(named) == set(expected["tensor"])
    assert set(named.values()) == {expected["odd_ranks"] if runs.ranks > 2 else ()}
    order = list(tensors) if phase == "start" else list(tensors)[::-1]
    assert order[0] in expected["tensor"]


def same_draws(results):
    """Say whether all ranks dropped the same units, or cropped their samples alike."""
    crops = [result["metrics"].get("mean_crop") for result in results]
    return same_masks(results) if None in crops else len(set(crops)) == 1


@pytest.mark.parametrize("name", [n for n in FAULTS if stated(n)["EXPECTED"]["odd_ranks"] is None])
def test_replicas_agree_on_something_else_than_one_process(runs, name):
    cause, expected = stated(name)["CAUSE"], stated(name)["EXPECTED"]
    results, right = runs.of(name), runs.single[f"{name} --fixed"]
    if name not in SHARDED:
        assert first_difference(name, results) is None
    if cause == "frozen_module_changes":
        moved = {n for n, v in results[0]["final"].items() if not torch.equal(v, right["final"][n])}
        assert {name for name in moved if name.startswith("backbone")} == set(expected["tensor"])
        # As often as there were updates, so from the first one on.
        counts = [r["final"]["backbone.1.num_batches_tracked"] for r in (results[0], right)]
        assert counts == [len(right["updates"]), 0]
        assert (expected["step"], expected["phase"]) == (0, None)
    elif cause in METRICS:
        key = METRICS[cause]
        assert results[0]["metrics"][key] != pytest.approx(right["metrics"][key], rel=1e-4)
        assert distance(parameters(results[0]), parameters(right)) < 1e-5
        assert {result["evaluated"] for result in results} == {expected["step"]}
        assert expected["phase"] == "evaluation"
    elif cause == "rng_not_decorrelated":
        assert same_draws(results)
        assert expected["step"] == 0
        assert not same_draws(runs.of(f"{name} --fixed"))
    elif cause == "stale_optimizer":
        assert distance(parameters(results[0]), parameters(right)) > 1e-2
        assert (expected["step"], expected["phase"]) == (0, "parameters")
        before = results[0]["updates"][0]["before"].values()
        assert all(
            torch.equal(a, b) for a, b in zip(before, parameters(results[0]).values(), strict=True)
        )
    else:
        step, phase = first_gap(results[0], right)
        assert step == expected["step"]
        assert expected["phase"] in (phase, None)
        fixed = runs.of(f"{name} --fixed")[0]
        assert distance(parameters(results[0]), parameters(right)) > 100 * distance(
            parameters(fixed), parameters(right)
        )


@pytest.mark.parametrize("name", HANGS)
def test_the_ranks_of_a_hang_come_no_further_than_it_says(runs, name):
    expected, results = stated(name)["EXPECTED"], runs.own[name]
    waiting = [rank for rank in range(runs.ranks) if rank not in expected["odd_ranks"]]
    for rank in waiting:
        assert "Timed out" in results[rank]["error"] or "onnection" in results[rank]["error"]
        assert len(results[rank]["updates"]) == expected["stuck"]
    # They all wait in the same line, and the odd one somewhere else or after something else.
    places = [(result["where"], result["evaluated"]) for result in results]
    assert len({places[rank] for rank in waiting}) == 1
    assert all(places[rank] != places[waiting[0]] for rank in expected["odd_ranks"])
    if stated(name)["CAUSE"] == "rank_raised":
        (odd,) = expected["odd_ranks"]
        assert results[odd]["error"].startswith("JSONDecodeError")
    fixed = [len(result["updates"]) for result in runs.of(f"{name} --fixed")]
    if expected["step"] == expected["stuck"]:
        assert max(fixed) > expected["stuck"]
    else:
        # Until then it goes on, with gradients that are not those of one batch.
        gap = first_gap(results[waiting[0]], runs.single[f"{name} --fixed"])
        assert gap == (expected["step"], expected["phase"])
