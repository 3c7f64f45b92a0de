"""Each judge of syncbn_clip can say each of its findings, on altered records of a real run."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import record
from harness.parameters import violations
from harness.plan import Layout, Plan
from harness.record import Row, Stream
from harness.scenario import Finding, Outcome, unknown
from harness.tables import Tables
from harness.verdict import Conclusion, decide
from scenarios import syncbn_clip as case

ROOT = Path(__file__).resolve().parent.parent
WORLD = 3
CLAIMS = {claim.name: claim for claim in case.SCENARIO.claims}
HOLDS, REFUTED, UNKNOWN = Outcome.HOLDS, Outcome.REFUTED, Outcome.UNKNOWN
Streams = dict[str, dict[int, Stream]]
Change = Callable[[Row], Row | None]
BUFFERS = ("running_mean", "running_var")


class Run:
    """A real run, of which tests take altered copies."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.plan = Plan.read(layout.plan)

    def streams(self) -> Streams:
        found: Streams = {}
        for arm in self.plan.arms:
            found[arm.name] = {}
            for rank in range(arm.ranks):
                stream = record.read(self.layout, arm.name, rank)
                assert stream is not None
                found[arm.name][rank] = stream
        return found

    def judged(self, streams: Streams, **params: Any) -> Mapping[str, Finding]:
        plan = dataclasses.replace(self.plan, params={**self.plan.params, **params})
        verdict = decide(case.SCENARIO, "syncbn_clip", Tables(plan, streams))
        assert not verdict.judge_errors, verdict.judge_errors
        return verdict.findings

    def finding(self, claim: str, streams: Streams, **params: Any) -> Finding:
        plan = dataclasses.replace(self.plan, params={**self.plan.params, **params})
        only = dataclasses.replace(
            case.SCENARIO, claims=(CLAIMS[claim],), headline=lambda found: ""
        )
        verdict = decide(only, "syncbn_clip", Tables(plan, streams))
        assert not verdict.judge_errors, verdict.judge_errors
        return verdict.findings[claim]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    results = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "launch", "scenario=syncbn_clip", f"gpus={WORLD}"]
    command += [f"results={results}", "device=cpu", "quiet=true"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    (verdict,) = results.rglob("verdict.json")
    assert done.returncode == 0, done.stdout + done.stderr + verdict.read_text()
    return Run(Layout(verdict.parent))


# How records are altered ------------------------------------------------------------------------


def change(streams: Streams, arm: str, alter: Change, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
    for rank in ranks:
        stream = streams[arm][rank]
        rows = [new for row in stream.rows if (new := alter(row)) is not None]
        streams[arm][rank] = dataclasses.replace(stream, rows=rows)


def metrics(row: Row, **values: Any) -> Row:
    return dataclasses.replace(row, metrics={**row.metrics, **values})


def swap(streams: Streams, arm: str, other: str) -> None:
    """Let an arm have run like another one."""
    streams[arm] = streams[other]


def late_write(streams: Streams, arm: str) -> None:
    """Let the buffers change in optimizer.step instead of in forward."""
    for rank, stream in streams[arm].items():
        entry = {row.step: row.metrics for row in stream.rows if row.phase == "at_layer"}

        def stale(row: Row, entry: Mapping[int, Mapping[str, Any]] = entry) -> Row:
            held = row.phase in ("after_forward", "after_backward")
            if not held or "running_var.digest" not in row.metrics:
                return row
            return metrics(row, **{f"{b}.digest": entry[row.step][f"{b}.digest"] for b in BUFFERS})

        change(streams, arm, stale, (rank,))


def like_twin(streams: Streams, arm: str, twin: str, steps: tuple[int, ...]) -> None:
    """Let running_var after some forwards be, bit for bit, that of another arm."""
    for rank in streams[arm]:
        theirs = {
            row.step: row.metrics["running_var.digest"]
            for row in streams[twin][rank].rows
            if row.phase == "after_forward" and "running_var.digest" in row.metrics
        }

        def alter(row: Row, theirs: Mapping[int, Any] = theirs) -> Row:
            if row.phase != "after_forward" or row.step not in steps:
                return row
            return metrics(row, **{"running_var.digest": theirs[row.step]})

        change(streams, arm, alter, (rank,))


def scaled(run: Run, streams: Streams, arm: str, phase: str, factor: float, tmp: Path) -> None:
    """Scale what was recorded of running_var in one phase, in copies of the rank's files."""
    for rank, stream in streams[arm].items():
        values = np.fromfile(stream.tensors)
        for row in stream.rows:
            if row.phase == phase and "running_var" in row.snapshots:
                offset, count = row.snapshots["running_var"]
                values[offset : offset + count] *= factor
        path = tmp / f"{arm}.{rank}.f64"
        values.tofile(path)
        streams[arm][rank] = dataclasses.replace(stream, tensors=path)


def setting(phase: str, steps: tuple[int, ...] | None = None, **values: Any) -> Change:
    def alter(row: Row) -> Row:
        chosen = row.phase == phase and (steps is None or row.step in steps)
        known = {name: value for name, value in values.items() if name in row.metrics}
        return metrics(row, **known) if chosen else row

    return alter


def without(phase: str) -> Change:
    return lambda row: None if row.phase == phase else row


def digest(name: str, value: str) -> dict[str, str]:
    return {f"{name}.digest": value}


# What each judge says of altered records ---------------------------------------------------------

SWAPS: list[tuple[str, Outcome, str, str]] = [
    ("written_in_forward", UNKNOWN, "plain_clip_all", "sync_clip_all"),
    ("clip_overwritten", UNKNOWN, "sync_clip_all", "sync_no_clip"),
    ("clip_overwritten", UNKNOWN, "sync_no_clip", "plain_clip_all_off"),
    ("clip_decays", REFUTED, "sync_clip_all", "sync_momentum_none"),
    ("clip_decays", UNKNOWN, "sync_clip_all", "sync_no_clip"),
    ("momentum_none", UNKNOWN, "sync_momentum_none", "sync_no_clip"),
    ("momentum_none", UNKNOWN, "sync_momentum_none", "sync_clip_all"),
    ("raise_eps", UNKNOWN, "sync_eps", "sync_no_clip"),
    ("raise_eps", UNKNOWN, "sync_eps", "sync_clip_at_export"),
    ("clip_lost_off_rank0", REFUTED, "plain_clip_rank1", "plain_clip_rank1_off"),
    ("clip_lost_off_rank0", UNKNOWN, "plain_clip_rank1", "sync_no_clip"),
    ("broadcast_overwrites", REFUTED, "plain_clip_rank1", "plain_clip_rank1_off"),
    ("broadcast_overwrites", REFUTED, "plain_clip_rank1_off", "plain_clip_rank1"),
    ("broadcast_overwrites", UNKNOWN, "plain_clip_rank1", "sync_clip_all"),
    ("plain_ranks_agree", HOLDS, "plain_clip_all", "sync_clip_all"),
    ("matches_one_process", REFUTED, "sync_no_clip", "plain_clip_all_off"),
    ("clip_on_all_ranks", REFUTED, "sync_clip_all", "sync_no_clip"),
    ("clip_on_all_ranks", REFUTED, "plain_clip_all", "plain_clip_rank0"),
    ("clip_on_all_ranks", REFUTED, "plain_clip_all_off", "plain_clip_rank0_off"),
    ("forward_hook", REFUTED, "sync_forward_hook", "sync_no_clip"),
    ("forward_hook_on_plain", HOLDS, "plain_forward_hook", "sync_forward_hook"),
    ("forward_hook_on_plain", REFUTED, "plain_forward_hook", "plain_clip_rank0"),
    ("forward_hook_on_plain", UNKNOWN, "plain_forward_hook", "freeze_late"),
    ("clip_at_export", REFUTED, "sync_clip_at_export", "sync_clip_rank0"),
    ("clip_then_freeze", REFUTED, "sync_clip_then_freeze", "freeze_kept"),
    ("frozen_still_updated", HOLDS, "freeze_eval", "freeze_eval_then_train"),
    ("frozen_still_updated", UNKNOWN, "sync_no_clip", "freeze_eval"),
    ("eval_outlives_train", HOLDS, "freeze_eval_then_train", "freeze_kept"),
    ("requires_grad_freezes", HOLDS, "freeze_requires_grad", "freeze_eval"),
    ("isinstance_2d_freezes", HOLDS, "freeze_isinstance_2d", "freeze_kept"),
    ("isinstance_2d_on_plain", REFUTED, "plain_freeze_2d", "plain_freeze_2d_then_train"),
    ("isinstance_2d_outlives_train", HOLDS, "plain_freeze_2d_then_train", "plain_freeze_2d"),
    ("freeze_kept", REFUTED, "freeze_kept", "freeze_requires_grad"),
    ("freeze_kept", REFUTED, "freeze_kept", "freeze_eval"),
    ("late_freeze_silent", REFUTED, "freeze_late", "freeze_late_find_unused"),
    ("late_freeze_raises", REFUTED, "freeze_late", "freeze_late_find_unused"),
    ("find_unused_allows_it", REFUTED, "freeze_late_find_unused", "freeze_late"),
    ("find_unused_allows_it", REFUTED, "freeze_late_find_unused", "freeze_requires_grad"),
]


@pytest.mark.parametrize(("claim", "outcome", "arm", "other"), SWAPS)
def test_an_arm_that_ran_like_another_one(
    run: Run, claim: str, outcome: Outcome, arm: str, other: str
) -> None:
    streams = run.streams()
    swap(streams, arm, other)
    assert run.finding(claim, streams).outcome is outcome


RANK0_ARMS = ("sync_clip_rank0", "plain_clip_rank0")
ONE_RANK_ARMS = ("plain_clip_rank0_off", "plain_clip_rank1_off")


@pytest.mark.parametrize(
    ("claim", "arms"), [("clip_on_rank0", RANK0_ARMS), ("broadcast_off", ONE_RANK_ARMS)]
)
def test_a_remedy_of_several_arms_holds_only_if_all_do(
    run: Run, claim: str, arms: tuple[str, ...]
) -> None:
    streams = run.streams()
    for arm in arms:
        assert run.finding(claim, streams).outcome is REFUTED
        swap(streams, arm, "sync_clip_all")
    assert run.finding(claim, streams).outcome is HOLDS


ALTERED: list[tuple[str, Outcome, str, Change, tuple[int, ...]]] = [
    ("written_in_forward", REFUTED, "sync_clip_all",
     setting("after_forward", all_gather=0), (1,)),
    ("written_in_forward", REFUTED, "sync_clip_all",
     setting("after_forward", (1,), **digest("running_mean", "other")), (2,)),
    ("written_in_forward", REFUTED, "sync_no_clip",
     setting("at_layer", (1,), **digest("running_var", "other")), (0,)),
    ("momentum_none", HOLDS, "sync_momentum_none",
     setting("after_forward", **{"running_var.min": 0.01}), (0, 1, 2)),
    ("momentum_none", UNKNOWN, "sync_momentum_none",
     setting("after_forward", **{"running_var.min": 0.01}), (1,)),
    ("raise_eps", HOLDS, "sync_eps",
     lambda row: setting(row.phase, **{"running_var.min": 0.01})(row), (0, 1, 2)),
    ("plain_ranks_agree", UNKNOWN, "plain_clip_all",
     setting("after_forward", (1,), **digest("running_mean", "same")), (0, 1, 2)),
    ("clip_at_export", REFUTED, "sync_clip_at_export",
     setting("checkpoint", **{"running_var.min": float("nan")}), (1,)),
    ("clip_at_export", REFUTED, "sync_clip_at_export",
     setting("at_layer", (3,), **{"running_var.min": 0.0099}), (2,)),
    ("frozen_still_updated", HOLDS, "freeze_eval",
     setting("after_step", (2,), **digest("running_mean", "other")), (2,)),
    ("frozen_still_updated", UNKNOWN, "freeze_eval",
     setting("after_edit", **digest("params", "same")), (0, 1, 2)),
    ("frozen_still_updated", UNKNOWN, "freeze_eval",
     setting("after_forward", all_gather=1), (1,)),
    ("frozen_still_updated", UNKNOWN, "sync_no_clip",
     setting("after_forward", all_gather=0), (0, 1, 2)),
    ("broadcast_overwrites", UNKNOWN, "plain_clip_rank1",
     setting("checkpoint", **digest("running_var", "one"), **digest("running_mean", "one")),
     (0, 1, 2)),
    ("find_unused_allows_it", REFUTED, "freeze_late_find_unused",
     setting("after_edit", (2,), **digest("affine", "other")), (1,)),
    ("late_freeze_silent", UNKNOWN, "freeze_late",
     setting("after_edit", (0,), **digest("grad", "other")), (1,)),
    ("late_freeze_raises", UNKNOWN, "freeze_late", without("raised"), (1,)),
    ("forward_hook_on_plain", UNKNOWN, "plain_forward_hook", without("raised"), (1,)),
    ("late_freeze_raises", UNKNOWN, "freeze_late",
     setting("raised", error="Connection closed by peer"), (0, 1, 2)),
    ("find_unused_allows_it", REFUTED, "freeze_late_find_unused",
     setting("after_edit", (1,), **digest("grad", "other")), (2,)),
    ("freeze_kept", REFUTED, "freeze_kept",
     setting("after_edit", (2,), **digest("affine", "other")), (0,)),
]  # fmt: skip


@pytest.mark.parametrize(("claim", "outcome", "arm", "alter", "ranks"), ALTERED)
def test_one_altered_record(
    run: Run, claim: str, outcome: Outcome, arm: str, alter: Change, ranks: tuple[int, ...]
) -> None:
    streams = run.streams()
    change(streams, arm, alter, ranks)
    assert run.finding(claim, streams).outcome is outcome


def test_a_write_behind_backward_would_be_seen(run: Run) -> None:
    streams = run.streams()
    late_write(streams, "sync_clip_all")
    assert run.finding("sync_after_backward", streams).outcome is HOLDS
    assert run.finding("written_in_forward", streams).outcome is REFUTED


@pytest.mark.parametrize(("steps", "outcome"), [((1, 2), HOLDS), ((2,), UNKNOWN)])
def test_an_overwritten_clip_would_be_seen(
    run: Run, steps: tuple[int, ...], outcome: Outcome
) -> None:
    streams = run.streams()
    like_twin(streams, "sync_clip_all", "sync_no_clip", steps)
    assert run.finding("clip_overwritten", streams).outcome is outcome


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1 + 2e-8, HOLDS), (1 + 2e-6, UNKNOWN), (1 + 1e-3, REFUTED)]
)
def test_the_decay_is_exact_to_the_last_bits(
    run: Run, tmp_path: Path, factor: float, outcome: Outcome
) -> None:
    streams = run.streams()
    scaled(run, streams, "sync_clip_all", "after_forward", factor, tmp_path)
    finding = run.finding("clip_decays", streams)
    assert finding.outcome is outcome
    assert finding.multiple is not None


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1 + 1e-7, HOLDS), (1 + 3e-6, UNKNOWN), (1 + 1e-3, REFUTED)]
)
def test_a_gap_to_one_process_is_told_from_rounding(
    run: Run, tmp_path: Path, factor: float, outcome: Outcome
) -> None:
    streams = run.streams()
    scaled(run, streams, "sync_no_clip", "checkpoint", factor, tmp_path)
    assert run.finding("matches_one_process", streams).outcome is outcome


def test_the_quiet_channel_alone_shows_in_the_gap_to_one_process(run: Run, tmp_path: Path) -> None:
    streams = run.streams()
    for rank, stream in streams["sync_no_clip"].items():
        values = np.fromfile(stream.tensors)
        (row,) = (row for row in stream.rows if row.phase == "checkpoint")
        offset, count = row.snapshots["running_var"]
        saved = values[offset : offset + count]
        quiet = int(saved.argmin())
        moved = 1e-4 * saved[quiet]
        # Beside the other channels that is rounding.
        assert moved / np.linalg.norm(saved) < 4 * 2.0**-23
        saved[quiet] += moved
        path = tmp_path / f"{rank}.f64"
        values.tofile(path)
        streams["sync_no_clip"][rank] = dataclasses.replace(stream, tensors=path)
    assert run.finding("matches_one_process", streams).outcome is REFUTED


def test_an_edit_is_lost_only_if_the_variance_is(run: Run) -> None:
    streams = run.streams()
    edited = {
        row.step + 1: row.metrics["running_var.digest"]
        for row in streams["plain_clip_rank1"][1].rows
        if row.phase == "after_edit" and "running_var.digest" in row.metrics
    }

    def alter(row: Row) -> Row:
        if row.phase != "at_layer" or row.step not in edited:
            return row
        return metrics(row, **{"running_var.digest": edited[row.step]})

    change(streams, "plain_clip_rank1", alter, (1,))
    assert run.finding("clip_lost_off_rank0", streams).outcome is REFUTED


def test_too_few_permutations_decide_nothing(run: Run) -> None:
    streams = run.streams()
    change(streams, "one_process", lambda row: row if row.repeat < 19 else None, (0,))
    assert run.finding("matches_one_process", streams).outcome is UNKNOWN


def test_one_edit_that_survives_leaves_the_loss_undecided(run: Run) -> None:
    streams = run.streams()
    kept = {
        row.step + 1: row.metrics
        for row in streams["plain_clip_rank1"][1].rows
        if row.phase == "after_edit" and "running_var.digest" in row.metrics
    }

    def alter(row: Row) -> Row:
        if row.phase != "at_layer" or row.step != 1:
            return row
        return metrics(row, **{f"{b}.digest": kept[1][f"{b}.digest"] for b in BUFFERS})

    change(streams, "plain_clip_rank1", alter, (1,))
    assert run.finding("clip_lost_off_rank0", streams).outcome is UNKNOWN


# What makes an experiment void, and what missing records do --------------------------------------


def test_a_bound_that_edits_nothing_is_named(run: Run) -> None:
    streams = run.streams()
    for arm in ("sync_clip_all", "sync_momentum_none", "plain_clip_rank1"):
        swap(streams, arm, "sync_no_clip")
    found = run.judged(streams, clip=1e-9)
    for claim in ("clip_overwritten", "clip_decays", "momentum_none", "clip_lost_off_rank0"):
        assert found[claim].outcome is UNKNOWN
        assert "scenario.clip=1e-09 edits nothing" in found[claim].reason
    for claim in ("clip_on_all_ranks", "raise_eps", "clip_at_export", "broadcast_off"):
        assert found[claim].outcome is UNKNOWN
        assert "scenario.clip=1e-09 needs no remedy" in found[claim].reason


def test_statistics_that_never_move_are_named(run: Run) -> None:
    streams = run.streams()
    swap(streams, "sync_no_clip", "freeze_kept")
    found = run.judged(streams, momentum=0.0)
    for claim in ("sync_after_backward", "written_in_forward", "plain_ranks_agree", "freeze_kept"):
        assert found[claim].outcome is UNKNOWN
        assert "scenario.momentum=0.0" in found[claim].reason


def test_a_layer_that_keeps_nothing_is_named(run: Run) -> None:
    found = run.judged(run.streams(), momentum=1.0)
    for claim in ("clip_overwritten", "clip_lost_off_rank0", "broadcast_overwrites"):
        assert found[claim].outcome is UNKNOWN
        assert "scenario.momentum=1.0" in found[claim].reason


def reproduced(results: Path, *words: str, permutations: int = 0) -> Mapping[str, Finding]:
    command = [sys.executable, "-m", "launch", "scenario=syncbn_clip", "gpus=2", "device=cpu"]
    command += [f"scenario.permutations={permutations}", f"results={results}", "quiet=true", *words]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=False)
    (verdict,) = results.rglob("verdict.json")
    return decide(case.SCENARIO, "syncbn_clip", Tables.read(Layout(verdict.parent))).findings


def test_a_momentum_too_small_to_move_a_clip_shows_no_decay_and_needs_no_remedy(
    tmp_path: Path,
) -> None:
    found = reproduced(tmp_path, "scenario.momentum=1e-12")
    for claim in ("clip_decays", "clip_on_all_ranks", "clip_on_rank0", "broadcast_off"):
        assert found[claim].outcome is UNKNOWN, found[claim]
        assert "scenario.momentum=1e-12" in found[claim].reason


def test_a_channel_without_any_variance_is_rounding_off_one_process(tmp_path: Path) -> None:
    found = reproduced(tmp_path, "scenario.quiet=0", permutations=20)
    assert found["matches_one_process"].outcome is HOLDS, found["matches_one_process"]


def test_statistics_that_overflow_decide_nothing(tmp_path: Path) -> None:
    found = reproduced(tmp_path, "scenario.lr=1e30")
    for name, finding in found.items():
        assert finding.outcome in (CLAIMS[name].expects, UNKNOWN), (name, finding.reason)
    void = ("sync_after_backward", "clip_overwritten", "momentum_none", "matches_one_process")
    for claim in (*void, "clip_on_rank0"):
        assert found[claim].outcome is UNKNOWN, found[claim]
        assert "scenario.lr=1e+30" in found[claim].reason


@pytest.mark.parametrize("arm", [arm.name for arm in case.SCENARIO.arms])
@pytest.mark.parametrize("how", ["no stream", "cut off", "half the records"])
def test_missing_records_never_turn_a_finding_over(run: Run, arm: str, how: str) -> None:
    streams = run.streams()
    rank = len(streams[arm]) - 1
    stream = streams[arm][rank]
    if how == "no stream":
        del streams[arm][rank]
    elif how == "cut off":
        streams[arm][rank] = dataclasses.replace(stream, rows=stream.rows[:9], end=None)
    else:
        streams[arm][rank] = dataclasses.replace(stream, rows=stream.rows[::2])
    found = run.judged(streams)
    lost = [name for name, finding in found.items() if finding.outcome is UNKNOWN]
    assert lost, f"no claim needs rank {rank} of {arm}"
    for name, finding in found.items():
        assert finding.outcome in (CLAIMS[name].expects, UNKNOWN), (name, finding.reason)


def test_without_records_nothing_is_decided(run: Run) -> None:
    found = run.judged({arm.name: {} for arm in run.plan.arms})
    assert {finding.outcome for finding in found.values()} == {UNKNOWN}


# The scenario as a whole -------------------------------------------------------------------------


def test_the_real_run_finds_what_is_expected(run: Run) -> None:
    verdict = decide(case.SCENARIO, "syncbn_clip", Tables.read(run.layout))
    assert verdict.conclusion is Conclusion.AS_EXPECTED
    assert "in forward, not after backward" in verdict.headline
    assert "undecided" not in verdict.headline


def test_the_headline_follows_the_findings(run: Run) -> None:
    found = dict(run.judged(run.streams()))
    real = case.SCENARIO.headline(found)
    told = ("written_in_forward", "clip_overwritten", "broadcast_overwrites",
            "frozen_still_updated")  # fmt: skip
    for name in told:
        turned = REFUTED if found[name].outcome is HOLDS else HOLDS
        other = dataclasses.replace(found[name], outcome=turned)
        assert case.SCENARIO.headline({**found, name: other}) != real
        undecided = {**found, name: unknown("no records")}
        assert "undecided" in case.SCENARIO.headline(undecided)


def test_names_are_unique_and_the_branches_exist() -> None:
    for name in case.SCENARIO.differs:
        assert callable(getattr(case, name))
    assert len({arm.name for arm in case.SCENARIO.arms}) == len(case.SCENARIO.arms)
    assert len(CLAIMS) == len(case.SCENARIO.claims)


class Before213:
    def __init__(self, module: Any, device_ids: Any = None, broadcast_buffers: bool = True,
                 find_unused_parameters: bool = False) -> None:  # fmt: skip
        self.sent = {"broadcast_buffers": broadcast_buffers}


class Since213:
    def __init__(self, module: Any, device_ids: Any = None, broadcast_buffers: Any = None,
                 find_unused_parameters: bool = False,
                 forward_sync_buffers: Any = None) -> None:  # fmt: skip
        assert broadcast_buffers is None, "the old spelling warns"
        self.sent = {"forward_sync_buffers": forward_sync_buffers}


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize(
    ("ddp", "name"), [(Before213, "broadcast_buffers"), (Since213, "forward_sync_buffers")]
)
def test_the_broadcast_is_switched_in_either_spelling(
    monkeypatch: pytest.MonkeyPatch, ddp: Any, name: str, on: bool
) -> None:
    from scenarios._syncbn_clip import norm

    class Two:
        world_size, device = 2, "cpu"

    monkeypatch.setattr(norm, "DistributedDataParallel", ddp)
    net: Any = norm.wrapped(Any, Two(), broadcast=on, find_unused=False)  # type: ignore[arg-type]
    assert net.sent == {name: on}


def test_listing_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, scenarios; scenarios.load('syncbn_clip');"
        "assert not {'torch', 'numpy', 'pandas'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clip", -1.0),
        ("clip", 1e40),
        ("steps", 2),
        ("batch", 0),
        ("momentum", 1.5),
        ("permutations", -1),
    ],
)
def test_values_out_of_range_are_refused(run: Run, key: str, value: float) -> None:
    (said,) = violations(case.Params, {**run.plan.params, key: value})
    assert f"scenario.{key}={value}" in said
